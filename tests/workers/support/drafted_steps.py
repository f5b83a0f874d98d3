"""Steps that verify drafts, as a scheduler would plan them, and the texts that come of them."""

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from cpu_steps import LENGTH, PROMPTS, step, tokens_of
from msgspec.structs import replace

from meshlm.protocol.edges.step import NewRow, StepPlan, StepResult
from meshlm.protocol.edges.token import LogprobColumns
from meshlm.protocol.extras import Extras
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row, StepId
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.rows.changes import I32, I64
from meshlm.workers.rows.step_columns import StepColumns
from meshlm.workers.speculative.drafter import Drafts, no_drafts


class Text(NamedTuple):
    tokens: list[int]
    logprobs: list[LogprobColumns]  # token by token


class Scripted:
    """Guesses what a test says: the row's own future, wrong in places, as far as it was told."""

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}  # by row: all its tokens
        self.script: Iterator[tuple[int, int]] = repeat(
            (0, 0)
        )  # how many, and which of them is wrong (none: a large one)
        self.tokens: I32 = np.empty((0, 0), np.int32)

    def reset(self) -> None: ...

    def add_row(self, new: NewRow) -> None: ...

    def remove_row(self, row: int, num_known: int) -> None: ...

    def computed(self, step: StepColumns, counts: I32, hidden: torch.Tensor) -> None: ...

    def propose(self, rows: I32, lens: I64, most: I32) -> Drafts:
        drafts = no_drafts(most)
        for nth, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
            count, wrong = next(self.script)
            text = self.texts[row]
            assert self.tokens[row, :length].tolist() == text[:length], "what is known is what really stands there"
            ahead = text[length : length + min(count, int(most[nth]))]
            drafts.tokens[nth, : len(ahead)] = [abs(token - (at == wrong)) for at, token in enumerate(ahead)]
            drafts.counts[nth] = len(ahead)
        return drafts


def row_of(made: ModelEngine, row: int, tokens: list[int], num_prompt: int, params: SamplingParams) -> NewRow:
    """It has blocks for the whole context, in each group."""
    blocks = -(-LENGTH // made.rows.block_size) * made.rows.num_groups
    own = np.arange(row * blocks, (row + 1) * blocks, dtype=np.int32).tobytes()
    return NewRow(Row(row), np.array(tokens, np.int32).tobytes(), num_prompt, own, params)


def each_of(columns: LogprobColumns, count: int) -> list[LogprobColumns]:
    """Columns of one position each."""

    def part(values: bytes, nth: int) -> bytes:
        size = len(values) // count
        return values[nth * size : (nth + 1) * size]

    return [
        LogprobColumns(columns.width, *(part(getattr(columns, name), nth) for name in columns.__struct_fields__[1:]))
        for nth in range(count)
    ]


def add(texts: list[Text], result: StepResult, rows: list[int]) -> None:
    tokens = tokens_of(result)
    counts = np.frombuffer(result.counts, np.int32).tolist() if result.counts else [1] * len(rows)
    assert len(tokens) == sum(counts)
    at = 0
    for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
        texts[row].tokens.extend(tokens[at : at + count])
        if place in result.logprobs:
            texts[row].logprobs.extend(each_of(result.logprobs[place], count))
        at += count


def begun(made: ModelEngine, params: list[SamplingParams], extras: Sequence[Extras] = ((),) * 3) -> list[Text]:
    """Each row has its prompt and one token."""
    made.reset()
    texts = [Text([], []) for _ in PROMPTS]
    both = enumerate(zip(PROMPTS, params, strict=True))
    news = [row_of(made, row, prompt, len(prompt), each) for row, (prompt, each) in both]
    news = [replace(row, extras=some) for row, some in zip(news, extras, strict=True)]
    add(texts, step(made, [(row, 0, len(prompt), True) for row, prompt in enumerate(PROMPTS)], news), [0, 1, 2])
    return texts


def verify(
    made: ModelEngine, parts: list[tuple[int, int, int]], most: list[int], news: tuple[NewRow, ...] = ()
) -> StepResult:
    """parts: row, start, count, all of which sample; most: drafts of each. Rows that come are taken from others before."""
    rows, starts, counts = (np.array([part[at] for part in parts], np.int32).tobytes() for at in range(3))
    removed = np.array([row.row for row in news], np.int32).tobytes()
    drafts, tokens = np.array(most, np.int32).tobytes(), sum(part[2] for part in parts) + sum(most)
    plan = StepPlan(
        1, StepId(1), rows, starts, counts, b"", tokens, removed_rows=removed, new_rows=list(news), num_drafts=drafts
    )
    return made.step(plan, 0).wait()


def decode(made: ModelEngine, rows: list[int], most: list[int]) -> StepResult:
    """The plan says the most that rows may have by now, or less than they have: nobody reads it."""
    return verify(made, [(row, LENGTH - 20, 1) for row in rows], most)


def plain(
    made: ModelEngine, params: list[SamplingParams], count: int, extras: Sequence[Extras] = ((),) * 3
) -> list[Text]:
    """So many tokens of each row, one a step."""
    texts = begun(made, params, extras)
    while len(texts[0].tokens) < count:
        add(texts, decode(made, [0, 1, 2], [0, 0, 0]), [0, 1, 2])
    return texts
