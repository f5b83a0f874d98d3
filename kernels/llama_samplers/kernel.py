"""llama.cpp's samplers on the logits of a step: DRY, and the chain that truncates. Nothing waits for the host.

    DRY          x[t] -= multiplier * base^(n[t] - allowed_length)
                 n[t] the length of the longest end of the text that stood in it before, followed by t, where n[t] >= allowed_length;
                 no end reaches back over a sequence breaker                                                   (p-e-w 2024)

    top_n_sigma  keep x >= max - n * std                       std over all tokens that have a chance          (Tang et al. 2024)
    top_k        keep the k largest; ties with the k-th stay
    typical_p    keep the smallest set of mass > p of those whose surprise is nearest to the entropy           (Meister et al. 2022)
    top_p        keep the smallest set of the likeliest of mass >= p                                           (Holtzman et al. 2020)
    min_p        keep p[t] >= min_p * max p                                                                    (Nguyen et al. 2024)
    xtc          with the probability xtc_probability: of the tokens with p[t] >= xtc_threshold keep the least likely one alone

in this order, before the temperature, as llama.cpp has them; of each the probabilities are those of the tokens that the one before has
left. Tokens that are left out become -inf, in place.

One program owns a line, and one that asks for none of it costs a few loads. What typical_p keeps is an interval of logits around
log(sum(exp(x))) - entropy, so every stage leaves an interval, and its border is found by bisection on the bits of a float32. A repeated
end is found for a block of places at a time: all compare the token so many places before their own with that before the text's end.
Penalties of several places that the same token follows: the counts of kernels/penalties, of which the largest stays.
"""

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels.llama_samplers.reference import XTC_SALT
from meshlm.kernels.penalties.kernel import EACH
from meshlm.kernels.sample.kernel import uniform

BLOCK = 4096
AT_ONCE = 1024  # places of the text that are compared at a time
SALT = tl.constexpr(XTC_SALT)
INFINITE = tl.constexpr(0x7F800000)  # its bits
LEAST = tl.constexpr(-3.4028234663852886e38)  # of all numbers: tokens that have no chance are below
OF_DRY = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_longest", "dry_last_n")
OF_CHAIN = ("top_n_sigma", "chain_top_k", "typical_p", "chain_top_p", "chain_min_p", "xtc_probability", "xtc_threshold")
COUNT, WEIGHT, NEAR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _bits(x):
    """float32 to int32 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def _number(bits):
    """The float32 of such an int32."""
    return tl.where(bits < 0, -bits | -0x80000000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _since_breaker(ids, first, length, breakers, BLOCK: tl.constexpr):
    """Tokens behind the last sequence breaker; all of them where there is none."""
    since, end = length - first, length
    while end > first:
        at = end - BLOCK + tl.arange(0, BLOCK)
        token = tl.load(ids + at, mask=at >= first, other=-1)
        word = tl.load(breakers + token // 32, mask=token >= 0, other=0)
        breaks = ((word >> (token % 32)) & 1) != 0
        last = tl.max(tl.where(breaks & (token >= 0), at, -1))
        end = tl.where(last >= 0, first, end - BLOCK)
        since = tl.where(last >= 0, length - 1 - last, since)
    return since


@triton.jit
def _repeat_less(
    line, vocab, ids, first, length, multiplier, base, allowed, longest, breakers, counts, BLOCK: tl.constexpr
):  # fmt: skip
    """DRY on one line. first: of the tokens that count; longest: a repetition that is longer is no worse."""
    most = tl.minimum(_since_breaker(ids, first, length, breakers, BLOCK), longest)
    if (length - first > allowed) & (most >= allowed):
        for begin in range(first, length - 1, BLOCK):
            at = begin + tl.arange(0, BLOCK)  # each the last token of a repeated end
            same = at < length - 1
            repeats = tl.zeros((BLOCK,), tl.int32)
            nth = 0
            while (nth < most) & (tl.max(same.to(tl.int32)) > 0):
                token = tl.load(ids + length - 1 - nth)
                here = same & (at - nth >= first)
                earlier = tl.load(ids + at - nth, mask=here, other=-1)
                same = here & (earlier == token) & (earlier >= 0)
                repeats += same.to(tl.int32)
                nth += 1
            follows = tl.load(ids + at + 1, mask=at < length - 1, other=-1)
            real = (follows >= 0) & (follows < vocab) & (repeats >= allowed)
            tl.atomic_max(counts + follows, repeats + 1, mask=real, sem="relaxed")
        tl.debug_barrier()  # all are counted
        for begin in range(first + 1, length, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            token = tl.load(ids + at, mask=at < length, other=-1)
            real = (token >= 0) & (token < vocab)
            repeats = tl.atomic_xchg(counts + token, tl.zeros((BLOCK,), tl.int32), mask=real, sem="relaxed")
            real &= repeats > 0
            x = tl.load(line + token, mask=real, other=0.0).to(tl.float32)
            x -= multiplier * tl.exp2(tl.log2(base) * tl.where(real, repeats - 1 - allowed, 0).to(tl.float32))
            tl.store(line + token, x.to(line.dtype.element_ty), mask=real)
        tl.debug_barrier()  # all is zero again


@triton.jit
def _sums(
    line, vocab, low, high, centre, width, top, bound, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of the tokens that are left, x in [low, high] and |x - centre| <= width: how many reach the bound (COUNT), the weight
    exp(x - top) of those that do (WEIGHT), or of those that are as near to the centre as the bound (NEAR)."""
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(line + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        left = (x >= low) & (x <= high) & (tl.abs(x - centre) <= width)
        if KIND == NEAR:
            left &= tl.abs(x - centre) <= bound
        else:
            left &= x >= bound
        total += tl.where(left, 1.0 if KIND == COUNT else tl.exp(tl.maximum(x, low) - top), 0.0)
    return tl.sum(total)


@triton.jit
def _largest_bound(line, vocab, low, high, centre, width, top, target, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """The largest x that so many, or so much weight, reaches; `low` where none does."""
    least, most = _bits(low), _bits(high)
    while least < most:
        middle = (least | most) - ((least ^ most) >> 1)
        enough = _sums(line, vocab, low, high, centre, width, top, _number(middle), KIND, BLOCK) >= target
        least = tl.where(enough, middle, least)
        most = tl.where(enough, most, middle - 1)
    return _number(least)


@triton.jit
def _least_width(line, vocab, low, high, centre, top, target, BLOCK: tl.constexpr):
    """The smallest width around the centre whose tokens weigh more than the target; infinite where none do."""
    least, most = tl.zeros((), tl.int32), tl.full((), INFINITE, tl.int32)
    while least < most:
        middle = (least & most) + ((least ^ most) >> 1)
        weight = _sums(line, vocab, low, high, centre, float("inf"), top, _number(middle), NEAR, BLOCK)
        least = tl.where(weight > target, least, middle + 1)
        most = tl.where(weight > target, middle, most)
    return _number(least)


@triton.jit
def _truncate(line, vocab, sigmas, top_k, typical, top_p, min_p, probability, threshold, u, BLOCK: tl.constexpr):
    """The chain on one line. u: the draw of xtc."""
    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
    total, number = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(line + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))
        tops = tl.maximum(tops, x)
        there = x > float("-inf")
        total += tl.where(there, x, 0.0)
        number += there.to(tl.float32)
    top, number = tl.max(tops), tl.sum(number)
    excludes = (probability > 0.0) & (u <= probability) & (threshold <= 0.5)
    if (number > 0.0) & (top < float("inf")):  # else nothing can be drawn of it (kernels/sample)
        low, high = tl.full((), LEAST, tl.float32), top
        centre, width = tl.zeros((), tl.float32), tl.full((), float("inf"), tl.float32)
        if sigmas > 0.0:
            mean = tl.sum(total) / number
            squares = tl.zeros((BLOCK,), tl.float32)
            for begin in range(0, vocab, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                x = tl.load(line + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
                squares += tl.where(x > float("-inf"), (x - mean) * (x - mean), 0.0)
            low = top - sigmas * tl.sqrt(tl.sum(squares) / number)
        if (top_k > 0) & (top_k < vocab):
            low = _largest_bound(line, vocab, low, high, centre, width, top, top_k.to(tl.float32), COUNT, BLOCK)
        if typical < 1.0:
            weights, surprises = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
            for begin in range(0, vocab, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                x = tl.load(line + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
                behind = tl.maximum(x, low) - top
                weight = tl.where(x >= low, tl.exp(behind), 0.0)
                weights += weight
                surprises += weight * behind
            weight = tl.sum(weights)
            centre = top + tl.sum(surprises) / weight  # log(sum(exp(x))) - entropy
            width = _least_width(line, vocab, low, high, centre, top, typical * weight, BLOCK)
        if top_p < 1.0:
            weight = _sums(line, vocab, low, high, centre, width, top, low, WEIGHT, BLOCK)
            low = _largest_bound(line, vocab, low, high, centre, width, top, top_p * weight, WEIGHT, BLOCK)
        if (min_p > 0.0) | excludes:
            high = _largest_bound(line, vocab, low, high, centre, width, top, 1.0, COUNT, BLOCK)
        if min_p > 0.0:
            low = tl.maximum(low, high + tl.log(min_p))
        if excludes:
            weight = _sums(line, vocab, low, high, centre, width, top, low, WEIGHT, BLOCK)
            least = top + tl.log(threshold * weight)  # p >= threshold
            likely = _sums(line, vocab, low, high, centre, width, top, least, COUNT, BLOCK)
            if likely >= 2.0:
                high = _largest_bound(line, vocab, low, high, centre, width, top, likely, COUNT, BLOCK)
        for begin in range(0, vocab, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            x = tl.load(line + at, mask=at < vocab, other=float("-inf"))
            value = x.to(tl.float32)
            left = (value >= low) & (value <= high) & (tl.abs(value - centre) <= width)
            tl.store(line + at, tl.where(left, x, float("-inf")), mask=at < vocab)


@triton.jit(do_not_specialize=["lines"])
def _dry(
    logits, stride, vocab, places, rows, starts, ends, tokens, tokens_stride,
    multipliers, bases, allowed_lengths, longests, last_ns, breakers, breakers_stride, counts, lines,
    PLACES: tl.constexpr, EACH: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    counts += program.to(tl.int64) * vocab
    for nth in range(EACH):
        mine = program + programs * nth
        if mine < lines:
            place = mine.to(tl.int64)
            if PLACES:
                place = tl.load(places + mine).to(tl.int64)
            row = tl.load(rows + place).to(tl.int64)
            multiplier = tl.load(multipliers + row)
            if multiplier != 0.0:
                before = tl.load(ends + place - 1, mask=place > 0, other=0)
                length = tl.load(starts + place) + tl.load(ends + place) - before
                first = tl.maximum(0, length - tl.load(last_ns + row))
                _repeat_less(
                    logits + mine.to(tl.int64) * stride, vocab, tokens + row * tokens_stride, first, length, multiplier,
                    tl.load(bases + row), tl.load(allowed_lengths + row), tl.load(longests + row),
                    breakers + row * breakers_stride, counts, AT_ONCE,
                )  # fmt: skip


@triton.jit
def _chain(
    logits, stride, vocab, places, rows, starts, ends, prompt_lens, seeds,
    top_n_sigmas, top_ks, typical_ps, top_ps, min_ps, probabilities, thresholds,
    PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    place = program
    if PLACES:
        place = tl.load(places + program).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    sigmas, typical = tl.load(top_n_sigmas + row), tl.load(typical_ps + row)
    probability = tl.load(probabilities + row)
    if (sigmas > 0.0) | (typical < 1.0) | (probability > 0.0):
        before = tl.load(ends + place - 1, mask=place > 0, other=0)
        index = tl.load(starts + place) + tl.load(ends + place) - before - tl.load(prompt_lens + row)
        u = uniform(tl.load(seeds + 2 * row) ^ SALT, tl.load(seeds + 2 * row + 1), index).to(tl.float32)
        _truncate(
            logits + program * stride, vocab, sigmas, tl.load(top_ks + row), typical, tl.load(top_ps + row),
            tl.load(min_ps + row), probability, tl.load(thresholds + row), u, BLOCK,
        )  # fmt: skip


def llama_samplers(
    logits: Tensor, columns: tuple[Tensor, Tensor, Tensor], places: Tensor | None, state: Mapping[str, Tensor],
    breakers: Tensor, tokens: Tensor, counts: Tensor, *, block: int = BLOCK,
) -> None:  # fmt: skip
    """logits [l, vocab], changed in place; columns rows, starts, ends int32 (kernels/prepare_inputs).

    Line i of the logits belongs to request places[i], or i without places. state: columns by row, by name; breakers int32
    [rows, words], a bit for each token that is a sequence breaker; tokens int32 [rows, length]; counts: kernels/penalties's workspace.
    Lines of rows that ask for nothing are neither read nor written; the launches depend on the shapes alone."""
    lines, vocab = logits.shape
    named = places if places is not None else columns[0]
    programs = min(lines, len(counts))
    assert lines <= EACH * programs
    _dry[(programs,)](
        logits, logits.stride(0), vocab, named, *columns, tokens, tokens.stride(0),
        *(state[name] for name in OF_DRY), breakers, breakers.stride(0), counts, lines,
        PLACES=places is not None, EACH=EACH, AT_ONCE=min(AT_ONCE, block), num_warps=8,
    )  # fmt: skip
    _chain[(lines,)](
        logits, logits.stride(0), vocab, named, *columns, state["num_prompt_tokens"], state["seed"],
        *(state[name] for name in OF_CHAIN), PLACES=places is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip
