"""Prompts through the gated delta rule (reference.py has the formula), in chunks of 64 tokens and three launches.

Yang et al. 2024, "Gated Delta Networks", section 3.3: with G the sum of g in a chunk, S the state before it [V, K], and
A = tril(beta_i k_i^T k_j exp(G_i - G_j), -1), the values that are added to the state are U - W S^T, where

    T = (1 + A)^-1,   U = T diag(beta) v,   W = T diag(beta exp(G)) k

1. Each chunk and head: U and W. T is made of the inverses of the four blocks on the diagonal, by substitution, and of the blocks below:
   with D the former and L the latter of 1 + A, T = (1 - N) (1 + N^2) D^-1, N = D^-1 L, as N^4 = 0.
2. Each prompt, head and some of its values, chunk by chunk: the state before each chunk is kept, U becomes R = U - W S^T, and
   S = exp(G_end) S + R^T diag(exp(G_end - G)) k. States are read from and left in their pages.
3. Each chunk and head: o = exp(G) q S^T + tril(q k^T exp(G_i - G_j)) R.

A chunk is a half of a piece (kernels/states.py), and may be empty. Keys stay as they came: their inverse lengths go into the weights.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.gated_delta.reference import EPS
from meshlm.kernels.gated_delta.update import check_strides
from meshlm.kernels.states import PIECE, Pieces, left_in, request_of, softplus

CHUNK = 64
HALVES = PIECE // CHUNK
BLOCK = 16  # of the diagonal


@triton.jit
def _chunk_of(pieces, ends, chunk, CHUNK: tl.constexpr, HALVES: tl.constexpr):
    """The first token of a chunk in the step, and its number of tokens, perhaps none."""
    piece = pieces + 3 * (chunk // HALVES)
    request, done = tl.load(piece), (chunk % HALVES) * CHUNK
    token = tl.load(ends + request - 1, mask=request > 0, other=0) + tl.load(piece + 1) + done
    return token.to(tl.int64), tl.minimum(tl.load(piece + 2) - done, CHUNK)


@triton.jit
def _corrections(
    k, v, a, b, rate, bias, u, w, sums, lengths, pieces, ends, k_stride, v_stride, a_stride, b_stride, eps,
    HEADS: tl.constexpr, EACH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, HALVES: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    token, size = _chunk_of(pieces, ends, tl.program_id(0), CHUNK, HALVES)
    if size <= 0:
        return
    t, d, n = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    here = t < size
    i, j = t[:, None], t[None, :]
    x = tl.load(a + (token + t) * a_stride + head, mask=here, other=0.0).to(tl.float32) + tl.load(bias + head)
    g = tl.where(here, tl.load(rate + head) * softplus(x), 0.0)
    beta = tl.sigmoid(tl.load(b + (token + t) * b_stride + head, mask=here, other=0.0).to(tl.float32))
    beta = tl.where(here, beta, 0.0)
    total = tl.sum(tl.where(i >= j, g[None, :], 0.0), axis=1)
    tall = here[:, None] & (d < K)[None, :]
    keys = tl.load(k + (token + t)[:, None] * k_stride + (head // EACH) * K + d[None, :], mask=tall, other=0.0)
    wide = keys.to(tl.float32)
    length = tl.rsqrt(tl.sum(wide * wide, axis=1) + eps)
    tl.store(sums + (token + t) * HEADS + head, total, mask=here)
    tl.store(lengths + (token + t) * HEADS + head, length, mask=here)

    products = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    decay = tl.exp(tl.where(i > j, total[:, None] - total[None, :], float("-inf")))
    inner = products * decay * (beta * length)[:, None] * length[None, :]
    near = (i // BLOCK) == (j // BLOCK)
    diagonal = tl.where(near, inner, 0.0)
    eye = tl.where(i == j, 1.0, 0.0)
    inverse = eye
    for r in tl.static_range(1, BLOCK):  # the r-th line of all four blocks
        line = tl.sum(tl.where((i % BLOCK) == r, diagonal, 0.0), axis=0)
        known = tl.sum(line[:, None] * inverse, axis=0)
        inverse = tl.where(near & ((i % BLOCK) == r), eye - known[None, :], inverse)
    below = tl.dot(inverse, tl.where(near, 0.0, inner), input_precision=PRECISION)
    square = tl.dot(below, below, input_precision=PRECISION)
    solved = tl.dot(eye + square, inverse, input_precision=PRECISION)
    solved = tl.dot(eye - below, solved, input_precision=PRECISION)

    low = here[:, None] & (n < V)[None, :]
    values = tl.load(v + (token + t)[:, None] * v_stride + head * V + n[None, :], mask=low, other=0.0)
    found = tl.dot((solved * beta[None, :]).to(values.dtype), values, input_precision=PRECISION)
    at = ((token + t) * HEADS + head)[:, None]
    tl.store(u + at * V + n[None, :], found.to(u.dtype.element_ty), mask=low)
    weights = solved * (beta * length * tl.exp(total))[None, :]
    found = tl.dot(weights.to(keys.dtype), keys, input_precision=PRECISION)
    tl.store(w + at * K + d[None, :], found.to(w.dtype.element_ty), mask=tall)


@triton.jit
def _pass(
    k, u, w, sums, lengths, states, state, pieces, prompts, rows, starts, ends, tables, stride, k_stride, half_stride, page_stride,
    HEADS: tl.constexpr, EACH: tl.constexpr, HALF: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr,
    CHUNK: tl.constexpr, HALVES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    prompt, head, n = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    t, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    first, num = tl.load(prompts + 2 * prompt), tl.load(prompts + 2 * prompt + 1)
    if num == 0:
        return
    _, count, start, table = request_of(tl.load(pieces + 3 * first), rows, starts, ends, tables, stride)
    within = n[:, None] * K + d[None, :]
    inside = (n < V)[:, None] & (d < K)[None, :]
    at = state + (head // HALF) * half_stride + (head % HALF) * (V * K) + within
    read = tl.load(table + tl.maximum(start - 1, 0) // PAGE).to(tl.int64)
    s = tl.load(
        at + read * page_stride, mask=(n < V)[:, None] & (d < tl.where(start > 0, K, 0))[None, :], other=0.0
    ).to(tl.float32)
    for chunk in range(first * HALVES, (first + num) * HALVES):
        token, size = _chunk_of(pieces, ends, chunk, CHUNK, HALVES)
        here = t < size
        kept = states + (chunk * HEADS + head).to(tl.int64) * (V * K) + within
        tl.store(kept, s.to(states.dtype.element_ty), mask=inside)
        line = (token + t) * HEADS + head
        tall, low = here[:, None] & (d < K)[None, :], here[:, None] & (n < V)[None, :]
        weights = tl.load(w + line[:, None] * K + d[None, :], mask=tall, other=0.0)
        own = u + line[:, None] * V + n[None, :]
        rest = tl.load(own, mask=low, other=0.0).to(tl.float32)
        rest -= tl.dot(weights, tl.trans(s.to(weights.dtype)), input_precision=PRECISION)
        tl.store(own, rest.to(u.dtype.element_ty), mask=low)
        total = tl.load(sums + line, mask=here, other=0.0)
        end = tl.load(sums + (token + size - 1) * HEADS + head, mask=size > 0, other=0.0)
        left = tl.where(here, tl.exp(end - total), 0.0) * tl.load(lengths + line, mask=here, other=0.0)
        keys = tl.load(k + (token + t)[:, None] * k_stride + (head // EACH) * K + d[None, :], mask=tall, other=0.0)
        added = tl.trans((rest * left[:, None]).to(keys.dtype))
        s = tl.exp(end) * s + tl.dot(added, keys, input_precision=PRECISION)
        piece = pieces + 3 * (chunk // HALVES)
        page = left_in(table, start, tl.load(piece + 1) + tl.load(piece + 2), count, PAGE)
        lines = tl.where((page >= 0) & (chunk % HALVES == HALVES - 1), K, 0)
        to = at + tl.maximum(page, 0) * page_stride
        tl.store(to, s.to(state.dtype.element_ty), mask=(n < V)[:, None] & (d < lines)[None, :])


@triton.jit
def _output(
    q, k, u, sums, lengths, states, out, pieces, ends, q_stride, k_stride, scale, eps,
    HEADS: tl.constexpr, EACH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, HALVES: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, head, n = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    token, size = _chunk_of(pieces, ends, chunk, CHUNK, HALVES)
    if size <= 0:
        return
    t, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    here = t < size
    tall, low = here[:, None] & (d < K)[None, :], here[:, None] & (n < V)[None, :]
    group = (head // EACH) * K + d[None, :]
    queries = tl.load(q + (token + t)[:, None] * q_stride + group, mask=tall, other=0.0)
    keys = tl.load(k + (token + t)[:, None] * k_stride + group, mask=tall, other=0.0)
    line = (token + t) * HEADS + head
    total = tl.load(sums + line, mask=here, other=0.0)
    length = tl.load(lengths + line, mask=here, other=0.0)
    wide = queries.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, axis=1) + eps) * scale
    seen = here[:, None] & (t[:, None] >= t[None, :])
    decay = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
    weights = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * decay * factor[:, None] * length[None, :]
    rest = tl.load(u + line[:, None] * V + n[None, :], mask=low, other=0.0)
    o = tl.dot(weights.to(rest.dtype), rest, input_precision=PRECISION)
    before = states + ((chunk * HEADS + head).to(tl.int64) * V + n[None, :]) * K + d[:, None]
    s = tl.load(before, mask=(n < V)[None, :] & (d < K)[:, None], other=0.0)
    o += (factor * tl.exp(total))[:, None] * tl.dot(queries, s.to(queries.dtype), input_precision=PRECISION)
    tl.store(out + line[:, None] * V + n[None, :], o.to(out.dtype.element_ty), mask=low)


def chunk_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, rate: Tensor, bias: Tensor, state: Tensor, out: Tensor,
    at: Columns, pieces: Pieces, page: int,
) -> None:  # fmt: skip
    """The prompts of a step: see update.py for the tensors."""
    check_strides(q, k, v, a, b)
    tokens, heads, width = v.shape
    numbers, lines = k.shape[2], pieces.pieces
    chunks = HALVES * len(lines)
    u, w = (torch.empty(tokens, heads, size, dtype=v.dtype, device=v.device) for size in (width, numbers))
    sums, lengths = torch.empty(2, tokens, heads, dtype=torch.float32, device=v.device).unbind()
    states = torch.empty(chunks, heads, width, numbers, dtype=v.dtype, device=v.device)
    block_k, block_v = (max(16, triton.next_power_of_2(size)) for size in (numbers, width))
    precision = "ieee" if v.dtype == torch.float32 else "tf32"
    sizes = {"HEADS": heads, "EACH": heads // k.shape[1], "K": numbers, "V": width, "CHUNK": CHUNK, "HALVES": HALVES}
    tile = {"BLOCK_K": block_k, "PRECISION": precision}
    _corrections[(chunks, heads)](
        k, v, a, b, rate, bias, u, w, sums, lengths, lines, at.ends,
        k.stride(0), v.stride(0), a.stride(0), b.stride(0), EPS, **sizes, **tile, BLOCK=BLOCK, BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
    part = min(block_v, 32)
    _pass[(len(pieces.prompts), heads, triton.cdiv(width, part))](
        k, u, w, sums, lengths, states, state, lines, pieces.prompts, at.rows, at.starts, at.ends, at.blocks,
        at.blocks.stride(0), k.stride(0), state.stride(0), state.stride(1), HALF=state.shape[2], PAGE=page,
        **sizes, **tile, BLOCK_V=part, num_warps=4,
    )  # fmt: skip
    part = min(block_v, 64)
    _output[(chunks, heads, triton.cdiv(width, part))](
        q, k, u, sums, lengths, states, out, lines, at.ends, q.stride(0), k.stride(0), numbers**-0.5, EPS,
        **sizes, **tile, BLOCK_V=part, num_warps=4,
    )  # fmt: skip
