"""The record of gate and up projection with the gate in one kernel. Its tiles are for many rows of 16 bits."""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from meshlm.kernels.gate_up_silu import kernel, reference
from meshlm.kernels.gate_up_silu.kernel import Shape
from meshlm.kernels.gemm.kernel import gemm
from meshlm.kernels.op import Launch, Op
from meshlm.kernels.silu_mul.kernel import silu_mul
from meshlm.kernels.tuning import core
from meshlm.kernels.tuning.core import PLAIN, Setting, Ways

# What Triton 3.6 compiles for compute capability 9.0 without spilling registers.
CANDIDATES = [
    *(Shape(128, 128, 64, 8, stages, flat) for stages in (3, 4) for flat in (False, True)),
    *(Shape(128, 128, 128, 8, 2, flat) for flat in (False, True)),
    *(Shape(256, 64, 64, 8, 4, flat) for flat in (False, True)),
    *(Shape(128, 64, 64, 8, 3, flat, 2) for flat in (False, True)),
    Shape(128, 64, 64, 4, 3, True, 2),
    Shape(64, 128, 64, 4, 2, True, 2),
]
SMALL = [Shape(16, 32, 16, 4, 3), Shape(32, 16, 32, 4, 3, True), Shape(16, 32, 16, 4, 3, False, 2)]
ROWS = [512, 768, 1024, 1536, 2048, 3072, 4096, 8192]
QUICK_ROWS = [1024, 2048, 4096, 8192]


def ways(case: core.Case, setting: Setting, weights: Callable[[int, int], list[Tensor]], most: int) -> Ways:
    outputs, inputs = case.key
    make: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
    x = torch.randn(case.rows, inputs, **make)
    runs: dict[core.Config, core.Run] = {PLAIN: lambda w: silu_mul(gemm(x, w))}
    for shape in CANDIDATES if setting.full else CANDIDATES[:: len(CANDIDATES) // most]:
        runs[tuple(shape)] = lambda w, shape=shape: kernel.gate_up_silu(x, w, shape)  # type: ignore[misc]
    return Ways(weights(outputs, inputs), runs)


def _make(
    dtype: torch.dtype, device: torch.device, rows: int, outputs: int, inputs: int, shape: Shape = CANDIDATES[0]
) -> Launch:
    """Beside it the unfused operations."""
    x = torch.randn(rows, inputs, device=device, dtype=dtype)
    w = torch.randn(2 * outputs, inputs, device=device, dtype=dtype) / inputs**0.5
    flop, beside = 2 * rows * w.numel(), {"unfused": lambda: silu_mul(gemm(x, w))}
    return Launch(
        lambda: kernel.gate_up_silu(x, w, shape), lambda: reference.gate_up_silu(x, w), 0, flop, beside
    )  # fmt: skip


# 300 rows: more tiles than there are programs in the interpreter. 72 columns: tiles end in the middle.
ODD = [(1, 32, 16), (33, 72, 56), (70, 256, 128), (300, 40, 64)]
OPS = (
    Op(
        "gate_up_silu", _make, [(*sizes, shape) for sizes, shape in product(ODD, SMALL)],
        [(rows, outputs, inputs) for outputs, inputs in ((3072, 1024), (14336, 4096)) for rows in ROWS], near=4,
    ),
)  # fmt: skip
