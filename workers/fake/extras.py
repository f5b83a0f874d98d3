"""The extras of the fake worker's rows, of the same kinds as the model engine's: what they make of the states that its slots hold."""

from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.extras import find_extra
from meshlm.protocol.media import Media
from meshlm.protocol.pool import PoolKind
from meshlm.protocol.prompt_embeds import PromptEmbeds
from meshlm.workers.fake.tokens import U64, columns, tokens_of_embeds, tokens_of_media, vectors
from meshlm.workers.output.grammars import GrammarRows, Grammars, TokenMask
from meshlm.workers.rows.changes import I32, I64, unpacked
from meshlm.workers.rows.extras.extra import RowExtra, RowExtras, StepExtra, StepFindings
from meshlm.workers.rows.extras.prompt_results import Pooling, PoolingRows, PromptLogprobsRows, PromptSpan
from meshlm.workers.rows.step_columns import Drafts, StepColumns
from meshlm.workers.rows.table import RowTable


class StepArrays(NamedTuple):
    """One step, host side. n requests, t tokens."""

    rows: I32  # [n]
    starts: I32  # [n] first position computed
    counts: I32  # [n] positions computed
    samples: NDArray[np.bool_]  # [n]
    query_start: I32  # [n + 1] prefix sum of counts
    slots: I64  # [t, groups] block * block_size + offset
    token_ids: I32  # [t]; -1 where nobody knows it yet


class FakeRows:
    """`tokens` [rows, length] and `blocks` [groups, rows, blocks] are views of the table's array."""

    def __init__(self, max_rows: int, max_model_len: int, block_size: int, num_groups: int) -> None:
        self.table = table = RowTable(max_rows, max_model_len, block_size, num_groups)
        self._state = np.zeros(table.num_ints, np.int32)
        self.tokens, self.blocks = (
            self._state[region.begin : region.end].reshape(region.shape)
            for region in (table.tokens, table.block_tables)
        )
        self.num_known = np.zeros(table.num_rows, np.int32)  # leading tokens of each row that are known

    def apply(self, plan: StepPlan) -> None:
        """Rows that come, blocks that are appended."""
        changes, segments = self.table.changes(plan)
        if segments:
            places, values = unpacked(changes, segments)
            self._state[places] = values
        for new in plan.new_rows:
            self.num_known[new.row] = len(new.token_ids) // 4
        if plan.input_ids:
            count = len(plan.input_ids) // 4
            self.num_known[np.frombuffer(plan.rows, np.int32)[:count]] = (
                np.frombuffer(plan.starts, np.int32)[:count] + 1
            )

    def step(self, step: StepColumns) -> StepArrays:
        """A step's columns as flat arrays; call after `apply`."""
        rows, starts, counts = step.rows, step.starts, step.counts
        samples = np.ones(step.n, np.bool_) if step.samples is None else step.samples
        query_start = np.zeros(step.n + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        token_rows, positions = step.of_tokens()
        slots = self.slots(token_rows, positions)
        token_ids = np.where(positions < self.num_known[token_rows], self.tokens[token_rows, positions], np.int32(-1))
        return StepArrays(rows, starts, counts, samples, query_start, slots, token_ids)

    def slots(self, rows: NDArray[Any], positions: I64) -> I64:
        """The slots in which each group has these positions: an array of their common shape, and [groups] behind."""
        size = self.table.block_size
        blocks = np.moveaxis(self.blocks[:, rows, positions // size], 0, -1).astype(np.int64)
        found: I64 = blocks * size + (positions % size)[..., None]
        return found

    def last_tokens(self, rows: I32, counts: I32) -> Drafts:
        """The last known tokens of these rows, so many of each."""
        nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return Drafts(
            counts, self.tokens[np.repeat(rows, counts), np.repeat(self.num_known[rows] - counts, counts) + nth]
        )

    def sampled(self, arrays: StepArrays, token_ids: I32) -> None:
        """The tokens of the rows that sampled are known now (a device that computes in step)."""
        rows = arrays.rows[arrays.samples]
        at = (arrays.starts + arrays.counts)[arrays.samples]
        self.tokens[rows, at] = token_ids
        self.num_known[rows] = at + 1


def extras_of(rows: FakeRows, grammars: Grammars, vocab_size: int, vector_len: int) -> RowExtras[U64]:
    """All kinds that the fake worker serves."""
    table = rows.table
    pooler = FakePooler(table.num_rows, vector_len)
    kinds: list[RowExtra[U64]] = [
        FakeVectors(vocab_size),
        FakeMedia(vocab_size),
        PromptLogprobsRows(table.columns, lambda spans: FakePromptLogprobs(spans, rows, vocab_size)),
        PoolingRows(table.columns, lambda step: FakePooled(pooler, step)),
        GrammarRows(grammars),
    ]
    return RowExtras(kinds, table.num_rows)


class FakeHead:
    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self.masked: TokenMask | None = None

    def take_mask(self, count: int) -> I32:
        return np.empty((count, self._num_words), np.int32)

    def mask(self, mask: TokenMask) -> None:
        self.masked = mask


class FakeVectors(RowExtra[U64]):
    """Vectors in the place of tokens are read as the tokens that `tokens_of_embeds` makes of them."""

    extra = PromptEmbeds

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def rewritten(self, new: NewRow) -> NewRow:
        embeds, token_ids = find_extra(new.extras, PromptEmbeds), np.frombuffer(new.token_ids, np.int32).copy()
        assert embeds is not None
        ids = tokens_of_embeds(embeds, self._vocab_size)
        for first, count, at in embeds.parts(0, new.num_prompt_tokens):
            token_ids[first : first + count] = ids[at : at + count]
        return replace(new, token_ids=token_ids.tobytes())


class FakeMedia(RowExtra[U64]):
    """Vectors of images are read as the tokens that `tokens_of_media` makes of their digests."""

    extra = Media

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def rewritten(self, new: NewRow) -> NewRow:
        media, token_ids = find_extra(new.extras, Media), np.frombuffer(new.token_ids, np.int32).copy()
        assert media is not None
        for item in media.items:
            ids = tokens_of_media(item, self._vocab_size)
            token_ids[item.position + np.flatnonzero(np.frombuffer(item.is_vector, np.uint8))] = ids
        return replace(new, token_ids=token_ids.tobytes())


class FakePromptLogprobs(StepExtra[U64]):
    """The log-probabilities of the prompt tokens that follow those of one step."""

    def __init__(self, spans: list[PromptSpan], rows: FakeRows, vocab_size: int) -> None:
        self._spans, self._rows, self._vocab_size = spans, rows, vocab_size

    def findings(self) -> StepFindings:
        return StepFindings(
            prompt_logprobs={
                place: columns(self._rows.tokens[row, position : position + count], width, self._vocab_size)
                for place, row, _, position, count, width in self._spans
            }
        )


class FakePooler:
    """The vectors of prompts so far, by row; and the lines of those that want one of each token."""

    def __init__(self, num_rows: int, vector_len: int) -> None:
        self._so_far = np.zeros((num_rows, vector_len))
        self._lines: dict[int, NDArray[np.float64]] = {}

    def pool(self, states: U64, each: Pooling) -> bytes:
        """A row's vector so far, made of the states of its tokens in this step."""
        lines, row = vectors(states[each.begin : each.end]), each.row
        if each.is_first:
            self._so_far[row] = 0
        match each.kind:
            case PoolKind.LAST:
                self._so_far[row] = lines[-1]
            case PoolKind.MEAN:
                self._so_far[row] += lines.sum(0)
            case PoolKind.SPLADE:
                self._so_far[row] = np.maximum(self._so_far[row], lines.max(0))
            case PoolKind.CLS if each.is_first:
                self._so_far[row] = lines[0]
            case PoolKind.ALL:
                self._lines[row] = np.concatenate((self._lines[row], lines)) if each.start else lines
        divisor = each.num_prompt if each.kind is PoolKind.MEAN else 1
        of_row = self._lines[row] if each.kind is PoolKind.ALL else self._so_far[row] / divisor
        return of_row.astype(np.float32).tobytes()


class FakePooled(StepExtra[U64]):
    """The vectors of the rows of one step whose prompts end in it."""

    def __init__(self, pooler: FakePooler, step: list[Pooling]) -> None:
        self._pooler, self._step = pooler, step
        self._pooled: dict[int, bytes] = {}

    def after_model(self, hidden: U64) -> None:
        for each in self._step:
            vector = self._pooler.pool(hidden, each)
            if each.is_last:
                self._pooled[each.place] = vector

    def findings(self) -> StepFindings:
        return StepFindings(self._pooled)
