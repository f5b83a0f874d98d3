"""The lightning index of sparse attention (DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1): which tokens a query attends to.

    score of query t and token s <= t:  sum over heads h of  w_th relu(q_th . k_s)

The `topk` best are chosen, and the earlier of equal ones.

A token's key stands behind its latent in the line that the cache has of it. Kernels have programs for each query, whatever its request
does in the step, and grids that do not depend on lengths, as CUDA graphs need. Chosen tokens are named by their slots (page x tokens of
a page + place), so attention reads no block table: kernels/mla/decode.py takes them as pages of one token.
"""

import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl

PROGRAMS = 2048  # of scores, about, where every query had the longest context
FEWEST_KEYS = 256  # of a program
SELECTED_AT_ONCE = 8192  # scores


@triton.jit
def _scores(
    query, weights, cache, tables, stride, rows, lengths, out, width,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, LINE: tl.constexpr, BEGIN: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * SPAN
    last = tl.minimum(tl.load(lengths + token), first + SPAN)
    if first >= last:
        return
    table = tables + tl.load(rows + token).to(tl.int64) * stride
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    inside = (h < HEADS)[:, None] & (d < DIM)[None, :]
    q = tl.load(query + (token * HEADS + h)[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    weight = tl.load(weights + token * HEADS + h, mask=h < HEADS, other=0.0)
    for begin in range(first, last, BLOCK_N):
        at = begin + tl.arange(0, BLOCK_N)
        page = tl.load(table + at // PAGE, mask=at < last, other=0).to(tl.int64)
        line = cache + (page * PAGE + at % PAGE) * LINE + BEGIN
        k = tl.load(line[:, None] + d[None, :], mask=(at < last)[:, None] & (d < DIM)[None, :], other=0.0)
        products = tl.maximum(tl.dot(q, tl.trans(k)), 0.0)
        tl.store(out + token * width + at, tl.sum(weight[:, None] * products, axis=0), mask=at < last)


def index_scores(
    query: Tensor, weights: Tensor, cache: Tensor, begin: int, tables: Tensor, rows: Tensor, lengths: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    """query [t, heads, dim], weights float32 [t, heads], contiguous; cache [blocks, page, line]: keys from number `begin` of a line on.

    tables int32 [rows, stride]; rows, lengths int32 [t]: each query's block table, and the tokens that it sees; out float32 [t, width]
    gets their scores, and what is behind them stays."""
    tokens, heads, dim = query.shape
    _, page, line = cache.shape
    width = out.shape[1]
    span = max(FEWEST_KEYS, triton.next_power_of_2(-(-width * tokens // PROGRAMS)))
    _scores[(-(-width // span), tokens)](
        query, weights, cache, tables, tables.stride(0), rows, lengths, out, width,
        HEADS=heads, DIM=dim, PAGE=page, LINE=line, BEGIN=begin, SPAN=span, BLOCK_H=max(16, triton.next_power_of_2(heads)),
        BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_N=64, num_warps=4, num_stages=3,
    )  # fmt: skip


@triton.jit
def _ordered(score):
    """Integers in the order of the scores."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _select(
    scores, width, tables, stride, rows, lengths, chosen, counts,
    TOPK: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + token)
    table = tables + tl.load(rows + token).to(tl.int64) * stride
    line, to = scores + token * width, chosen + token * TOPK
    least, ties = -2147483648, 0  # what is above `least` is chosen, and so many of its equals
    if length > TOPK:  # by 8 bits of the least one after the other
        ties = TOPK
        least = 0
        bins = tl.arange(0, 256)
        for nth in tl.static_range(4):
            shift = 24 - 8 * nth
            found = tl.zeros((256,), tl.int32)
            for begin in range(0, length, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                key = _ordered(tl.load(line + at, mask=at < length, other=0.0))
                digits = (key >> shift) & 255
                alike = at < length
                if nth == 0:
                    digits = digits ^ 128  # the sign: negative ones are the lowest
                else:
                    alike = alike & ((key >> (shift + 8)) == (least >> (shift + 8)))
                found += tl.histogram(digits, 256, mask=alike)
            above = tl.sum(found, axis=0) - tl.cumsum(found, axis=0)
            best = tl.sum((above >= ties).to(tl.int32), axis=0)
            ties -= tl.sum(tl.where(bins == best, above, 0), axis=0)
            if nth == 0:
                best = best ^ 128
            least = least | (best << shift)
    written, equals = 0, 0
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        key = _ordered(tl.load(line + at, mask=at < length, other=0.0))
        equal = ((key == least) & (at < length)).to(tl.int32)
        takes = (at < length) & ((key > least) | ((equal > 0) & (equals + tl.cumsum(equal, axis=0) <= ties)))
        if length <= TOPK:
            takes = at < length
        taken = takes.to(tl.int32)
        page = tl.load(table + at // PAGE, mask=takes, other=0)
        tl.store(to + written + tl.cumsum(taken, axis=0) - 1, page * PAGE + at % PAGE, mask=takes)
        written += tl.sum(taken, axis=0)
        equals += tl.sum(equal, axis=0)
    if length <= 0:  # padding attends to one token of anybody's, and nobody reads what it gets
        tl.store(to, 0)
    tl.store(counts + token, tl.maximum(written, 1))


def select(
    scores: Tensor, tables: Tensor, rows: Tensor, lengths: Tensor, page: int, chosen: Tensor, counts: Tensor
) -> None:
    """The slots of the best of each query's tokens, in order: chosen int32 [t, topk], of which the first `counts` int32 [t] count.

    scores float32 [t, width]; tables, rows, lengths: see `index_scores`. A query that sees no more than topk tokens gets all; one that
    sees none is padding, and gets slot 0."""
    tokens, width = scores.shape
    _select[(tokens,)](
        scores, width, tables, tables.stride(0), rows, lengths, chosen, counts,
        TOPK=chosen.shape[1], PAGE=page, BLOCK=min(SELECTED_AT_ONCE, max(256, triton.next_power_of_2(width))), num_warps=16,
    )  # fmt: skip


@triton.jit
def _keep(
    key, key_stride, slots, cache, DIM: tl.constexpr, LINE: tl.constexpr, BEGIN: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl.follow(PDL)
    token, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    slot = tl.load(slots + token)
    if slot >= 0:
        own = tl.load(key + token * key_stride + d, mask=d < DIM)
        tl.store(cache + slot * LINE + BEGIN + d, own.to(cache.dtype.element_ty), mask=d < DIM)


def keep_keys(key: Tensor, slots: Tensor, cache: Tensor, begin: int) -> None:
    """key [t, dim] to the lines of these slots int64 [t] (below 0: padding) of cache [blocks, page, line], from number `begin` on."""
    tokens, dim = key.shape
    _keep[(tokens,)](
        key, key.stride(0), slots, cache, DIM=dim, LINE=cache.shape[2], BEGIN=begin, BLOCK=triton.next_power_of_2(dim),
        num_warps=1, **pdl.options(key),
    )  # fmt: skip
