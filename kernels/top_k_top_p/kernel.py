"""min-p, top-k and top-p over the whole vocabulary, without a sort and without the host.

Excluded logits become -inf, in place; a line with an infinite one, or one that is not a number, stays as it is:

    keep token i  <=>  logits[i] >= max(a, b, c)      with z = logits / temperature
    a = temperature * (max z + ln min_p)                                              (min-p; Nguyen et al. 2024)
    b = the top_k-th largest logit of those >= a                                      (top-k; ties with it stay)
    c = the largest logit t such that sum_{logits >= t} softmax(z | >= a, b) >= top_p (top-p; Holtzman et al. 2020)

b and c are one problem: the largest t whose tail weighs enough, sum_{x >= t} w(x) >= target, where w is exp(z), or 1 to
count, which is exp at an infinite temperature. It is solved exactly, by bisection on the bit pattern of t (radix
select; Alabi et al. 2012). What makes it fast is that few logits take part, as in Qrita (Park et al. 2026), but by
bounds that are proven instead of a Gaussian guess: the first pass keeps the peak of every group of 32, and where a tail
of the peaks alone weighs enough, the answer is not below it. Groups whose peak is below are not read again. Flat
distributions prove little; then each turn (about 10 of them) reads most of the line.

One program owns a line, so that one launch does all, programs need not wait for each other, and a line that limits
nothing costs a few loads. A line is in L2 after its first read, and 256 lines are one wave of an H200 (two programs of
16 warps a multiprocessor). Sums have one order, whatever the batch: equal logits, equal answers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_GROUPS = 8192  # peaks of a line that a program holds in registers
LOWEST = tl.constexpr(-0x7F800000)  # the key of -inf
VALUE_TURNS = tl.constexpr(8)
# Bits at the end of a float32 that the dtype cannot set.
SPARE_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def _key(x):
    """float32 to int32 of the same order. Both zeros are 0, and trailing zero bits stay zero."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def _value(key):
    """The float32 of a key."""
    bits = tl.where(key < 0, -key | -0x80000000, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high, turn, SPARE: tl.constexpr):
    """A key in (low, high]: the mean of values in the first turns (most bit patterns are near 0), then of bits."""
    half = _key(0.5 * _value(low << SPARE) + 0.5 * _value(high << SPARE)) >> SPARE
    half = tl.minimum(tl.maximum(half, low + 1), high)
    by_value = (turn < VALUE_TURNS) & (low > (LOWEST >> SPARE))
    return tl.where(by_value, half, (low | high) - ((low ^ high) >> 1))


@triton.jit
def _weigh(x, bound, top, steep):
    """exp2(steep (x - top)) of what reaches the bound, 0 for the rest. -inf * 0 must not arise."""
    return tl.where(x >= bound, tl.exp2((tl.maximum(tl.maximum(x, bound), -1e30) - top) * steep), 0.0)


@triton.jit
def _search_held(x, weight, low, high, target, SPARE: tl.constexpr):
    """The largest key in [low, high] whose tail of x weighs the target; `low` where none does. All in registers."""
    turn = 0
    while low < high:
        middle = _middle(low, high, turn, SPARE)
        enough = tl.sum(tl.where(x >= _value(middle << SPARE), weight, 0.0)) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
        turn += 1
    return low


@triton.jit
def _search_peaks(peak, low, high, target, top, steep, SPARE: tl.constexpr):
    """A lower bound of the answer: the search among the peaks, a part of the logits. `low` where it shows nothing."""
    least = tl.min(tl.where(peak > float("-inf"), peak, top))
    begin = tl.maximum(low, _key(least) >> SPARE)
    weight = _weigh(peak, _value(begin << SPARE), top, steep)
    if tl.sum(weight) >= target:
        low = _search_held(peak, weight, begin, high, target, SPARE)
    return low


@triton.jit
def _tile(line, vocab, chosen, count, begin, GROUP: tl.constexpr, TILE: tl.constexpr):
    """The places of the logits of the chosen groups from `begin` on, and a mask of those that exist."""
    nth = begin + tl.arange(0, TILE)
    group = tl.load(chosen + nth, mask=nth < count, other=0).to(tl.int32)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return line + at, (nth < count)[:, None] & (at < vocab)


@triton.jit
def _tail(line, vocab, chosen, count, bound, top, steep, GROUP: tl.constexpr, TILE: tl.constexpr):
    """What the tail at `bound` weighs."""
    total = tl.zeros((TILE, GROUP), tl.float32)
    for begin in range(0, count, TILE):
        at, real = _tile(line, vocab, chosen, count, begin, GROUP, TILE)
        total += _weigh(tl.load(at, mask=real, other=float("-inf")).to(tl.float32), bound, top, steep)
    return tl.sum(total)


@triton.jit
def _search(
    line, vocab, chosen, count, low, high, target, top, steep,
    SPARE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`_search_held` among the chosen groups: in registers where they are few, else reading them again each turn."""
    if count <= TILE:
        at, real = _tile(line, vocab, chosen, count, 0, GROUP, TILE)
        x = tl.load(at, mask=real, other=float("-inf")).to(tl.float32)
        low = _search_held(x, _weigh(x, _value(low << SPARE), top, steep), low, high, target, SPARE)
    else:
        turn = 0
        while low < high:
            middle = _middle(low, high, turn, SPARE)
            enough = _tail(line, vocab, chosen, count, _value(middle << SPARE), top, steep, GROUP, TILE) >= target
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
            turn += 1
    return low


@triton.jit
def _top_k_top_p(
    logits, stride, vocab, places, rows, temperatures, min_ps, top_ks, top_ps, peaks, chosen, groups,
    PLACES: tl.constexpr, SPARE: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    line = logits + place * stride
    peaks += place * groups
    chosen += place * groups
    if PLACES:
        place = tl.load(places + place).to(tl.int64)
    row = tl.load(rows + place)
    temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    floored, limited, nucleus = min_p > 0.0, (top_k > 0) & (top_k < vocab), top_p < 1.0
    if (temperature < 1e-5) | ((not floored) & (not limited) & (not nucleus)):
        return
    steep = 1.4426950408889634 / temperature
    only_nucleus = nucleus & (not floored) & (not limited)

    # One pass: the peak of every group; for top-p alone also the weight of the whole line.
    own = tl.arange(0, BLOCK // GROUP)
    inner = own[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tops = tl.full((BLOCK // GROUP,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK // GROUP,), tl.float32)
    for begin in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        at = begin + inner
        x = tl.load(line + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))
        peak = tl.max(x, axis=1)
        group = begin // GROUP + own
        tl.store(peaks + group, peak.to(peaks.dtype.element_ty), mask=group < groups)
        higher = tl.maximum(tops, peak)
        if only_nucleus:
            base = tl.where(higher == float("-inf"), 0.0, higher)
            part = tl.sum(tl.exp2((x - base[:, None]) * steep), axis=1)
            sums = sums * tl.exp2((tops - base) * steep) + part
        tops = higher
    tl.debug_barrier()  # the peaks are read by other threads than wrote them
    top = tl.max(tops, axis=0)
    if top == float("inf"):  # or not a number: nothing can be drawn of it (kernels/sample)
        return
    high = _key(top) >> SPARE
    top = tl.where(top == float("-inf"), 0.0, top)  # a line without tokens stays as it is
    low = tl.full((), LOWEST >> SPARE, tl.int32)
    if floored:
        low = tl.minimum((_key(top + temperature * tl.log(min_p)) + (1 << SPARE) - 1) >> SPARE, high)

    # Which groups can matter.
    total = tl.sum(sums * tl.exp2((tops - top) * steep), axis=0)
    all_groups = tl.arange(0, WIDE)
    peak = tl.load(peaks + all_groups, mask=all_groups < groups, other=float("-inf")).to(tl.float32)
    if limited:
        low = _search_peaks(peak, low, high, top_k.to(tl.float32), top, 0.0, SPARE)
    elif only_nucleus:
        # Tokens below top + temperature ln((1 - p) total / vocab) weigh less than 1 - p of the total, however many they are.
        least = top + temperature * tl.log(tl.maximum(0.99 * (1.0 - top_p) * total / vocab, 1e-30))
        low = tl.minimum(tl.maximum(_key(least) >> SPARE, low), high)
        low = _search_peaks(peak, low, high, top_p * total, top, steep, SPARE)
    cut = _value(low << SPARE)
    taken = (peak >= cut) & (all_groups < groups)
    nth = tl.cumsum(taken.to(tl.int32), axis=0)
    tl.store(chosen + nth - 1, all_groups.to(tl.int16), mask=taken)
    count = tl.sum(taken.to(tl.int32), axis=0)  # of nth, the compiler would scan twice
    tl.debug_barrier()

    if limited:
        low = _search(line, vocab, chosen, count, low, high, top_k.to(tl.float32), top, 0.0, SPARE, GROUP, TILE)
    if nucleus:
        if not only_nucleus:
            total = _tail(line, vocab, chosen, count, _value(low << SPARE), top, steep, GROUP, TILE)
        low = _search(line, vocab, chosen, count, low, high, top_p * total, top, steep, SPARE, GROUP, TILE)
    tl.debug_barrier()  # all have read before any writes

    # The other groups are written unread.
    for begin in range(0, vocab, BLOCK):
        group = begin // GROUP + own
        has = tl.load(peaks + group, mask=group < groups, other=float("-inf")).to(tl.float32) >= cut
        nothing = tl.full((BLOCK // GROUP, GROUP), float("-inf"), tl.float32).to(logits.dtype.element_ty)
        tl.store(line + begin + inner, nothing, mask=(~has)[:, None] & (begin + inner < vocab))
    bound = _value(low << SPARE)
    for begin in range(0, count, TILE):
        at, real = _tile(line, vocab, chosen, count, begin, GROUP, TILE)
        x = tl.load(at, mask=real, other=float("-inf"))
        tl.store(at, tl.where(x.to(tl.float32) >= bound, x, float("-inf")).to(x.dtype), mask=real)


class Limits:
    """Persistent columns by row: float32 temperature, min_p (off: <= 0), top_p (off: >= 1); int32 top_k (off: <= 0)."""

    __slots__ = ("min_p", "temperature", "top_k", "top_p")

    def __init__(self, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> None:
        self.temperature, self.min_p, self.top_k, self.top_p = temperature, min_p, top_k, top_p


def _group(vocab: int) -> int:
    return max(32, int(triton.next_power_of_2(triton.cdiv(vocab, MAX_GROUPS))))


def workspace(lines: int, vocab: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for `lines` rows of logits of this dtype: peaks of the groups, int16 numbers of those that take part."""
    shape = (lines, triton.cdiv(vocab, 16 * _group(vocab)) * 16)  # aligned; groups past the vocabulary are empty
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=torch.int16, device=device)


def top_k_top_p(
    logits: Tensor, rows: Tensor, places: Tensor | None, state: Limits, scratch: tuple[Tensor, Tensor], *,
    block: int = 8192, tile: int = 256, warps: int = 16, stages: int = 3,
) -> None:  # fmt: skip
    """logits [l, vocab] of float32, float16 or bfloat16, changed in place; rows int32 [n] and places int32 [l].

    Line i belongs to request places[i], or i without places; its parameters are row rows[...] of `state`. Lines of rows
    that limit nothing, or are greedy (temperature below 1e-5), are neither read nor written. The launch depends on the
    shapes alone. room: see `workspace`, for at least l lines of this vocabulary and dtype."""
    lines, vocab = logits.shape
    group = _group(vocab)
    groups = scratch[0].shape[1]
    _top_k_top_p[(lines,)](
        logits, logits.stride(0), vocab, places if places is not None else rows, rows,
        state.temperature, state.min_p, state.top_k, state.top_p, *scratch, groups,
        PLACES=places is not None, SPARE=SPARE_BITS[logits.dtype], GROUP=group, WIDE=triton.next_power_of_2(groups),
        BLOCK=block, TILE=tile, STAGES=stages, num_warps=warps,
        maxnreg=max(64, 1024 // warps),  # two programs fit
    )  # fmt: skip
