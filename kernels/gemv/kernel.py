"""Products of one row with a weight, bound by reading the weight once; the norm before and the gate after come for free.

    h = x + residual                                  (NORM with a residual; rounded to the stream's dtype)
    y = h / sqrt(mean(h^2) + eps) * norm_weight       (NORM)
    out = y W^T + bias
    out = silu(y W_gate^T) * (y W_up^T)               (GATE: W holds the gate's rows, then the up projection's)

A program computes BLOCK_N outputs, then the next such block, up to the end; there are as many programs as run at once. It keeps y in
registers. Its tiles of the weight are one stream of asynchronous copies, STAGES deep, so that the memory is never without requests; the
stream starts while the kernel before this one still runs (PDL). Tensor cores would add nothing for one row.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl, tables


@triton.jit
def _tile(weight, n, k, real, K: tl.constexpr, WHOLE: tl.constexpr):
    at = weight + n[:, None].to(tl.int64) * K + k[None, :]
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=real[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def _row(
    x, residual, norm_weight, stream, k, first, eps,
    K: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y float32 [BLOCK_K]; the first program stores the stream."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    h = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    if NORM:
        if ADD:
            h += tl.load(residual + k, mask=k < K, other=0.0).to(tl.float32)
            h = h.to(stream.dtype.element_ty).to(tl.float32)
            if first == 0:
                tl.store(stream + k, h.to(stream.dtype.element_ty), mask=k < K)
        scale = tl.rsqrt(tl.sum(h * h, axis=0) / K + eps)
        h *= tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32) * scale
    return h


@triton.jit
def _gemv(
    x, residual, norm_weight, weight, bias, out, stream, blocks, eps,
    K: tl.constexpr, OUTPUTS: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0)
    nth, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    whole: tl.constexpr = (K == BLOCK_K) and (OUTPUTS % BLOCK_N == 0)
    h = tl.zeros((BLOCK_K,), tl.float32)
    for block in tl.range(first, blocks, tl.num_programs(0), num_stages=STAGES):
        n = block * BLOCK_N + nth
        real = n < OUTPUTS
        w = _tile(weight, n, k, real, K, whole)
        if GATE:
            w_up = _tile(weight, n + OUTPUTS, k, real, K, whole)
        if block == first:  # in the loop, because the stream of copies starts where the loop does
            h = _row(x, residual, norm_weight, stream, k, first, eps, K, NORM, ADD, PDL)
        result = tl.sum(w.to(tl.float32) * h[None, :], axis=1)
        if GATE:
            up = tl.sum(w_up.to(tl.float32) * h[None, :], axis=1)
            result = result / (1.0 + tl.exp(-result)) * up
        if BIAS:
            result += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)
        tl.store(out + n, result.to(out.dtype.element_ty), mask=real)


@cache
def most_bytes() -> int:
    """Of a weight; larger ones cuBLAS reads as fast as this kernel."""
    return int(tables.read("gemv")["most_bytes"])


def pays(weight: Tensor, rows: int) -> bool:
    """Whether this kernel is the faster one."""
    return rows == 1 and weight.numel() * weight.element_size() <= most_bytes()


@cache
def shape_of(outputs: int, inputs: int, gate: bool) -> tuple[int, int, int, int]:
    """BLOCK_N, warps, stages, programs per multiprocessor: the first entry of this GPU's table that fits."""
    for entry in tables.read("gemv")["tiles"]:
        fits = inputs <= entry.get("inputs_to", inputs) and outputs <= entry.get("outputs_to", outputs)
        if fits and gate == entry.get("gate", gate):
            block_n, warps, stages, programs = entry["tile"]
            return block_n, warps, stages, programs
    raise AssertionError("the last entry of a table fits all")


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 0.0,
    gate: bool = False,
    shape: tuple[int, int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """x [1, k]; weight [n, k] (gate: [2 n, k]) -> out [1, n] and the stream x + residual [1, k] (else x)."""
    inputs = x.shape[1]
    outputs = weight.shape[0] // 2 if gate else weight.shape[0]
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    stream = torch.empty_like(x) if residual is not None else x
    block_n, warps, stages, per_sm = shape or shape_of(outputs, inputs, gate)
    blocks = triton.cdiv(outputs, block_n)
    _gemv[(min(blocks, per_sm * pdl.multiprocessors(x.device)),)](
        x, residual if residual is not None else x, norm if norm is not None else x, weight,
        bias if bias is not None else x, out, stream, blocks, eps,
        K=inputs, OUTPUTS=outputs, NORM=norm is not None, ADD=residual is not None, GATE=gate, BIAS=bias is not None,
        BLOCK_N=block_n, BLOCK_K=triton.next_power_of_2(inputs), STAGES=stages, PDL=pdl.supported(), num_warps=warps, num_stages=stages,
        **({"launch_pdl": True} if pdl.supported() else {}),
    )  # fmt: skip
    return out, stream
