"""The records of products of few rows: whole, with a gate, and in parts that the norm behind them adds up."""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.gemm.kernel import gemm
from meshlm.kernels.gemv.kernel import shared_bytes
from meshlm.kernels.norm.kernel import add_rms_norm
from meshlm.kernels.op import Launch, Op
from meshlm.kernels.silu_mul.kernel import silu_mul
from meshlm.kernels.small_m_gemm import kernel, reference
from meshlm.kernels.small_m_gemm.kernel import Key, Shape
from meshlm.kernels.tuning import core
from meshlm.kernels.tuning.core import PLAIN, Setting, Ways

ROWS = [8, 16, 32, 48, 64, 96, 128, 192, 256]
QUICK_ROWS = [8, 16, 32, 64, 128]
SPLITS = {"parts": (2, 4, 8, 16), "product": (1,), "gate": (1,)}
PROGRAMS = (48, 800)  # fewer leave multiprocessors idle, more come one after the other
FEW_PROGRAMS = 8  # of a product that is small whatever its shape
SHARED_BYTES = 200 << 10


def candidates(rows: int, key: Key) -> list[Shape]:
    """All shapes that fit the sizes and fill a GPU."""
    outputs, inputs, use = key
    tiles = 2 if use == "gate" else 1
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    stages = (3,) if use == "parts" else (4,)
    fewest = PROGRAMS[0] if outputs >= 512 else FEW_PROGRAMS
    some = [Shape(block_m, *rest) for rest in product((32, 64, 128), (64, 128), SPLITS[use], (4,), stages)]
    return [
        shape
        for shape in some
        if shape.fits(outputs // tiles, inputs)
        and fewest <= outputs // tiles // shape.block_n * shape.splits * -(-rows // block_m) <= PROGRAMS[1]
        and (shape.block_m + tiles * shape.block_n) * shape.block_k * 2 * shape.stages <= SHARED_BYTES
    ]


def shapes(case: core.Case, device: torch.device, most: int | None) -> list[Shape]:
    """Those that this GPU has room for; of `most` those that have it nearest to two programs a multiprocessor."""
    outputs, inputs, use = case.key
    tiles, room = 2 if use == "gate" else 1, shared_bytes()
    found = [
        shape
        for shape in candidates(case.rows, (outputs, inputs, use))
        if (shape.block_m + tiles * shape.block_n) * shape.block_k * 2 * shape.stages <= room
    ]
    wanted = 2 * pdl.multiprocessors(device)

    def distance(shape: Shape) -> float:
        programs: float = outputs // tiles / shape.block_n * shape.splits * -(-case.rows // shape.block_m)
        return max(programs / wanted, wanted / programs)

    return found if most is None else sorted(found, key=distance)[:most]


def ways(case: core.Case, setting: Setting, weights: Callable[[int, int], list[Tensor]], most: int) -> Ways:
    """Beside the product as `gemm` computes it and the kernel behind it."""
    outputs, inputs, use = case.key
    make: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
    x, residual = torch.randn(case.rows, inputs, **make), torch.zeros(case.rows, outputs, **make)
    norm = torch.ones(outputs, **make)

    def behind(found: Tensor) -> Tensor:
        """The norm adds parts up, and the plain way has it behind the product too."""
        return add_rms_norm(found, residual, norm, 1e-6) if use == "parts" else found

    def plain(w: Tensor) -> Tensor:
        out = behind(gemm(x, w))
        return silu_mul(out) if use == "gate" else out

    runs: dict[core.Config, core.Run] = {PLAIN: plain}
    for shape in shapes(case, setting.device, None if setting.full else most):
        runs[tuple(shape)] = lambda w, shape=shape: behind(kernel.small_m_gemm(x, w, shape, use))  # type: ignore[misc]
    return Ways(weights(outputs, inputs), runs, residual.zero_)


def _make(dtype: torch.dtype, device: torch.device, rows: int, shape: Shape, use: str) -> Launch:
    """A product of two tiles' outputs, and of the inputs that a program has in two turns, or three."""
    shape = shape if use == "parts" else shape._replace(splits=1, block_n=min(64, shape.block_n))
    outputs, inputs = 2 * shape.block_n, shape.splits * shape.block_k * (2 if use == "parts" else 3)
    x = torch.randn(rows, inputs, device=device, dtype=dtype)
    w = torch.randn(outputs, inputs, device=device, dtype=dtype) / inputs**0.5
    of_use: dict[str, Callable[[], Tensor]] = {
        "parts": lambda: reference.parts(x, w, shape.splits),
        "product": lambda: reference.product(x, w),
        "gate": lambda: reference.gate(x, w),
    }
    beside = {"gemm": lambda: gemm(x, w)}
    return Launch(lambda: kernel.small_m_gemm(x, w, shape, use), of_use[use], w.nbytes, 2 * rows * w.numel(), beside)


SHAPES = [Shape(16, 32, 64, 2, 4, 3), Shape(32, 64, 64, 4, 4, 3), Shape(64, 128, 64, 2, 4, 3)]
NEAR = {"parts": 1, "product": 2, "gate": 4}
OPS = tuple(
    Op(f"small_m_gemm_{use}", _make, [(*case, use) for case in product((2, 17, 64, 65), SHAPES)], near=near)
    for use, near in NEAR.items()
)
