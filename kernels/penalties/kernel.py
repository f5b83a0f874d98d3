"""Penalties on what a request has said already, from its token ids on the device: no table by row that would have to be kept, no host.

    x > 0:  x / repetition     else:  x * repetition            for every id of prompt and output     (Keskar et al. 2019, eq. 2)
    x - frequency * n - presence                                for every id that came n > 0 times in the output    (OpenAI's API)

Logits change in place, rounded once to their dtype. A line belongs to one program, which counts the ids of its request in a table of
its own, one int32 for each id of the vocabulary: output tokens add one, prompt tokens set a bit. Then it goes over the same ids again
and swaps each count with zero: whoever gets the count adjusts that logit, so each is adjusted once, in whatever order, and the table is
zero again. There are a few programs with several lines each, so that room is bounded whatever the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 32
MOST_LINES = 16 * PROGRAMS  # of one launch
BLOCK = 2048
IN_PROMPT = tl.constexpr(1 << 30)


@triton.jit(do_not_specialize=["lines"])
def _penalise(
    logits, stride, vocab, places, rows, starts, ends, repetition, presence, frequency, prompt_lens, tokens, tokens_stride,
    counts, lines,
    PLACES: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    nth = tl.arange(0, EACH)
    mine = program + programs * nth
    inside = mine < lines
    place = mine
    if PLACES:
        place = tl.load(places + mine, mask=inside, other=0)
    row = tl.load(rows + place, mask=inside, other=0)
    asks = tl.load(repetition + row, mask=inside, other=1.0) != 1.0
    asks |= tl.load(presence + row, mask=inside, other=0.0) != 0.0
    asks |= tl.load(frequency + row, mask=inside, other=0.0) != 0.0
    left = tl.sum(tl.where(asks, 1 << nth, 0), axis=0)
    counts += program.to(tl.int64) * vocab
    line = program.to(tl.int64)
    while left > 0:
        if (left & 1) != 0:
            at = line
            if PLACES:
                at = tl.load(places + line).to(tl.int64)
            before = tl.load(ends + at - 1, mask=at > 0, other=0)
            length = tl.load(starts + at) + tl.load(ends + at) - before
            own = tl.load(rows + at).to(tl.int64)
            num_prompt = tl.minimum(tl.load(prompt_lens + own), length)
            ids = tokens + own * tokens_stride
            for begin in range(0, num_prompt, BLOCK):
                i = begin + tl.arange(0, BLOCK)
                token = tl.load(ids + i, mask=i < num_prompt, other=-1)
                real = (token >= 0) & (token < vocab)
                tl.atomic_or(counts + token, tl.full((BLOCK,), IN_PROMPT, tl.int32), mask=real, sem="relaxed")
            for begin in range(num_prompt, length, BLOCK):
                i = begin + tl.arange(0, BLOCK)
                token = tl.load(ids + i, mask=i < length, other=-1)
                real = (token >= 0) & (token < vocab)
                tl.atomic_add(counts + token, tl.full((BLOCK,), 1, tl.int32), mask=real, sem="relaxed")
            tl.debug_barrier()  # all are counted
            factor = tl.load(repetition + own)
            each, once = tl.load(frequency + own), tl.load(presence + own)
            for begin in range(0, length, BLOCK):
                i = begin + tl.arange(0, BLOCK)
                token = tl.load(ids + i, mask=i < length, other=-1)
                real = (token >= 0) & (token < vocab)
                count = tl.atomic_xchg(counts + token, tl.zeros((BLOCK,), tl.int32), mask=real, sem="relaxed")
                count = tl.where(real, count, 0)
                real = count != 0
                to = logits + line * stride + token
                x = tl.load(to, mask=real, other=0.0).to(tl.float32)
                x = tl.where(x > 0, x / factor, x * factor)
                said = count & (IN_PROMPT - 1)
                x -= each * said.to(tl.float32) + tl.where(said > 0, once, 0.0)
                tl.store(to, x.to(logits.dtype.element_ty), mask=real)
            tl.debug_barrier()  # all is zero again
        left = left >> 1
        line += programs


class Penalties:
    """Persistent float32 columns by row: repetition (off: 1), presence and frequency (off: 0)."""

    __slots__ = ("frequency", "presence", "repetition")

    def __init__(self, repetition: Tensor, presence: Tensor, frequency: Tensor) -> None:
        self.repetition, self.presence, self.frequency = repetition, presence, frequency


def workspace(lines: int, vocab: int, device: torch.device) -> Tensor:
    """Counts, zero before and after each launch of up to `lines` lines."""
    return torch.zeros(min(lines, PROGRAMS), vocab, dtype=torch.int32, device=device)


def penalise(
    logits: Tensor,
    columns: tuple[Tensor, Tensor, Tensor],
    places: Tensor | None,
    state: Penalties,
    prompt_lens: Tensor,
    tokens: Tensor,
    counts: Tensor,
    *,
    block: int = BLOCK,
) -> None:
    """logits [l, vocab], changed in place; columns rows, starts, ends int32 (kernels/step_input).

    Line i of the logits belongs to request places[i], or i without places. prompt_lens int32 by row, tokens int32 [rows, length]: all
    that are known before the one that is drawn. Lines of rows without penalties are not touched; the launch depends on shapes alone.
    """
    lines, vocab = logits.shape
    assert lines <= MOST_LINES
    rows, starts, ends = columns
    programs = min(lines, len(counts))
    _penalise[(programs,)](
        logits, logits.stride(0), vocab, places if places is not None else rows, rows, starts, ends,
        state.repetition, state.presence, state.frequency, prompt_lens, tokens, tokens.stride(0), counts, lines,
        PLACES=places is not None, EACH=triton.next_power_of_2(triton.cdiv(lines, programs)), BLOCK=block, num_warps=16,
    )  # fmt: skip
