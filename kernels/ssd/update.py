"""One token of each decode through the state space of Mamba-2 (reference.py has the formula): a program has a request and a head."""

import math

import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.ssd.reference import TimeSteps
from meshlm.kernels.states import request_of, time_step


@triton.jit
def _update(
    x, dt, a, b, c, d, bias, low, high, out, state, rows, starts, ends, tables, stride,
    x_stride, dt_stride, b_stride, c_stride, half_stride, page_stride,
    HEADS: tl.constexpr, EACH: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.follow(PDL)
    request, head, p = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    token, count, start, table = request_of(request, rows, starts, ends, tables, stride)
    if count != 1:
        return
    read = tl.load(table + tl.maximum(start - 1, 0) // PAGE).to(tl.int64)
    write = tl.load(table + start // PAGE).to(tl.int64)
    inside = (p < P)[:, None] & (n < N)[None, :]
    at = state + (head // HALF) * half_stride + (head % HALF) * (P * N) + p[:, None] * N + n[None, :]
    h = tl.load(
        at + read * page_stride, mask=(p < P)[:, None] & (n < tl.where(start > 0, N, 0))[None, :], other=0.0
    ).to(tl.float32)
    step = time_step(tl.load(dt + token * dt_stride + head), tl.load(bias + head), low, high)
    value = tl.load(x + token * x_stride + head * P + p, mask=p < P, other=0.0).to(tl.float32)
    group = (head // EACH) * N
    key = tl.load(b + token * b_stride + group + n, mask=n < N, other=0.0).to(tl.float32)
    query = tl.load(c + token * c_stride + group + n, mask=n < N, other=0.0).to(tl.float32)
    h = tl.exp(step * tl.load(a + head)) * h + (step * value)[:, None] * key[None, :]
    tl.store(at + write * page_stride, h.to(state.dtype.element_ty), mask=inside)
    y = tl.sum(h * query[None, :], axis=1) + tl.load(d + head) * value
    tl.store(out + (token * HEADS + head) * P + p, y.to(out.dtype.element_ty), mask=p < P)


def high_of(steps: TimeSteps) -> float:
    """The limit above, as a kernel takes it."""
    return math.inf if steps.high is None else steps.high


def state_update(
    x: Tensor, steps: TimeSteps, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor, out: Tensor, at: Columns,
    num: int, page: int,
) -> None:  # fmt: skip
    """The first `num` requests of a step, of which those with one token count; all of the step's tokens in each tensor.

    x [t, heads, P] and b, c [t, groups, N] may be strided by token; a, d float32 [heads];
    state [2, pages, half, P, N]; out [t, heads, P]. page: tokens of a block."""
    heads, width = x.shape[1:]
    block_p = min(triton.next_power_of_2(width), 32)
    _update[(num, heads, triton.cdiv(width, block_p))](
        x, steps.dt, a, b, c, d, steps.bias, steps.low, high_of(steps), out, state,
        at.rows, at.starts, at.ends, at.blocks, at.blocks.stride(0),
        x.stride(0), steps.dt.stride(0), b.stride(0), c.stride(0), state.stride(0), state.stride(1),
        HEADS=heads, EACH=heads // b.shape[1], HALF=state.shape[2], P=width, N=b.shape[2], PAGE=page,
        BLOCK_P=block_p, BLOCK_N=triton.next_power_of_2(b.shape[2]), num_warps=4, **pdl.options(x, num),
    )  # fmt: skip
