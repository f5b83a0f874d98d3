"""Steps that verify drafts, on a device that alone knows how long its rows are: where their tokens stand, and how many of them stay.

Requests are columns int32 [m]: `rows`; `ends`, prefix sums of the tokens that each has among the step's first ones (at most MOST; 0: a
prompt); `firsts`, its first line of logits; `drafts`, how many of its tokens are drafted, -1: it does not sample. Each of those tokens
is an entry of the step's own columns (kernels/prepare_inputs), as if it were a request.

A draft is kept where it equals the token that is sampled before it, and all before it were kept. `known` int32 [rows]: how many tokens
of each row are no drafts.
"""

import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels.sample.kernel import uniform

MOST = 16  # tokens of a request in a step


@triton.jit
def _ngram(
    rows, drafts, known, tokens, tokens_stride, found, shortest, longest, MOST: tl.constexpr, BLOCK: tl.constexpr
):
    request = tl.program_id(0)
    count = tl.load(drafts + request)
    row = tl.load(rows + request).to(tl.int64)
    n = tl.load(known + row)
    line = tokens + row * tokens_stride
    scores = tl.zeros((BLOCK,), tl.int64)
    last = n - 1
    searched = tl.where(count > 0, last, 0)
    for begin in range(0, searched, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        same = at < last
        length = tl.zeros((BLOCK,), tl.int32)
        for back in range(longest):
            mine = tl.load(line + last - back, mask=last >= back, other=-1)
            same = same & (at >= back) & (tl.load(line + at - back, mask=same & (at >= back), other=-2) == mine)
            length += same.to(tl.int32)
        scores = tl.maximum(
            scores, tl.where(length >= shortest, (length.to(tl.int64) << 32) | (2147483647 - at).to(tl.int64), 0)
        )
    best = tl.max(scores, axis=0)
    count = tl.where(best > 0, tl.maximum(count, 0), 0)
    behind = 2147483647 - (best & 0xFFFFFFFF).to(tl.int32) + 1
    j = tl.arange(0, MOST)
    period = tl.maximum(n - behind, 1)
    guess = tl.load(line + behind + j % period, mask=j < count, other=0)
    tl.store(line + n + j, guess, mask=j < count)
    tl.store(found + request, count)


def ngram(
    rows: Tensor, drafts: Tensor, known: Tensor, tokens: Tensor, found: Tensor, m: int, shortest: int, longest: int
) -> None:
    """Prompt lookup (Saxena 2023) for the first m requests: each row's last tokens, `longest` of them or as many as there are,
    `shortest` at least, are looked for earlier in the row; of the places with most of them the first counts. What follows there (again
    and again, where the row ends within it) is written behind the row's known tokens. tokens int32 [rows, width]; found int32 [m]: so
    many, 0: none, and what stands behind the row is what stood there."""
    _ngram[(m,)](
        rows, drafts, known, tokens, tokens.stride(0), found, shortest, longest, MOST=MOST, BLOCK=1024, num_warps=4
    )  # fmt: skip


@triton.jit
def _place(rows, ends, known, tokens, tokens_stride, own, starts, entries, MOST: tl.constexpr):
    request = tl.program_id(0)
    begin = tl.load(ends + request - 1, mask=request > 0, other=0)
    count = tl.load(ends + request) - begin
    row = tl.load(rows + request).to(tl.int64)
    start = tl.load(own + request)
    start = tl.where(start < 0, tl.load(known + row) - 1, start)
    tl.store(own + request, start)
    j = tl.arange(0, MOST)
    tl.store(starts + begin + j, start + j, mask=j < count)
    tl.store(entries + begin + j, tl.load(tokens + row * tokens_stride + start + j, mask=j < count), mask=j < count)


def place(
    rows: Tensor, ends: Tensor, known: Tensor, tokens: Tensor, own: Tensor, starts: Tensor, entries: Tensor, m: int
) -> None:
    """own int32 [m]: where each request's tokens begin in its row; -1 becomes the place of its last known token. starts int32: of the
    step's columns, gets the place of each of its first ends[m - 1] entries; entries int32: their tokens."""
    _place[(m,)](rows, ends, known, tokens, tokens.stride(0), own, starts, entries, MOST=MOST, num_warps=1)


@triton.jit
def _accept(
    rows, ends, firsts, drafts, known, own, entries, sampled, counts, tokens, tokens_stride, seeds, prompt_lens, rates, salt,
    SYNTHETIC: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    count = tl.load(drafts + request)
    if count < 0:
        tl.store(counts + request, 0)
        return
    row = tl.load(rows + request).to(tl.int64)
    begin = tl.load(ends + request - 1, mask=request > 0, other=0)
    line = tl.load(firsts + request)
    j = tl.arange(0, MOST)
    drafted = j < count
    token = tl.load(sampled + line + j, mask=drafted, other=0)
    draft = tl.load(entries + begin + 1 + j, mask=drafted, other=-1)
    if SYNTHETIC:
        start = tl.load(own + request)
        index = start + 1 + j - tl.load(prompt_lens + row)
        low, high = tl.load(seeds + 2 * row) ^ tl.load(salt), tl.load(seeds + 2 * row + 1) ^ tl.load(salt + 1)
        kept = drafted & (uniform(low, high, index) < tl.load(rates + j)) & (token >= 0)
    else:
        kept = drafted & (token == draft)
    accepted = tl.min(tl.where(kept, MOST, j), axis=0)
    accepted = tl.minimum(accepted, count)
    if SYNTHETIC:
        right = j < accepted
        tl.store(sampled + line + j, draft, mask=right)
        tl.store(tokens + row * tokens_stride + tl.load(own + request) + 1 + j, draft, mask=right)
    tl.store(counts + request, accepted + 1)
    tl.store(known + row, tl.load(known + row) + accepted + 1)


def accept(
    columns: tuple[Tensor, Tensor, Tensor, Tensor], known: Tensor, own: Tensor, entries: Tensor, sampled: Tensor, counts: Tensor,
    tokens: Tensor, draws: tuple[Tensor, Tensor], m: int, chance: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """columns: rows, ends, firsts, drafts. counts int32 [m] gets the tokens of each request: its drafts that are kept, and the one that
    is sampled behind them; 0 where it does not sample; `known` grows by them. sampled int32 [lines]; own, entries: as `place` left
    them.    draws: seeds int32 [rows, 2] and prompt lengths int32 [rows].

    chance: float64 [MOST], how likely a draft is kept where those before it are, whatever it is; and int32 [2], with which seeds are
    changed for that. Drafts that are kept then stand in the place of what was sampled."""
    rates, salt = (known, known) if chance is None else chance
    rows, ends, firsts, drafts = columns
    _accept[(m,)](
        rows, ends, firsts, drafts, known, own, entries, sampled, counts, tokens, tokens.stride(0), *draws, rates, salt,
        SYNTHETIC=chance is not None, MOST=MOST, num_warps=1,
    )  # fmt: skip
