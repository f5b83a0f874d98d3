"""Gate and up projection of many rows and the gate itself in one kernel: their product is not written to memory and read again.

    out = silu(x W_gate^T) * (x W_up^T)        W holds the gate's rows, then the up projection's

As many programs as run at once take tiles of the result in turn. Tiles that follow one another share rows of x or of W, in the L2
cache; those of both come by bulk copies (TMA). A tile of gate and the same columns of up are one tile of a product, twice as wide.
Rounded where the unfused operations round. Whether this is faster than cuBLAS and the kernel behind it, a tuner finds for each size.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from meshlm.kernels import pdl, tables

GROUP = 8  # tiles of x's rows that share the columns of W


@triton.jit
def _tile_at(nth, down, across, GROUP: tl.constexpr):
    """Row and column of the nth tile, of down x across: by columns within GROUP rows of tiles."""
    first = nth // (GROUP * across) * GROUP
    height = tl.minimum(GROUP, down - first)
    within = nth % (GROUP * across)
    return first + within % height, within // height


@triton.jit(do_not_specialize=["rows"])
def _gate_up_silu(
    x, w, out, rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, FLAT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """x, w and out are descriptors of [rows, INPUTS], [2, OUTPUTS, INPUTS] and [rows, OUTPUTS]."""
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(OUTPUTS, BLOCK_N)
    for nth in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=FLAT):
        row, column = _tile_at(nth, down, across, GROUP)
        both = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        for k in tl.range(0, INPUTS, BLOCK_K, num_stages=STAGES):
            y = x.load([row * BLOCK_M, k])
            weight = w.load([0, column * BLOCK_N, k]).reshape(2 * BLOCK_N, BLOCK_K)
            both = tl.dot(y, weight.T, both)
        both = both.to(out.dtype).to(tl.float32)
        gate, up = both.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        gate = (gate / (1.0 + tl.exp(-gate))).to(out.dtype).to(tl.float32)
        out.store([row * BLOCK_M, column * BLOCK_N], (gate * up).to(out.dtype))


class Shape(NamedTuple):
    """Sizes of a tile (block_n: of a gate's columns, and as many of up's), warps, stages; programs on each multiprocessor.

    flat: a program asks for its next tile's inputs while it writes this one's results."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    flat: bool = False
    programs: int = 1

    def grid(self, rows: int, outputs: int, device: torch.device) -> tuple[int]:
        """The number of programs: one for each tile, or as many as run at once."""
        tiles = triton.cdiv(rows, self.block_m) * triton.cdiv(outputs, self.block_n)
        return (min(tiles, self.programs * pdl.multiprocessors(device)),)


Key = tuple[int, int]  # rows and columns of the weight


@tables.remembered
def _table() -> dict[Key, list[tuple[int, int, Shape]]]:
    """Rows above, up to, and the shape. Nothing without a table of this processor."""
    return {
        key: [(over, to, Shape(*shape)) for over, to, shape in rows]
        for key, rows in tables.products("gate_up_silu").items()
    }


@tables.remembered
def shape_for(rows: int, outputs: int, inputs: int) -> Shape | None:
    """The shape of the kernel; None where the unfused operations are faster, as measured."""
    tables.note_use("gate_up_silu", (outputs, inputs))
    return tables.for_rows(_table().get((outputs, inputs), []), rows)


def warm_rows() -> set[int]:
    """So many rows meet every variant of the kernel that steps may use."""
    return {to for known in _table().values() for _, to, _ in known}


def gate_up_silu(x: Tensor, w: Tensor, shape: Shape) -> Tensor:
    """x [m, k], w [2n, k], dense, n and k multiples of 8 -> [m, n]."""
    rows, inputs = x.shape
    outputs = w.shape[0] // 2
    block_m, block_n, block_k = shape[:3]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _gate_up_silu[shape.grid(rows, outputs, x.device)](
        TensorDescriptor(x, [rows, inputs], [inputs, 1], [block_m, block_k]),
        TensorDescriptor(w, [2, outputs, inputs], [outputs * inputs, inputs, 1], [2, block_n, block_k]),
        TensorDescriptor(out, [rows, outputs], [outputs, 1], [block_m, block_n]), rows,
        INPUTS=inputs, OUTPUTS=outputs, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        STAGES=shape.stages, FLAT=shape.flat, GROUP=GROUP, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out
