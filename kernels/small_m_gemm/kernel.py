"""Products of some rows with a small weight, which fit better between a layer's other kernels than cuBLAS's.

    parts     parts[s] = x[:, s] W[:, s]^T, float32      s: an equal share of the inputs; the norm behind adds them up
    product   out = x W^T
    gate      out = silu(x W_gate^T) * (x W_up^T)        W holds the gate's rows, then the up projection's

Such a product takes a few microseconds, of which much is the way to it and from it. While the kernel before still runs (PDL), a
program asks for its part of the weight, so that it comes to the L2 cache, and the kernel behind may do the same while this one runs:
attention for its first keys and values. With parts more programs have work; cuBLAS adds up parts too, but in a kernel of its own,
where here the kernel that follows anyway does it (kernels/norm). Rounded where the unfused operations round.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl, tables

LINE = 64  # elements of 16 bits that memory sends at once


@triton.jit
def _ask_for(line, first, EACH: tl.constexpr, LINES: tl.constexpr):
    """Inputs first .. first + EACH - 1 of rows of the weight; LINES is a power of two, enough for them."""
    asked = line + (first + tl.minimum(tl.arange(0, LINES) * 64, EACH - 1))[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [asked], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rows"])
def _small_m_gemm(
    x, w, out, rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, EACH: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """EACH: inputs of a part, or all of them. out has one [rows, OUTPUTS] for each part."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = split * EACH
    line = w + n[:, None].to(tl.int64) * INPUTS
    line_up = line + OUTPUTS * INPUTS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        _ask_for(line, first, EACH, LINES)
        if GATE:
            _ask_for(line_up, first, EACH, LINES)
        tl.extra.cuda.gdc_wait()
    real = (m < rows)[:, None]
    result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in tl.range(first, first + EACH, BLOCK_K, num_stages=STAGES):
        k = begin + tl.arange(0, BLOCK_K)
        y = tl.load(x + m[:, None] * INPUTS + k[None, :], mask=real, other=0.0)
        result = tl.dot(y, tl.load(line + k[None, :]).T, result)
        if GATE:
            up = tl.dot(y, tl.load(line_up + k[None, :]).T, up)
    if GATE:
        dtype = out.dtype.element_ty
        result = result.to(dtype).to(tl.float32)
        result = (result / (1.0 + tl.exp(-result))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    to = out + (split * rows + m)[:, None].to(tl.int64) * OUTPUTS + n[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=real)


class Shape(NamedTuple):
    """Sizes of a tile (block_n: of a gate's columns, and as many of up's), parts of the inputs."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int

    def fits(self, outputs: int, inputs: int) -> bool:
        return outputs % self.block_n == 0 and inputs % (self.splits * self.block_k) == 0


Key = tuple[int, int, str]  # rows and columns of the weight; "parts", "product" or "gate"


@tables.remembered
def _table() -> dict[Key, list[tuple[int, int, Shape]]]:
    """Rows above, up to, and the shape. Nothing without a table of this processor."""
    return {
        key: [(over, to, Shape(*shape)) for over, to, shape in rows]
        for key, rows in tables.products("small_m_gemm").items()
    }


@tables.remembered
def shape_for(rows: int, outputs: int, inputs: int, use: str) -> Shape | None:
    """The shape of the kernel; None where cuBLAS is faster, as measured."""
    tables.note_use("small_m_gemm", (outputs, inputs, use))
    return tables.for_rows(_table().get((outputs, inputs, use), []), rows)


def warm_rows() -> set[int]:
    """So many rows meet every variant of the kernel that steps may use."""
    return {to for known in _table().values() for _, to, _ in known}


def small_m_gemm(x: Tensor, w: Tensor, shape: Shape, use: str) -> Tensor:
    """x [m, k], w [n, k], dense, of 16 bits -> parts: float32 [splits, m, n]; product: [m, n]; gate: [m, n / 2]."""
    rows, inputs = x.shape
    outputs = w.shape[0] // 2 if use == "gate" else w.shape[0]
    assert shape.fits(outputs, inputs)
    assert shape.splits == 1 or use == "parts"
    each = inputs // shape.splits
    sizes, dtype = ((shape.splits, rows, outputs), torch.float32) if use == "parts" else ((rows, outputs), x.dtype)
    out = torch.empty(sizes, dtype=dtype, device=x.device)
    _small_m_gemm[(outputs // shape.block_n, shape.splits, triton.cdiv(rows, shape.block_m))](
        x, w, out, rows,
        INPUTS=inputs, OUTPUTS=outputs, EACH=each, GATE=use == "gate", BLOCK_M=shape.block_m, BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k, STAGES=shape.stages, LINES=triton.next_power_of_2(triton.cdiv(each, LINE)),
        num_warps=shape.warps, num_stages=shape.stages, **pdl.options(x),
    )  # fmt: skip
    return out
