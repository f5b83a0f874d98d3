"""Penalties on what a request has said already, from its token ids on the device: no table by row that would have to be kept, no host.

    x + add                                                     for a few ids of its own, before an output index: bias, min_tokens
    x > 0:  x / repetition     else:  x * repetition            for every id of prompt and output     (Keskar et al. 2019, eq. 2)
    x - frequency * n - presence                                for every id that came n > 0 times in the output    (OpenAI's API)

In this order. Logits change in place, rounded to their dtype by each of the two steps. A line belongs to one program, which counts the
ids of its request in a table of its own, one int32 for each id of the vocabulary: output tokens add one, prompt tokens set a bit. Then
it goes over the same ids again and swaps each count with zero: whoever gets the count adjusts that logit, so each is adjusted once, in
whatever order, and the table is zero again. There are a few programs with several lines each, so that room is bounded whatever the
batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 36
EACH = 8  # lines of a program at most: one number, so that there is one variant to compile
BLOCK = 2048
IN_PROMPT = tl.constexpr(1 << 30)


@triton.jit
def _say_less(line, vocab, ids, num_prompt, length, counts, repetition, presence, frequency, BLOCK: tl.constexpr):
    """The penalties of one line; its edits were written before the first barrier."""
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
    for begin in range(0, length, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        token = tl.load(ids + i, mask=i < length, other=-1)
        real = (token >= 0) & (token < vocab)
        count = tl.atomic_xchg(counts + token, tl.zeros((BLOCK,), tl.int32), mask=real, sem="relaxed")
        count = tl.where(real, count, 0)
        real = count != 0
        x = tl.load(line + token, mask=real, other=0.0).to(tl.float32)
        x = tl.where(x > 0, x / repetition, x * repetition)
        said = count & (IN_PROMPT - 1)
        x -= frequency * said.to(tl.float32) + tl.where(said > 0, presence, 0.0)
        tl.store(line + token, x.to(line.dtype.element_ty), mask=real)
    tl.debug_barrier()  # all is zero again


@triton.jit(do_not_specialize=["lines"])
def _penalise(
    logits, stride, vocab, places, rows, starts, ends, repetition, presence, frequency, num_edits, edit_ids, edit_adds, edit_untils,
    prompt_lens, tokens, tokens_stride, counts, lines,
    PLACES: tl.constexpr, EACH: tl.constexpr, EDITS: tl.constexpr, BLOCK: tl.constexpr,
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
    edited = tl.load(num_edits + row, mask=inside, other=0) > 0
    left_edits = tl.sum(tl.where(edited, 1 << nth, 0), axis=0)
    counts += program.to(tl.int64) * vocab
    line = program.to(tl.int64)
    while (left | left_edits) > 0:
        if ((left | left_edits) & 1) != 0:
            at = line
            if PLACES:
                at = tl.load(places + line).to(tl.int64)
            before = tl.load(ends + at - 1, mask=at > 0, other=0)
            length = tl.load(starts + at) + tl.load(ends + at) - before
            own = tl.load(rows + at).to(tl.int64)
            num_prompt = tl.minimum(tl.load(prompt_lens + own), length)
            if (left_edits & 1) != 0:
                nth_edit = tl.arange(0, EDITS)
                edit = own * EDITS + nth_edit
                there = nth_edit < tl.load(num_edits + own)
                token = tl.load(edit_ids + edit, mask=there, other=-1)
                there &= (token >= 0) & (token < vocab)
                there &= length - num_prompt < tl.load(edit_untils + edit, mask=there, other=0)
                to = logits + line * stride + token
                x = tl.load(to, mask=there, other=0.0).to(tl.float32)
                x += tl.load(edit_adds + edit, mask=there, other=0.0)
                tl.store(to, x.to(logits.dtype.element_ty), mask=there)
            if (left & 1) != 0:
                ids = tokens + own * tokens_stride
                _say_less(
                    logits + line * stride, vocab, ids, num_prompt, length, counts,
                    tl.load(repetition + own), tl.load(presence + own), tl.load(frequency + own), BLOCK,
                )  # fmt: skip
        left = left >> 1
        left_edits = left_edits >> 1
        line += programs


class Penalties:
    """Persistent float32 columns by row: repetition (off: 1), presence and frequency (off: 0)."""

    __slots__ = ("frequency", "presence", "repetition")

    def __init__(self, repetition: Tensor, presence: Tensor, frequency: Tensor) -> None:
        self.repetition, self.presence, self.frequency = repetition, presence, frequency


class Edits:
    """Persistent lists by row: int32 num [rows], int32 ids, float32 adds and int32 untils [rows, a power of two]: of the first num ids
    add so much, while the token's output index is below the last."""

    __slots__ = ("adds", "ids", "num", "untils")

    def __init__(self, num: Tensor, ids: Tensor, adds: Tensor, untils: Tensor) -> None:
        self.num, self.ids, self.adds, self.untils = num, ids, adds, untils


def workspace(lines: int, vocab: int, device: torch.device) -> Tensor:
    """Counts, zero before and after each launch of up to `lines` lines."""
    return torch.zeros(min(lines, PROGRAMS), vocab, dtype=torch.int32, device=device)


def penalise(
    logits: Tensor, columns: tuple[Tensor, Tensor, Tensor], places: Tensor | None, state: Penalties, edits: Edits,
    prompt_lens: Tensor, tokens: Tensor, counts: Tensor, *, block: int = BLOCK,
) -> None:  # fmt: skip
    """logits [l, vocab], changed in place; columns rows, starts, ends int32 (kernels/prepare_inputs).

    Line i of the logits belongs to request places[i], or i without places. prompt_lens int32 by row, tokens int32 [rows, length]: all
    that are known before the one that is drawn. Other lines are not touched; the launch depends on the shapes alone."""
    lines, vocab = logits.shape
    rows, starts, ends = columns
    programs = min(lines, len(counts))
    assert lines <= EACH * programs
    _penalise[(programs,)](
        logits, logits.stride(0), vocab, places if places is not None else rows, rows, starts, ends,
        state.repetition, state.presence, state.frequency, edits.num, edits.ids, edits.adds, edits.untils,
        prompt_lens, tokens, tokens.stride(0), counts, lines,
        PLACES=places is not None, EACH=EACH, EDITS=edits.ids.shape[1],
        BLOCK=block, num_warps=16,
    )  # fmt: skip
