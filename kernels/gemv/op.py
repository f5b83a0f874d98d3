"""The records of products of one row, and the tiles that a start tries for them. Whole products are of Qwen3-0.6B and Llama-3.1-8B,
parts of a layer of Llama on two and four GPUs, which send or receive packets. Copies of each weight take turns, so that none is read
from the cache."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from math import log2
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.allreduce_rmsnorm.kernel import Workspace
from meshlm.kernels.gemv import kernel, reference
from meshlm.kernels.gemv.kernel import Tile, Turn, fold_of, gemv, parts_of, shape_of
from meshlm.kernels.norm.kernel import add_rms_norm, rms_norm
from meshlm.kernels.op import Case, Launch, Op
from meshlm.kernels.silu_mul.kernel import silu_mul
from meshlm.kernels.tuning import core
from meshlm.kernels.tuning.core import PLAIN, Setting, Ways

# outputs, inputs, gate, norm; Qwen3-0.6B, then Llama-3.1-8B, then one of two ranks of it
SHAPES: list[Case] = [
    (4096, 1024, False, True), (1024, 2048, False, False), (3072, 1024, True, True), (1024, 3072, False, False),
    (6144, 4096, False, True), (4096, 4096, False, False), (14336, 4096, True, True), (4096, 14336, False, False),
    (3072, 4096, False, False), (4096, 2048, False, False), (7168, 4096, True, False), (4096, 7168, False, False),
]  # fmt: skip
# ranks, outputs, inputs, gate, way: a layer of Llama-3.1-8B on two and on four GPUs
PARTS: list[Case] = [
    (2, 4096, 2048, False, "sends"), (2, 4096, 7168, False, "sends"), (2, 7168, 4096, True, "receives"),
    (2, 3072, 4096, False, "receives"), (2, 64128, 4096, False, "sends"), (4, 4096, 1024, False, "sends"),
    (4, 4096, 3584, False, "sends"), (4, 3584, 4096, True, "receives"), (4, 1536, 4096, False, "receives"),
    (4, 32064, 4096, False, "sends"),
]  # fmt: skip
WANTED = 128 << 10  # bytes; tiles that whole steps have chosen have 64 to 192 KiB under way
# BLOCK_N, warps, stages, programs per multiprocessor
CHOICES = list(product((1, 2, 4, 8, 16), (4, 8), (2, 3, 4), (1, 2, 4)))
EPS = 1e-6


def fitting(inputs: int, gate: bool, way: str = "") -> list[Tile]:
    """The tiles of which not too few are in flight, and which have room in a multiprocessor's shared memory."""
    lines = 2 if gate or way == "sends" else 1
    return [c for c in CHOICES if 32 << 10 <= under_way(c, inputs, lines, way) <= 224 << 10]


def under_way(tile: Tile, inputs: int, lines: int, way: str = "") -> int:
    """Bytes of a weight of bfloat16 that the programs of a multiprocessor have asked for at a time."""
    block_n, warps, stages, programs = tile
    return lines * block_n * sum(parts_of(inputs, fold_of(warps, 2), way)) * 2 * (stages - 1) * programs


def likely(inputs: int, gate: bool, each: int) -> list[Tile]:
    """Gives, of tiles with as many outputs and warps, the `each` whose programs together have most nearly WANTED bytes under way on a
    multiprocessor; those first that are nearest."""
    lines = 2 if gate else 1
    near = sorted(fitting(inputs, gate), key=lambda c: abs(log2(under_way(c, inputs, lines) / WANTED)))
    taken: Counter[tuple[int, int]] = Counter()
    found = []
    for choice in near:
        taken[choice[:2]] += 1
        if taken[choice[:2]] <= each:
            found.append(choice)
    return found


def tiles(outputs: int, inputs: int, gate: bool, most: int | None) -> list[Tile]:
    """The tile that is used without a measurement, and others that have room: `most` of them, or all that are likely."""
    others = likely(inputs, gate, 2) if most is None else likely(inputs, gate, 1)[:most]
    return list(dict.fromkeys([shape_of(outputs, inputs, gate), *others]))


def ways(case: core.Case, setting: Setting, weights: Callable[[int, int], list[Tensor]], most: int) -> Ways:
    """With the norm that is in front of gate and up and of query, key and value, which have more outputs than inputs: what each program
    does before it multiplies decides how many there should be. Beside cuBLAS with a norm and a gate of their own."""
    outputs, inputs, gate = case.key
    make: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
    x, norm, normed = torch.randn(1, inputs, **make), torch.ones(inputs, **make), gate or outputs > inputs
    options: dict[str, Any] = {"norm": norm, "eps": EPS} if normed else {}

    def plain(w: Tensor) -> Tensor:
        out = F.linear(rms_norm(x, norm, EPS) if normed else x, w)
        return silu_mul(out) if gate else out

    runs: dict[core.Config, core.Run] = {PLAIN: plain}
    for tile in tiles(outputs, inputs, gate, None if setting.full else most):
        runs[tile] = lambda w, tile=tile: kernel.gemv(x, w, gate="silu" if gate else "", shape=tile, **options)[0]  # type: ignore[misc]
    return Ways(weights(outputs * (2 if gate else 1), inputs), runs)


def _weights(dtype: torch.dtype, device: torch.device, lines: int, inputs: int) -> Tensor:
    """More of them than any cache holds; two where nothing is timed."""
    copies = max(4, (256 << 20) // (lines * inputs * 2)) if device.type == "cuda" else 2
    weights: Tensor = (torch.randn(copies, lines, inputs, device=device) / inputs**0.5).to(dtype)
    return weights


def _make(
    dtype: torch.dtype, device: torch.device, outputs: int, inputs: int, gate: bool, norm: bool,
    tile: Tile | None = None,
) -> Launch:  # fmt: skip
    """Beside it cuBLAS with a norm and a gate of their own."""
    weights = _weights(dtype, device, outputs * (2 if gate else 1), inputs)
    x, residual = torch.randn(2, 1, inputs, device=device).to(dtype)
    factor, act = torch.rand(inputs, device=device).to(dtype) + 0.5, "silu" if gate else ""
    options: dict[str, Any] = {"norm": factor, "residual": residual, "eps": EPS} if norm else {}
    chosen = tile or shape_of(outputs, inputs, gate)

    def run() -> tuple[Tensor, Tensor]:
        for weight in weights:
            found = gemv(x, weight, gate=act, shape=chosen, **options)
        return found

    def by_cublas() -> None:
        for weight in weights:
            out = F.linear(add_rms_norm(x, residual, factor, EPS) if norm else x, weight)
            if gate:
                silu_mul(out)

    def expected() -> tuple[Tensor, Tensor]:
        return reference.gemv(x, weights[-1], gate=act, **options)

    return Launch(run, expected, weights[0].nbytes, beside={"cublas": by_cublas}, copies=len(weights))


def turn_alone(size: int, columns: int, device: torch.device) -> tuple[Turn, object]:
    """A turn whose packets have all come, in a room with peers that are memory of this GPU (no link takes part); and that memory."""
    inbox, other = (torch.full((2, size, 1, columns // 2), 1 << 32, dtype=torch.int64, device=device) for _ in range(2))
    addresses = torch.tensor([inbox.data_ptr()] + [other.data_ptr()] * (size - 1), device=device)
    turns = torch.ones(1, dtype=torch.int32, device=device)
    return Turn(Workspace(0, size, 1, columns, (addresses, addresses, addresses), turns, 1), 0), (inbox, other)


def _part(
    dtype: torch.dtype, device: torch.device, size: int, outputs: int, inputs: int, gate: bool, way: str,
    tile: Tile | None = None,
) -> Launch:  # fmt: skip
    """One that receives gets zeros, and its stream is the residual; of one that sends nothing comes back."""
    weights = _weights(dtype, device, outputs * (2 if gate else 1), inputs)
    x, residual = torch.randn(2, 1, inputs, device=device).to(dtype)
    turn, kept = turn_alone(size, outputs if way == "sends" else inputs, device)
    chosen, act = tile or shape_of(outputs, inputs, gate, way), "silu" if gate else ""
    normed: dict[str, Any] = {"norm": torch.ones_like(x[0]), "residual": residual, "eps": EPS}
    options = {"sends": turn} if way == "sends" else {"receives": turn, **normed}

    def run(memory: object = kept) -> tuple[Tensor, ...]:
        for weight in weights:
            found = gemv(x, weight, gate=act, shape=chosen, **options)
        return found if way == "receives" else found[1:]

    def expected() -> tuple[Tensor, ...]:
        return reference.gemv(torch.zeros_like(x), weights[-1], gate=act, **normed) if way == "receives" else (x,)

    return Launch(run, expected, weights[0].nbytes, copies=len(weights))


OPS = (
    Op(
        "gemv", _make, [(48, 64, False, False), (100, 576, True, True), (7, 1536, False, True), (5, 5000, True, False)], SHAPES, near=2,
        candidates=lambda case: fitting(case[1], case[2]), tuned=SHAPES,
    ),
    Op(
        "gemv_of_a_part", _part, [(2, 16, 72, True, "receives")], PARTS, near=2, dtypes=(torch.bfloat16,),
        candidates=lambda case: fitting(case[2], case[3], case[4]), tuned=PARTS,
    ),
)  # fmt: skip
