"""Greedy and temperature sampling over the whole vocabulary, without a sort and with one pass over the logits.

    greedy (temperature below 1e-5): the first index of the largest logit
    NONE_LEFT or NOT_NUMBERS, and 0 behind the request's tokens, where no token can be chosen (outcomes.py)
    else: the first id whose cumulative softmax(logits / temperature) exceeds u        (inversion; Devroye 1986, ch. III.2)

u is draw i of the request: SplitMix64 of (seed, output index) as in workers/output/sampler.py (Steele et al. 2014), so that a stream
which is continued elsewhere goes on with its own draws. `_partial` reduces chunks of the vocabulary; `_pick` finds the chunk in which
the cumulative sum passes u, and the id within that chunk.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels.sample import outcomes

CHUNK = 4096
NONE_LEFT, NOT_NUMBERS = tl.constexpr(outcomes.NONE_LEFT), tl.constexpr(outcomes.NOT_NUMBERS)


@triton.jit
def _partial(
    logits, stride, vocab, places, rows, temperatures, best, best_at, most, sums,
    PLACES: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    line, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = line
    if PLACES:
        place = tl.load(places + line).to(tl.int64)
    temperature = tl.load(temperatures + tl.load(rows + place))
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + line * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    to = line * CHUNKS + chunk
    tl.store(best + to, top)
    tl.store(best_at + to, tl.min(tl.where(x == x, tl.where(x == top, at, 2147483647), NOT_NUMBERS), axis=0))
    if temperature >= 1e-5:
        scaled = x / temperature
        limit = tl.max(scaled, axis=0)
        base = tl.where(limit == float("-inf"), 0.0, limit)
        tl.store(most + to, limit)
        tl.store(sums + to, tl.sum(tl.exp(scaled - base), axis=0))


@triton.jit
def uniform(low, high, index):
    """Draw `index` of the seed (two int32 halves), in [0, 1)."""
    seed = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    z = seed + (index.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _pick(
    logits, stride, vocab, places, rows, starts, ends, temperatures, seeds, prompt_lens, best, best_at, most, sums,
    tokens, tokens_stride, out,
    PLACES: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    place = line
    if PLACES:
        place = tl.load(places + line).to(tl.int64)
    before = tl.load(ends + place - 1, mask=place > 0, other=0)
    count = tl.load(ends + place) - before
    row = tl.load(rows + place).to(tl.int64)
    length = tl.load(starts + place) + count
    temperature = tl.load(temperatures + row)
    c = tl.arange(0, WIDE)
    here = line * CHUNKS + c
    tops = tl.load(best + here, mask=c < CHUNKS, other=float("-inf"))
    ids = tl.load(best_at + here, mask=c < CHUNKS, other=2147483647)
    top = tl.max(tops, axis=0)
    if temperature < 1e-5:
        token = tl.min(tl.where(tops == top, ids, 2147483647), axis=0)
    else:
        limits = tl.load(most + here, mask=c < CHUNKS, other=float("-inf"))
        limit = tl.max(limits, axis=0)
        part = tl.load(sums + here, mask=c < CHUNKS, other=0.0) * tl.exp(limits - limit)
        upto = tl.cumsum(part.to(tl.float64), axis=0)
        total = tl.max(upto, axis=0)
        index = length - tl.load(prompt_lens + row)
        target = uniform(tl.load(seeds + 2 * row), tl.load(seeds + 2 * row + 1), index) * total
        passed = tl.sum((upto <= target).to(tl.int32), axis=0)
        usable = tl.max(tl.where(part > 0.0, c, 0), axis=0)
        chunk = tl.minimum(passed, usable)
        left = target - tl.max(tl.where(c < chunk, upto, 0.0), axis=0)
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + line * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        weight = tl.exp(x / temperature - limit)
        within = tl.cumsum(weight, axis=0)
        # Rounding may leave the target at the very end: then the last id that has any weight.
        hit = (within.to(tl.float64) > left) & (weight > 0.0)
        first = tl.min(tl.where(hit, at, 2147483647), axis=0)
        final = tl.max(tl.where(weight > 0.0, at, 0), axis=0)
        token = tl.where(top == float("inf"), NOT_NUMBERS, tl.minimum(first, final))
    token = tl.where(top == float("-inf"), NONE_LEFT, token)
    token = tl.where(tl.min(ids, axis=0) < 0, NOT_NUMBERS, token)
    tl.store(out + line, token)
    if count > 0:
        tl.store(tokens + row * tokens_stride + length, tl.maximum(token, 0))


class Rows:
    """The persistent rows that sampling reads and writes, by row: float32 temperature, int32 seeds [rows, 2] (low and high half),
    int32 prompt_lens, int32 tokens [rows, length]."""

    __slots__ = ("prompt_lens", "seeds", "temperature", "tokens")

    def __init__(self, temperature: Tensor, seeds: Tensor, prompt_lens: Tensor, tokens: Tensor) -> None:
        self.temperature, self.seeds, self.prompt_lens, self.tokens = temperature, seeds, prompt_lens, tokens


def workspace(lines: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for the reduced chunks of `lines` rows of logits."""
    shape = (lines, triton.cdiv(vocab, CHUNK))
    made = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(3)]
    return made[0], torch.empty(shape, dtype=torch.int32, device=device), made[1], made[2]


def sample(
    logits: Tensor,
    columns: tuple[Tensor, Tensor, Tensor],
    places: Tensor | None,
    state: Rows,
    scratch: tuple[Tensor, Tensor, Tensor, Tensor],
    out: Tensor,
) -> None:
    """logits [l, vocab]; columns rows, starts, ends int32 (kernels/prepare_inputs). out int32 [>= l] gets the ids.

    Line i of the logits belongs to request places[i], or i without places. The id is also written behind the request's tokens;
    requests without tokens (padding) write nothing there."""
    lines, vocab = logits.shape
    rows, starts, ends = columns
    chunks = triton.cdiv(vocab, CHUNK)
    named = places if places is not None else rows
    _partial[(lines, chunks)](
        logits, logits.stride(0), vocab, named, rows, state.temperature, *scratch,
        PLACES=places is not None, CHUNKS=chunks, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    _pick[(lines,)](
        logits, logits.stride(0), vocab, named, rows, starts, ends, state.temperature, state.seeds, state.prompt_lens,
        *scratch, state.tokens, state.tokens.stride(0), out,
        PLACES=places is not None, CHUNKS=chunks, WIDE=triton.next_power_of_2(chunks), CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
