"""Prompts through the state space of Mamba-2 (reference.py has the formula), in pieces (kernels/states.py) and three launches.

1. Each piece and some heads of a group: what the piece adds to the state, S = sum over t of exp(L_end - L_t) dt_t x_t B_t^T, with L
   the sum of dt A.
2. Each prompt and head, piece by piece: the state before each piece takes the place of S; states are read from and left in their pages.
3. Each piece and some heads of a group: y_t = sum over s <= t of exp(L_t - L_s) (C_t B_s) dt_s x_s + exp(L_t) C_t h + D x_t. C_t B_s
   is the same for these heads, and L and dt were left by the first launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.ssd.reference import TimeSteps
from meshlm.kernels.ssd.update import high_of
from meshlm.kernels.states import PIECE, Pieces, left_in, piece_of, request_of, time_step

MOST_HEADS = 4  # of a program of the first and the last launch


@triton.jit
def _sums_until(values, SIZE: tl.constexpr):
    """The sum of values [SIZE] up to each, by sixteens: within them, and of those before."""
    lines = values.reshape(SIZE // 16, 16)
    nth, line = tl.arange(0, 16), tl.arange(0, SIZE // 16)
    within = tl.sum(tl.where((nth[None, :] <= nth[:, None])[None, :, :], lines[:, None, :], 0.0), axis=2)
    whole = tl.sum(lines, axis=1)
    before = tl.sum(tl.where(line[None, :] < line[:, None], whole[None, :], 0.0), axis=1)
    return (within + before[:, None]).reshape(SIZE)


@triton.jit
def _states(
    x, dt, a, b, bias, low, high, states, decays, sums, pieces, ends, x_stride, dt_stride, b_stride,
    HEADS: tl.constexpr, EACH: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    PIECE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, MINE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """MINE: heads of a program, of one group: they have the same B."""
    at, first = tl.program_id(0), tl.program_id(1) * MINE
    token, size = piece_of(pieces, ends, at)
    if size == 0:
        return
    t, p, n = tl.arange(0, PIECE), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    here = t < size
    key = b + (token + t)[:, None] * b_stride + (first // EACH) * N + n[None, :]
    keys = tl.load(key, mask=here[:, None] & (n < N)[None, :], other=0.0)
    for head in tl.range(first, first + MINE, num_stages=STAGES):
        place = (at * HEADS + head).to(tl.int64)
        step = tl.load(dt + (token + t) * dt_stride + head, mask=here, other=0.0)
        value = tl.load(
            x + (token + t)[:, None] * x_stride + head * P + p[None, :],
            mask=here[:, None] & (p < P)[None, :],
            other=0.0,
        )
        step = tl.where(here, time_step(step, tl.load(bias + head), low, high), 0.0)
        total = _sums_until(step * tl.load(a + head), PIECE)
        end = tl.sum(step * tl.load(a + head), axis=0)
        tl.store(sums + place * (2 * PIECE) + t, total)
        tl.store(sums + place * (2 * PIECE) + PIECE + t, step)
        left = value.to(tl.float32) * (step * tl.exp(end - total))[:, None]
        added = tl.dot(tl.trans(left.to(keys.dtype)), keys, input_precision=PRECISION)
        to = states + (place * P + p[:, None]) * N + n[None, :]
        tl.store(to, added.to(states.dtype.element_ty), mask=(p < P)[:, None] & (n < N)[None, :])
        tl.store(decays + place, tl.exp(end))


@triton.jit
def _of_piece(
    states, decays, pieces, table, piece, head, start, count, within, inside,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """What a piece adds to the state, what it leaves of the one before, and the page that the state behind it goes to."""
    added = tl.load(states + (piece * HEADS + head).to(tl.int64) * SIZE + within, mask=inside, other=0.0)
    decay = tl.load(decays + piece * HEADS + head)
    end = tl.load(pieces + 3 * piece + 1) + tl.load(pieces + 3 * piece + 2)
    return added.to(tl.float32), decay, left_in(table, start, end, count, PAGE)


@triton.jit
def _pass(
    states, decays, state, pieces, prompts, rows, starts, ends, tables, stride, half_stride, page_stride,
    HEADS: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    prompt, head, p = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    first, num = tl.load(prompts + 2 * prompt), tl.load(prompts + 2 * prompt + 1)
    if num == 0:
        return
    _, count, start, table = request_of(tl.load(pieces + 3 * first), rows, starts, ends, tables, stride)
    inside = (p < P)[:, None] & (n < N)[None, :]
    within = p[:, None] * N + n[None, :]
    at = state + (head // HALF) * half_stride + (head % HALF) * (P * N) + within
    read = tl.load(table + tl.maximum(start - 1, 0) // PAGE).to(tl.int64)
    h = tl.load(
        at + read * page_stride, mask=(p < P)[:, None] & (n < tl.where(start > 0, N, 0))[None, :], other=0.0
    ).to(tl.float32)
    added, decay, page = _of_piece(
        states, decays, pieces, table, first, head, start, count, within, inside, HEADS, P * N, PAGE
    )
    for piece in range(first, first + num):
        following = tl.minimum(piece + 1, first + num - 1)  # asked for before this one's state is written
        later, later_decay, later_page = _of_piece(
            states, decays, pieces, table, following, head, start, count, within, inside, HEADS, P * N, PAGE
        )
        place = states + (piece * HEADS + head).to(tl.int64) * (P * N) + within
        tl.store(place, h.to(states.dtype.element_ty), mask=inside)
        h = decay * h + added
        tl.store(
            at + page * page_stride,
            h.to(state.dtype.element_ty),
            mask=(p < P)[:, None] & (n < tl.where(page >= 0, N, 0))[None, :],
        )
        added, decay, page = later, later_decay, later_page


@triton.jit
def _scan(
    x, b, c, d, sums, states, out, pieces, ends, x_stride, b_stride, c_stride,
    HEADS: tl.constexpr, EACH: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    PIECE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, MINE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """MINE: heads of a program, of one group: they have the same products of C and B."""
    at, first = tl.program_id(0), tl.program_id(1) * MINE
    token, size = piece_of(pieces, ends, at)
    if size == 0:
        return
    t, p, n = tl.arange(0, PIECE), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    here = t < size
    group = (first // EACH) * N + n[None, :]
    wide, narrow = here[:, None] & (n < N)[None, :], here[:, None] & (p < P)[None, :]
    keys = tl.load(b + (token + t)[:, None] * b_stride + group, mask=wide, other=0.0)
    queries = tl.load(c + (token + t)[:, None] * c_stride + group, mask=wide, other=0.0)
    products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    for head in tl.range(first, first + MINE, num_stages=STAGES):
        place = (at * HEADS + head).to(tl.int64)
        values = tl.load(x + (token + t)[:, None] * x_stride + head * P + p[None, :], mask=narrow, other=0.0)
        h = tl.load(
            states + (place * P + p[None, :]) * N + n[:, None], mask=(p < P)[None, :] & (n < N)[:, None], other=0.0
        )
        total = tl.load(sums + place * (2 * PIECE) + t)
        step = tl.load(sums + place * (2 * PIECE) + PIECE + t)
        fades = tl.where(t[:, None] >= t[None, :], total[:, None] - total[None, :], float("-inf"))
        weights = (products * tl.exp(fades) * step[None, :]).to(values.dtype)
        y = tl.dot(queries, h.to(queries.dtype), input_precision=PRECISION) * tl.exp(total)[:, None]
        y = tl.dot(weights, values, y, input_precision=PRECISION)
        y += tl.load(d + head) * values.to(tl.float32)
        tl.store(out + ((token + t)[:, None] * HEADS + head) * P + p[None, :], y.to(out.dtype.element_ty), mask=narrow)


def chunk_scan(
    x: Tensor, steps: TimeSteps, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor, out: Tensor, at: Columns,
    pieces: Pieces, page: int,
) -> None:  # fmt: skip
    """The prompts of a step: see update.py for the tensors."""
    heads, width = x.shape[1:]
    numbers, lines = b.shape[2], pieces.pieces
    states = torch.empty(len(lines), heads, width, numbers, dtype=x.dtype, device=x.device)
    decays = torch.empty(len(lines), heads, dtype=torch.float32, device=x.device)
    each = heads // b.shape[1]
    block_p, block_n = (max(16, triton.next_power_of_2(size)) for size in (width, numbers))
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    sizes = {"HEADS": heads, "P": width, "N": numbers, "BLOCK_N": block_n}
    tile = {"EACH": each, "PIECE": PIECE, "BLOCK_P": block_p, "PRECISION": precision}
    sums = torch.empty(len(lines), heads, 2, PIECE, dtype=torch.float32, device=x.device)  # of the steps, and the steps
    dt, limits = steps.dt, (steps.bias, steps.low, high_of(steps))
    mine = _heads_of_a_program(each)
    tile |= {"MINE": mine}
    _states[(len(lines), heads // mine)](
        x, dt, a, b, *limits, states, decays, sums, lines, at.ends, x.stride(0), dt.stride(0), b.stride(0), **sizes, **tile,
        STAGES=1, num_warps=4,
    )  # fmt: skip
    part = min(block_p, 4)
    _pass[(len(pieces.prompts), heads, triton.cdiv(width, part))](
        states, decays, state, lines, pieces.prompts, at.rows, at.starts, at.ends, at.blocks, at.blocks.stride(0),
        state.stride(0), state.stride(1), HALF=state.shape[2], PAGE=page, BLOCK_P=part, **sizes, num_warps=1,
    )  # fmt: skip
    # Of 16 bits and in one stage Triton 3.6 computes other sums.
    _scan[(len(lines), heads // mine)](
        x, b, c, d, sums, states, out, lines, at.ends, x.stride(0), b.stride(0), c.stride(0), **sizes, **tile,
        STAGES=1 if x.dtype == torch.float32 else 2, num_warps=8,
    )  # fmt: skip


def _heads_of_a_program(each: int) -> int:
    """each: heads of a group. The same for all steps, so that none has a kernel of its own."""
    mine = 1
    while mine < MOST_HEADS and each % (2 * mine) == 0:
        mine *= 2
    return mine
