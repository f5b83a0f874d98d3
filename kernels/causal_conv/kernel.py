"""A causal convolution of each channel, over the step's tokens and those before them, whose last inputs are the state.

    y_t = silu(bias + sum over k of weight_k x_(t - K + 1 + k))         or without silu

Decodes are one launch: a program has a request and some channels. Prompts are two: all pieces (kernels/states.py), some tokens a
program, first read the state that the request had, then others leave the new ones.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.states import PIECE, Pieces, left_in, request_of

BLOCK = 128  # channels of a program; half of them where it has many tokens
TOKENS = 32  # of a piece, of a program: more would not stay in registers


@triton.jit
def _update(
    x, weight, bias, out, state, rows, starts, ends, tables, stride, x_stride, half_stride, page_stride, channels,
    HALF: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl.follow(PDL)
    request, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token, count, start, table = request_of(request, rows, starts, ends, tables, stride)
    if count != 1:
        return
    inside, earlier = c < channels, tl.where(start > 0, channels, 0)
    read = tl.load(table + tl.maximum(start - 1, 0) // PAGE).to(tl.int64)
    write = tl.load(table + start // PAGE).to(tl.int64)
    at = state + (c // HALF) * half_stride + (c % HALF) * (K - 1)
    own = tl.load(x + token * x_stride + c, mask=inside, other=0.0).to(tl.float32)
    y = own * tl.load(weight + c * K + K - 1, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(K - 1):
        before = tl.load(at + read * page_stride + k, mask=c < earlier, other=0.0).to(tl.float32)
        y += before * tl.load(weight + c * K + k, mask=inside, other=0.0).to(tl.float32)
        if k > 0:
            tl.store(at + write * page_stride + k - 1, before.to(state.dtype.element_ty), mask=inside)
    tl.store(at + write * page_stride + K - 2, own.to(state.dtype.element_ty), mask=inside)
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(out + token * channels + c, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weight(weight, packed, c, channels, k: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr, dtype: tl.constexpr):
    """That of input t - K + 1 + k, float32 [BLOCK]. PACKED: the four of a channel are a word of 64 bits."""
    if PACKED:
        return ((packed >> (16 * k)) & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    else:
        return tl.load(weight + c * K + k, mask=c < channels, other=0.0).to(tl.float32)


@triton.jit
def _pieces(
    x, weight, bias, out, state, pieces, rows, starts, ends, tables, stride, x_stride, half_stride, page_stride, channels,
    HALF: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    piece, c = pieces + tl.program_id(0) * 3, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token, _, start, table = request_of(tl.load(piece), rows, starts, ends, tables, stride)
    size, begin = tl.load(piece + 2), tl.program_id(2) * TOKENS
    if begin >= size:
        return
    first, part = tl.load(piece + 1) + begin, begin + tl.arange(0, TOKENS)
    t = first + tl.arange(0, TOKENS)
    inside = (part < size)[:, None] & (c < channels)[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    packed = c.to(tl.int64)
    if PACKED:
        packed = tl.load(weight + c, mask=c < channels, other=0)
    y = tl.zeros((TOKENS, BLOCK), tl.float32)
    if BIAS:
        y += tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    if (first < K - 1) & (start > 0):  # its first tokens see inputs of an earlier step
        read = tl.load(table + (start - 1) // PAGE).to(tl.int64)
        at = state + read * page_stride + (c // HALF) * half_stride + (c % HALF) * (K - 1)
        for k in tl.static_range(K - 1):
            i = t - (K - 1) + k
            value = tl.load(at[None, :] + (K - 1 + i)[:, None], mask=inside & (i < 0)[:, None], other=0.0)
            y += value.to(tl.float32) * _weight(weight, packed, c, channels, k, K, PACKED, dtype)[None, :]
    for k in tl.static_range(K):
        i = t - (K - 1) + k
        value = tl.load(x + (token + i)[:, None] * x_stride + c[None, :], mask=inside & (i >= 0)[:, None], other=0.0)
        y += value.to(tl.float32) * _weight(weight, packed, c, channels, k, K, PACKED, dtype)[None, :]
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(out + (token + t)[:, None] * channels + c[None, :], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _leave(
    x, state, pieces, prompts, rows, starts, ends, tables, stride, x_stride, half_stride, page_stride, channels,
    HALF: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    prompt, c = prompts + 2 * tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, num = tl.load(prompt), tl.load(prompt + 1)
    if num == 0:
        return
    token, count, start, table = request_of(tl.load(pieces + 3 * first), rows, starts, ends, tables, stride)
    inside, earlier = c < channels, tl.where(start > 0, channels, 0)
    read = tl.load(table + tl.maximum(start - 1, 0) // PAGE).to(tl.int64)
    at = state + (c // HALF) * half_stride + (c % HALF) * (K - 1)
    for back in range(num):  # the last one first: an earlier one may be left in the page that is read here
        piece = pieces + 3 * (first + num - 1 - back)
        end = tl.load(piece + 1) + tl.load(piece + 2)
        page = left_in(table, start, end, count, PAGE)
        if page >= 0:
            for k in tl.static_range(K - 1):  # in place what is read is not written yet: it stands further on
                i = end - (K - 1) + k
                here, before = c < tl.where(i >= 0, channels, 0), c < tl.where(i < 0, earlier, 0)
                value = tl.load(x + (token + i) * x_stride + c, mask=here, other=0.0).to(tl.float32)
                value += tl.load(at + read * page_stride + K - 1 + i, mask=before, other=0.0).to(tl.float32)
                tl.store(at + page * page_stride + k, value.to(state.dtype.element_ty), mask=inside)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, at: Columns, num_decodes: int, pieces: Pieces | None,
    page: int, *, silu: bool = True,
) -> Tensor:  # fmt: skip
    """x [t, channels] (lines may be strided), weight [channels, K], state [2, pages, half, K - 1] -> [t, channels].

    The first `num_decodes` requests may be decodes, of which those with one token are; pieces: of all others. page: tokens of a block.
    """
    channels, kernel = weight.shape
    out = x.new_empty(x.shape[0], channels)
    shared = (
        at.rows,
        at.starts,
        at.ends,
        at.blocks,
        at.blocks.stride(0),
        x.stride(0),
        state.stride(0),
        state.stride(1),
        channels,
    )
    sizes = {"HALF": state.shape[2], "K": kernel, "PAGE": page}
    blocks = triton.cdiv(channels, BLOCK)
    given = weight if bias is None else bias
    if num_decodes:
        _update[(num_decodes, blocks)](
            x, weight, given, out, state, *shared, **sizes, BIAS=bias is not None, SILU=silu, BLOCK=BLOCK, num_warps=2,
            **pdl.options(x, num_decodes),
        )  # fmt: skip
    if pieces is not None:
        lines = pieces.pieces
        small = BLOCK // 2
        packed = kernel == 4 and weight.element_size() == 2 and weight.dtype == x.dtype
        packed = packed and weight.is_contiguous() and weight.storage_offset() % kernel == 0
        _pieces[(len(lines), triton.cdiv(channels, small), PIECE // TOKENS)](
            x, weight.view(torch.int64) if packed else weight, given, out, state, lines, *shared, **sizes,
            BIAS=bias is not None, SILU=silu, TOKENS=TOKENS, BLOCK=small, PACKED=packed,
        )  # fmt: skip
        _leave[(len(pieces.prompts), blocks)](
            x, state, lines, pieces.prompts, *shared, **sizes, BLOCK=BLOCK, num_warps=2
        )
    return out
