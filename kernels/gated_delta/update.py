"""One token of each decode through the gated delta rule (reference.py has the formula): a program has a request, a head and some of
its values, reads its part of the state once and writes it once. Norms and gates are made on the way."""

import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.gated_delta.reference import EPS
from meshlm.kernels.states import request_of, softplus


@triton.jit
def _update(
    q, k, v, a, b, rate, bias, out, state, rows, starts, ends, tables, stride,
    q_stride, k_stride, v_stride, a_stride, b_stride, half_stride, page_stride, scale, eps,
    HEADS: tl.constexpr, EACH: tl.constexpr, HALF: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.follow(PDL)
    request, head, n = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    token, count, start, table = request_of(request, rows, starts, ends, tables, stride)
    if count != 1:
        return
    d = tl.arange(0, BLOCK_K)
    read = tl.load(table + tl.maximum(start - 1, 0) // PAGE).to(tl.int64)
    write = tl.load(table + start // PAGE).to(tl.int64)
    at = state + (head // HALF) * half_stride + (head % HALF) * (V * K) + n[:, None] * K + d[None, :]
    s = tl.load(
        at + read * page_stride, mask=(n < V)[:, None] & (d < tl.where(start > 0, K, 0))[None, :], other=0.0
    ).to(tl.float32)
    g = tl.load(rate + head) * softplus(tl.load(a + token * a_stride + head).to(tl.float32) + tl.load(bias + head))
    beta = tl.sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
    group = (head // EACH) * K
    query = tl.load(q + token * q_stride + group + d, mask=d < K, other=0.0).to(tl.float32)
    key = tl.load(k + token * k_stride + group + d, mask=d < K, other=0.0).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, axis=0) + eps) * scale
    key *= tl.rsqrt(tl.sum(key * key, axis=0) + eps)
    value = tl.load(v + token * v_stride + head * V + n, mask=n < V, other=0.0).to(tl.float32)
    s *= tl.exp(g)
    correction = beta * (value - tl.sum(s * key[None, :], axis=1))
    s += correction[:, None] * key[None, :]
    tl.store(at + write * page_stride, s.to(state.dtype.element_ty), mask=(n < V)[:, None] & (d < K)[None, :])
    o = tl.sum(s * query[None, :], axis=1)
    tl.store(out + (token * HEADS + head) * V + n, o.to(out.dtype.element_ty), mask=n < V)


def check_strides(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> None:
    """ValueError where the numbers of a token do not lie side by side: the kernels would read others."""
    for name, tensor in zip("qkvab", (q, k, v, a, b), strict=True):
        if not tensor[:1].is_contiguous():
            raise ValueError(f"{name} of a token must lie in one piece, it has strides {tensor.stride()}")


def rule_update(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, rate: Tensor, bias: Tensor, state: Tensor, out: Tensor,
    at: Columns, num: int, page: int,
) -> None:  # fmt: skip
    """The first `num` requests of a step, of which those with one token count; all of the step's tokens in each tensor.

    q, k [t, groups, K], v [t, heads, V] and a, b [t, heads] may be strided by token; rate, bias float32 [heads];
    state [2, pages, half, V, K]; out [t, heads, V]. page: tokens of a block."""
    check_strides(q, k, v, a, b)
    heads, width = v.shape[1:]
    numbers = k.shape[2]
    block_v = min(triton.next_power_of_2(width), 32)
    _update[(num, heads, triton.cdiv(width, block_v))](
        q, k, v, a, b, rate, bias, out, state, at.rows, at.starts, at.ends, at.blocks, at.blocks.stride(0),
        q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), state.stride(0), state.stride(1), numbers**-0.5, EPS,
        HEADS=heads, EACH=heads // k.shape[1], HALF=state.shape[2], K=numbers, V=width, PAGE=page,
        BLOCK_K=triton.next_power_of_2(numbers), BLOCK_V=block_v, num_warps=4, **pdl.options(v, num),
    )  # fmt: skip
