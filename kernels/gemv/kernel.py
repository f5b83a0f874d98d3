"""Products of few rows with a weight, bound by reading the weight once; the norm before and the gate after come for free.

    h = x + residual                                  (NORM with a residual; rounded to the stream's dtype)
    y = h / sqrt(mean(h^2) + eps) * norm_weight       (NORM; the division is taken out of the sum over k)
    out = y W^T + bias
    out = silu(y W_gate^T) * (y W_up^T)               (GATE: W holds the gate's rows, then the up projection's)

One program computes BLOCK_N outputs for all M rows. It keeps M x BLOCK_N x BLOCK_K partial sums in registers and has its whole tile
of the weight in flight at once, which is what a memory-bound kernel needs; tensor cores would add nothing for so few rows.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl, tables


@triton.jit
def _gemv(
    x, residual, norm_weight, weight, bias, out, stream, outputs, eps,
    M: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, M)
    real = n < outputs
    acc = tl.zeros((M, BLOCK_N, BLOCK_K), tl.float32)
    if GATE:
        acc_up = tl.zeros((M, BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((M, BLOCK_K), tl.float32)
    full: tl.constexpr = K % BLOCK_K == 0
    for begin in tl.static_range(0, K, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        inside = k < K
        if full:
            w = tl.load(
                weight + n[:, None].to(tl.int64) * K + k[None, :],
                mask=real[:, None],
                other=0.0,
                eviction_policy="evict_first",
            )
        else:
            w = tl.load(
                weight + n[:, None].to(tl.int64) * K + k[None, :], mask=real[:, None] & inside[None, :], other=0.0
            )
        if GATE:
            up_at = (n + outputs)[:, None].to(tl.int64) * K + k[None, :]
            if full:
                w_up = tl.load(weight + up_at, mask=real[:, None], other=0.0, eviction_policy="evict_first")
            else:
                w_up = tl.load(weight + up_at, mask=real[:, None] & inside[None, :], other=0.0)
        if PDL and begin == 0:
            tl.extra.cuda.gdc_wait()  # the first tile of the weight is on its way already
        h = tl.load(x + m[:, None] * K + k[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        if NORM:
            if ADD:
                h += tl.load(residual + m[:, None] * K + k[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
                h = h.to(stream.dtype.element_ty).to(tl.float32)
                if tl.program_id(0) == 0:
                    where = stream + m[:, None] * K + k[None, :]
                    tl.store(where, h.to(stream.dtype.element_ty), mask=inside[None, :])
            squares += h * h
            h *= tl.load(norm_weight + k, mask=inside, other=0.0).to(tl.float32)[None, :]
        acc += h[:, None, :] * w.to(tl.float32)[None, :, :]
        if GATE:
            acc_up += h[:, None, :] * w_up.to(tl.float32)[None, :, :]
    result = tl.sum(acc, axis=2)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]
        result *= scale
    if GATE:
        up = tl.sum(acc_up, axis=2)
        if NORM:
            up *= scale
        result = result / (1.0 + tl.exp(-result)) * up
    if BIAS:
        result += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)[None, :]
    tl.store(out + m[:, None] * outputs + n[None, :], result.to(out.dtype.element_ty), mask=real[None, :])


@cache
def most_bytes() -> int:
    """Of a weight; larger ones cuBLAS reads faster than this kernel."""
    return int(tables.read("gemv")["most_bytes"])


def pays(weight: Tensor, rows: int) -> bool:
    """Whether this kernel is the faster one."""
    return rows == 1 and weight.numel() * weight.element_size() <= most_bytes()


@cache
def shape_of(outputs: int, inputs: int, gate: bool) -> tuple[int, int, int]:
    """BLOCK_N, BLOCK_K, warps: the first entry of this GPU's table that fits."""
    for entry in tables.read("gemv")["tiles"]:
        fits = inputs <= entry.get("inputs_to", inputs) and outputs <= entry.get("outputs_to", outputs)
        if fits and gate == entry.get("gate", gate):
            block_n, block_k, warps = entry["tile"]
            return block_n, block_k, warps
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
    shape: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """x [m, k], m a power of two; weight [n, k] (gate: [2 n, k]) -> out [m, n] and the stream x + residual [m, k] (else x)."""
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gate else weight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    stream = torch.empty_like(x) if residual is not None else x
    block_n, block_k, warps = shape or shape_of(outputs, inputs, gate)
    _gemv[(triton.cdiv(outputs, block_n),)](
        x, residual if residual is not None else x, norm if norm is not None else x, weight,
        bias if bias is not None else x, out, stream, outputs, eps,
        M=rows, K=inputs, NORM=norm is not None, ADD=residual is not None, GATE=gate, BIAS=bias is not None,
        BLOCK_N=block_n, BLOCK_K=block_k, PDL=pdl.supported(), num_warps=warps,
        **({"launch_pdl": True} if pdl.supported() else {}),
    )  # fmt: skip
    return out, stream
