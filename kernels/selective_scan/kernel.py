"""Mamba's state space (reference.py has the formula): decodes in one launch, prompts in pieces (kernels/states.py) and three launches.

1. Each piece and some channels, token by token from zero: what the piece adds to the state, and the sum of its time steps.
2. Each prompt and some channels, piece by piece: the state before each piece takes the place of what it adds, as the state behind it is
   exp(A sum) h + added. States are read from and left in their pages.
3. Each piece and some channels, token by token from the state before it: y silu(gate).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.states import Pieces, left_in, piece_of, request_of, softplus

BLOCK = 32  # channels of a program, which has one warp


@triton.jit
def _update(
    x, dt, a, b, c, d, gate, out, state, rows, starts, ends, tables, stride,
    x_stride, dt_stride, b_stride, c_stride, gate_stride, half_stride, page_stride, channels,
    HALF: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.follow(PDL)
    request, p, n = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_N)
    token, count, start, table = request_of(request, rows, starts, ends, tables, stride)
    if count != 1:
        return
    read = tl.load(table + tl.maximum(start - 1, 0) // PAGE).to(tl.int64)
    write = tl.load(table + start // PAGE).to(tl.int64)
    there, numbers = p < channels, n < N
    inside = there[:, None] & numbers[None, :]
    at = state + ((p // HALF) * half_stride + (p % HALF) * N)[:, None] + n[None, :]
    earlier = there[:, None] & (n < tl.where(start > 0, N, 0))[None, :]
    h = tl.load(at + read * page_stride, mask=earlier, other=0.0).to(tl.float32)
    rates = tl.load(a + p[:, None] * N + n[None, :], mask=inside, other=0.0)
    step = softplus(tl.load(dt + token * dt_stride + p, mask=there, other=0.0).to(tl.float32))
    value = tl.load(x + token * x_stride + p, mask=there, other=0.0).to(tl.float32)
    key = tl.load(b + token * b_stride + n, mask=numbers, other=0.0).to(tl.float32)
    query = tl.load(c + token * c_stride + n, mask=numbers, other=0.0).to(tl.float32)
    h = tl.exp(step[:, None] * rates) * h + (step * value)[:, None] * key[None, :]
    tl.store(at + write * page_stride, h.to(state.dtype.element_ty), mask=inside)
    y = tl.sum(h * query[None, :], axis=1) + tl.load(d + p, mask=there, other=0.0) * value
    z = tl.load(gate + token * gate_stride + p, mask=there, other=0.0).to(tl.float32)
    tl.store(out + token * channels + p, (y * z * tl.sigmoid(z)).to(out.dtype.element_ty), mask=there)


@triton.jit
def _line(values, stride, token, at, there):
    """Numbers of a token, float32."""
    return tl.load(values + token * stride + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _given(x, dt, b, x_stride, dt_stride, b_stride, token, p, n, there, numbers, inside):
    """The time step, the value and the key of a token. The step is zero, which changes nothing, where it is not inside the piece."""
    step = tl.where(inside, softplus(_line(dt, dt_stride, token, p, there)), 0.0)
    return step, _line(x, x_stride, token, p, there), _line(b, b_stride, token, n, numbers)


@triton.jit
def _behind_first(t, last):
    """The three tokens behind token t, the piece's last one where they are beyond it. last: how many it has behind t."""
    return t + tl.minimum(last, 1), t + tl.minimum(last, 2), t + tl.minimum(last, 3)


@triton.jit
def _four(x, dt, b, x_stride, dt_stride, b_stride, t, last, p, n, there, numbers):
    """What `_given` has of four tokens, whose loads are under way together."""
    t1, t2, t3 = _behind_first(t, last)
    return (
        _given(x, dt, b, x_stride, dt_stride, b_stride, t, p, n, there, numbers, last >= 0),
        _given(x, dt, b, x_stride, dt_stride, b_stride, t1, p, n, there, numbers, last >= 1),
        _given(x, dt, b, x_stride, dt_stride, b_stride, t2, p, n, there, numbers, last >= 2),
        _given(x, dt, b, x_stride, dt_stride, b_stride, t3, p, n, there, numbers, last >= 3),
    )


@triton.jit
def _behind(h, step, value, key, rates):
    """The state behind a token."""
    return tl.exp(step[:, None] * rates) * h + (step * value)[:, None] * key[None, :]


@triton.jit
def _gated(h, query, value, skip, z):
    return (tl.sum(h * query[None, :], axis=1) + skip * value) * z * tl.sigmoid(z)


@triton.jit
def _sums(
    x, dt, a, b, states, totals, pieces, ends, x_stride, dt_stride, b_stride, channels,
    N: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    piece, p, n = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_N)
    token, size = piece_of(pieces, ends, piece)
    if size == 0:
        return
    there, numbers = p < channels, n < N
    inside, line = there[:, None] & numbers[None, :], p[:, None] * N + n[None, :]
    rates = tl.load(a + line, mask=inside, other=0.0)
    h, total = tl.zeros((BLOCK, BLOCK_N), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, size, 4):
        first, second, third, fourth = _four(
            x, dt, b, x_stride, dt_stride, b_stride, token + begin, size - begin - 1, p, n, there, numbers
        )
        step0, value0, key0 = first  # Triton 3.6 takes no tuples of tuples apart at once
        step1, value1, key1 = second
        step2, value2, key2 = third
        step3, value3, key3 = fourth
        h = _behind(h, step0, value0, key0, rates)
        h = _behind(h, step1, value1, key1, rates)
        h = _behind(h, step2, value2, key2, rates)
        h = _behind(h, step3, value3, key3, rates)
        total += step0 + step1 + step2 + step3
    wide = (piece * channels).to(tl.int64)
    tl.store(states + wide * N + line, h, mask=inside)
    tl.store(totals + wide + p, total, mask=there)


@triton.jit
def _pass(
    a, states, totals, state, pieces, prompts, rows, starts, ends, tables, stride, half_stride, page_stride, channels,
    HALF: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    prompt, p, n = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_N)
    first, num = tl.load(prompts + 2 * prompt), tl.load(prompts + 2 * prompt + 1)
    if num == 0:
        return
    _, count, start, table = request_of(tl.load(pieces + 3 * first), rows, starts, ends, tables, stride)
    there = p < channels
    inside, line = there[:, None] & (n < N)[None, :], p[:, None] * N + n[None, :]
    rates = tl.load(a + line, mask=inside, other=0.0)
    at = state + ((p // HALF) * half_stride + (p % HALF) * N)[:, None] + n[None, :]
    read = tl.load(table + tl.maximum(start - 1, 0) // PAGE).to(tl.int64)
    earlier = there[:, None] & (n < tl.where(start > 0, N, 0))[None, :]
    h = tl.load(at + read * page_stride, mask=earlier, other=0.0).to(tl.float32)
    for piece in range(first, first + num):
        wide = (piece * channels).to(tl.int64)
        added = tl.load(states + wide * N + line, mask=inside, other=0.0)
        total = tl.load(totals + wide + p, mask=there, other=0.0)
        tl.store(states + wide * N + line, h, mask=inside)
        h = tl.exp(total[:, None] * rates) * h + added
        end = tl.load(pieces + 3 * piece + 1) + tl.load(pieces + 3 * piece + 2)
        page = left_in(table, start, end, count, PAGE)
        to = at + tl.maximum(page, 0) * page_stride
        left = there[:, None] & (n < tl.where(page >= 0, N, 0))[None, :]
        tl.store(to, h.to(state.dtype.element_ty), mask=left)


@triton.jit
def _scan(
    x, dt, a, b, c, d, gate, states, out, pieces, ends, x_stride, dt_stride, b_stride, c_stride, gate_stride, channels,
    N: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    piece, p, n = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_N)
    token, size = piece_of(pieces, ends, piece)
    if size == 0:
        return
    there, numbers = p < channels, n < N
    inside, line = there[:, None] & numbers[None, :], p[:, None] * N + n[None, :]
    rates = tl.load(a + line, mask=inside, other=0.0)
    skip = tl.load(d + p, mask=there, other=0.0)
    h = tl.load(states + (piece * channels).to(tl.int64) * N + line, mask=inside, other=0.0)
    to = out + p
    for begin in range(0, size, 4):  # the tokens beyond the piece's end are its last one, and are not stored
        t, last = token + begin, size - begin - 1
        t1, t2, t3 = _behind_first(t, last)
        first, second, third, fourth = _four(x, dt, b, x_stride, dt_stride, b_stride, t, last, p, n, there, numbers)
        step0, value0, key0 = first
        step1, value1, key1 = second
        step2, value2, key2 = third
        step3, value3, key3 = fourth
        query0, query1 = _line(c, c_stride, t, n, numbers), _line(c, c_stride, t1, n, numbers)
        query2, query3 = _line(c, c_stride, t2, n, numbers), _line(c, c_stride, t3, n, numbers)
        z0, z1 = _line(gate, gate_stride, t, p, there), _line(gate, gate_stride, t1, p, there)
        z2, z3 = _line(gate, gate_stride, t2, p, there), _line(gate, gate_stride, t3, p, there)
        h = _behind(h, step0, value0, key0, rates)
        y0 = _gated(h, query0, value0, skip, z0)
        h = _behind(h, step1, value1, key1, rates)
        y1 = _gated(h, query1, value1, skip, z1)
        h = _behind(h, step2, value2, key2, rates)
        y2 = _gated(h, query2, value2, skip, z2)
        h = _behind(h, step3, value3, key3, rates)
        y3 = _gated(h, query3, value3, skip, z3)
        tl.store(to + t * channels, y0.to(out.dtype.element_ty), mask=there)
        tl.store(to + t1 * channels, y1.to(out.dtype.element_ty), mask=p < tl.where(last >= 1, channels, 0))
        tl.store(to + t2 * channels, y2.to(out.dtype.element_ty), mask=p < tl.where(last >= 2, channels, 0))
        tl.store(to + t3 * channels, y3.to(out.dtype.element_ty), mask=p < tl.where(last >= 3, channels, 0))


def scan_update(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor, state: Tensor, out: Tensor,
    at: Columns, num: int, page: int,
) -> None:  # fmt: skip
    """The first `num` requests of a step, of which those with one token count; all of the step's tokens in each tensor.

    x, gate and dt (before softplus) [t, channels] and b, c [t, N] may be strided by token; a float32 [channels, N]; d float32
    [channels]; state [2, pages, half, 1, N]; out [t, channels]. page: tokens of a block."""
    channels, numbers = a.shape
    _update[(num, triton.cdiv(channels, BLOCK))](
        x, dt, a, b, c, d, gate, out, state, at.rows, at.starts, at.ends, at.blocks, at.blocks.stride(0),
        x.stride(0), dt.stride(0), b.stride(0), c.stride(0), gate.stride(0), state.stride(0), state.stride(1), channels,
        HALF=state.shape[2], N=numbers, PAGE=page, BLOCK=BLOCK, BLOCK_N=triton.next_power_of_2(numbers), num_warps=1,
        **pdl.options(x, num),
    )  # fmt: skip


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, gate: Tensor, state: Tensor, out: Tensor,
    at: Columns, pieces: Pieces, page: int,
) -> None:  # fmt: skip
    """The prompts of a step: see `scan_update` for the tensors."""
    channels, numbers = a.shape
    lines = pieces.pieces
    states = torch.empty(len(lines), channels, numbers, dtype=torch.float32, device=x.device)
    totals = torch.empty(len(lines), channels, dtype=torch.float32, device=x.device)
    tile = {"N": numbers, "BLOCK": BLOCK, "BLOCK_N": triton.next_power_of_2(numbers), "num_warps": 1}
    parts = triton.cdiv(channels, BLOCK)
    _sums[(len(lines), parts)](
        x, dt, a, b, states, totals, lines, at.ends, x.stride(0), dt.stride(0), b.stride(0), channels, **tile
    )
    _pass[(len(pieces.prompts), parts)](
        a, states, totals, state, lines, pieces.prompts, at.rows, at.starts, at.ends, at.blocks, at.blocks.stride(0),
        state.stride(0), state.stride(1), channels, HALF=state.shape[2], PAGE=page, **tile,
    )  # fmt: skip
    _scan[(len(lines), parts)](
        x, dt, a, b, c, d, gate, states, out, lines, at.ends,
        x.stride(0), dt.stride(0), b.stride(0), c.stride(0), gate.stride(0), channels, **tile,
    )  # fmt: skip
