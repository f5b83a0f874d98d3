"""Products of some rows with a small weight, left as parts of sums, which the norm behind them adds up.

    parts[s] = x[:, s] W[:, s]^T         s: an equal share of the inputs; float32
    residual += sum of parts, rounded    (kernels/norm: add_rms_norm with parts)

Such a product takes a few microseconds, and few programs would have work if each computed whole sums. cuBLAS splits them too, and adds
the parts in a kernel of its own; here the kernel that follows anyway does that. While the kernel before still runs (PDL), a program
asks for its part of the weight, so that it comes to the L2 cache.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl, tables

LINE = 64  # elements of 16 bits that memory sends at once


@triton.jit(do_not_specialize=["rows"])
def _split_product(
    x, w, parts, rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, EACH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """EACH: inputs of a part. LINES: of the weight that a program asks for in each row, a power of two, enough for a part."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = split * EACH
    line = w + n[:, None].to(tl.int64) * INPUTS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        asked = line + (first + tl.minimum(tl.arange(0, LINES) * 64, EACH - 1))[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [asked], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.extra.cuda.gdc_wait()
    real = (m < rows)[:, None]
    result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in tl.range(first, first + EACH, BLOCK_K, num_stages=STAGES):
        k = begin + tl.arange(0, BLOCK_K)
        y = tl.load(x + m[:, None] * INPUTS + k[None, :], mask=real, other=0.0)
        tile = tl.load(line + k[None, :])
        result = tl.dot(y, tile.T, result)
    to = parts + (split * rows + m)[:, None].to(tl.int64) * OUTPUTS + n[None, :]
    tl.store(to, result, mask=real)


class Shape(NamedTuple):
    """Sizes of a tile, parts of the inputs."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int

    def fits(self, outputs: int, inputs: int) -> bool:
        return outputs % self.block_n == 0 and inputs % (self.splits * self.block_k) == 0


@cache
def _table() -> dict[tuple[int, int], list[tuple[int, int, Shape]]]:
    """By outputs and inputs: rows above, up to, and the shape. Nothing without a table of this very GPU."""
    table = tables.own("split_product") if torch.cuda.is_available() else None
    return {
        (each["outputs"], each["inputs"]): [(over, to, Shape(*shape)) for over, to, shape in each["rows"]]
        for each in (table or {"products": []})["products"]
    }


@cache
def shape_for(rows: int, outputs: int, inputs: int) -> Shape | None:
    """None where cuBLAS and the norm are faster, as measured."""
    known = _table().get((outputs, inputs), [])
    return next((shape for over, to, shape in known if over < rows <= to), None)


def warm_rows() -> set[int]:
    """So many rows meet every variant of the kernel that steps may use."""
    return {to for known in _table().values() for _, to, _ in known}


def split_product(x: Tensor, w: Tensor, shape: Shape) -> Tensor:
    """x [m, k], w [n, k], dense, of 16 bits -> float32 [splits, m, n]."""
    rows, inputs = x.shape
    outputs = w.shape[0]
    assert shape.fits(outputs, inputs)
    use_pdl = x.is_cuda and pdl.supported()
    each = inputs // shape.splits
    parts = torch.empty(shape.splits, rows, outputs, dtype=torch.float32, device=x.device)
    _split_product[(outputs // shape.block_n, shape.splits, triton.cdiv(rows, shape.block_m))](
        x, w, parts, rows,
        INPUTS=inputs, OUTPUTS=outputs, EACH=each, BLOCK_M=shape.block_m, BLOCK_N=shape.block_n, BLOCK_K=shape.block_k,
        STAGES=shape.stages, LINES=triton.next_power_of_2(triton.cdiv(each, LINE)), PDL=use_pdl,
        num_warps=shape.warps, num_stages=shape.stages, **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
    return parts
