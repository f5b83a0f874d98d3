"""Attention over the paged cache, for any mix of prompts, chunks and decodes: what its two kernels share.

    out = softmax(q k^T scale [soft cap] + mask) v        (Vaswani et al. 2017, section 3.2.1)

by tiles with running maximum and sum (Dao et al. 2022, algorithm 1). The query heads of a kv head are packed into the rows of one
tile, so keys and values are read once for all of them. prefill.py gives each tile of queries a program, decode.py splits each
context among programs; both walk over the pages of keys and values with `paged_tile`.

Requests are columns as in kernels/prepare_inputs: rows, starts, ends. Masks: causal, and a query sees no key before its first one
(`first_seen`): that of a window of its last keys, or of the chunk of positions that it is in (Llama 4).
Soft cap: cap tanh(s / cap). Sinks: one more logit per head that takes part in the sum only. Slopes: a score has its head's slope times
(key - query) added, by their positions (ALiBi, Press et al. 2022).
"""

import triton
import triton.language as tl
from torch import Tensor

EVERYTHING, SLIDING, CHUNKS = 0, 1, 2  # what a kernel's SPAN says of the keys before a query that it sees
CHUNKS_ = tl.constexpr(CHUNKS)
PREFIX_STEP, ITEM = 128, 5  # of SharedPrefixes: tokens, which the keys of any tile divide; ints of an item


@triton.jit
def first_seen(position, size, SPAN: tl.constexpr):
    """The first key that a query at this position sees, below 0 where a window (SPAN) of so many keys is not full yet."""
    if SPAN == CHUNKS_:
        first = position // size * size
    else:
        first = position - size + 1
    return first


@triton.jit
def paged_tile(
    q, m, l, acc, first, last, query_at, seen_from, table, keys, values, kv, scale, cap, slope, oldest,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MASK: tl.constexpr, CAP: tl.constexpr, SPAN: tl.constexpr, SLOPES: tl.constexpr,
):  # fmt: skip
    """Tiles of keys [first, last) for one tile of queries at positions query_at [M]; scores are in powers of two.

    seen_from [M]: the first key that each sees, with a SPAN. oldest: the first of them. The pages of those before it may have a new
    owner, and hold anything: a weight of zero does not make nothing of a NaN, so they are not read. slope [M]: of each, with SLOPES."""
    d = tl.arange(0, BLOCK_D)
    for begin in range(first, last, BLOCK_N):
        at = begin + tl.arange(0, BLOCK_N)
        page = tl.load(table + at // PAGE, mask=at < last, other=0).to(tl.int64)
        line = ((page * PAGE + at % PAGE) * KV_HEADS + kv) * DIM
        if MASK:
            there = at < last
            if SPAN:
                there = there & (at >= oldest)
            inside = there[:, None] & (d < DIM)[None, :]
            k = tl.load(keys + line[:, None] + d[None, :], mask=inside, other=0.0).to(q.dtype)
        else:
            k = tl.load(keys + line[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0.0).to(q.dtype)
        s = tl.dot(q, tl.trans(k)) * scale
        if CAP:
            s = cap * (2.0 * tl.sigmoid(2.0 * s / cap) - 1.0)
        if SLOPES:
            s += slope[:, None] * (at[None, :] - query_at[:, None]).to(tl.float32)
        s = s * 1.4426950408889634
        if MASK:
            seen = (at[None, :] <= query_at[:, None]) & (at < last)[None, :]
            if SPAN:
                seen = seen & (at[None, :] >= seen_from[:, None])
            s = tl.where(seen, s, float("-inf"))
        top = tl.maximum(m, tl.max(s, axis=1))
        base = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(m - base)
        l = l * fade + tl.sum(p, axis=1)
        if MASK:
            v = tl.load(values + line[:, None] + d[None, :], mask=inside, other=0.0).to(q.dtype)
        else:
            v = tl.load(values + line[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0.0).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc * fade[:, None])
        m = top
    return m, l, acc


class Columns:
    """The requests of a step on the device (kernels/prepare_inputs), and their block tables int32 [rows, stride]."""

    __slots__ = ("blocks", "ends", "n", "rows", "starts")

    def __init__(self, rows: Tensor, starts: Tensor, ends: Tensor, n: int, blocks: Tensor) -> None:
        self.rows, self.starts, self.ends, self.n, self.blocks = rows, starts, ends, n, blocks


class SharedPrefixes:
    """Which requests of a step that decode read the first keys of their contexts together, on the device. Nobody's, where all is zero.

    members int32 [n]: requests, those with the same prefix beside one another. items int32 [g, ITEM]: pieces of prefixes, each for a
    tile of members: the first of them and their number, the piece's first key and the one behind its last, and its place among the
    prefix's pieces. tokens, parts int32 [n]: of each request's prefix, how many keys it has, and pieces it is cut into. Pieces begin
    and end at multiples of PREFIX_STEP."""

    __slots__ = ("items", "members", "most_parts", "parts", "tile", "tokens")

    def __init__(
        self, items: Tensor, members: Tensor, tokens: Tensor, parts: Tensor, tile: int, most_parts: int
    ) -> None:
        """tile: requests of one at most. most_parts: pieces of any prefix at most, whatever the step."""
        self.items, self.members, self.tokens, self.parts = items, members, tokens, parts
        self.tile, self.most_parts = tile, most_parts

    def slots(self, splits: int) -> int:
        """Places for the parts of a context, a power of two: those of its prefix, then up to `splits` of the rest."""
        return 1 << (self.most_parts + splits - 1).bit_length()


class Extras:
    """The features that few models have: window of keys or chunks, soft cap of scores, sink logits [heads], scales of an FP8 cache,
    slopes float32 [heads].

    A query sees its last `window` keys, or those from the last multiple of `chunk` on; 0: all."""

    __slots__ = ("cap", "chunk", "k_scale", "sinks", "slopes", "v_scale", "window")

    def __init__(
        self, window: int = 0, cap: float = 0.0, sinks: Tensor | None = None, k_scale: float = 1.0,
        v_scale: float = 1.0, chunk: int = 0, slopes: Tensor | None = None,
    ) -> None:  # fmt: skip
        assert not (window and chunk)
        self.window, self.cap, self.sinks, self.chunk, self.slopes = window, cap, sinks, chunk, slopes
        self.k_scale, self.v_scale = k_scale, v_scale

    @property
    def span(self) -> int:
        """A kernel's SPAN."""
        return CHUNKS if self.chunk else SLIDING if self.window else EVERYTHING


PLAIN = Extras()
