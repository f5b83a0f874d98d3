"""Rows whose text keeps to a grammar, on the worker's side: their tokens, and the masks that matchers make of them. No torch.

Owned by the engine and used by its stepper thread, but for `compile`, which other threads call. The matchers are in a process that may
die of a grammar (mask_process.py). A row is a function of its tokens, which are kept here: when that process died, all rows begin
anew in the next one, one by one, so that the row that it dies of is known, and ends with an error; others go on.

A step that verifies drafts has several lines of logits for a request, and a mask for each: what the matcher allows behind the row's
tokens and the drafts before that line. Behind a draft that may not come, and is never accepted for that, any token is allowed.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from meshlm.protocol.edges.step import NewRow, RowFailed
from meshlm.protocol.extra_kind import ExtraKind
from meshlm.protocol.extras import find_extra
from meshlm.protocol.grammar import Grammar
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.workers.output.matchers import RowBegins, Turn
from meshlm.workers.rows.changes import I32
from meshlm.workers.rows.extras.extra import MaskTaker, RowExtra, StepExtra, StepFindings
from meshlm.workers.rows.step_columns import Drafts, Mark, StepColumns

if TYPE_CHECKING:
    from meshlm.workers.output.mask_process import MaskProcess
    from meshlm.workers.output.matchers import Matchers

TOO_LATE = RowFailed("its masks could not be made anew in time; the host is busy; try again", ErrorKind.OVERLOADED)


class MatchersLost(Exception):
    """There is no process of the matchers, or it ended; the text says why. `by_grammar`: because of what it had to do."""

    def __init__(self, message: str, *, by_grammar: bool) -> None:
        super().__init__(message)
        self.message, self.by_grammar = message, by_grammar

    @property
    def failed(self) -> RowFailed:
        """The error that ends a request for it: what is not the grammar's doing may go well another time."""
        if self.by_grammar:
            return RowFailed(self.message)
        return RowFailed(f"{self.message}; try again", ErrorKind.OVERLOADED)


MAX_UNREAD = 4  # steps whose tokens may wait to be read here: their buffers are used again
MOST_DEATHS = 2  # of the process of masks, of nothing that is known, while it has a row
ANEW_S = 20.0  # for all rows that begin anew in a process of masks; the others wait for that


class TokenMask(NamedTuple):
    """The tokens that may come: for the lines of logits that have a mask, a bit for each token, lowest first. The lines of a request
    that has drafts stand together."""

    lines: NDArray[np.intp]  # [m], ascending
    words: I32  # [m, words]

    def of(self, lines: NDArray[np.intp]) -> "TokenMask":
        """The masks of these lines alone, which are ascending, by their places among these."""
        here = np.isin(self.lines, lines)
        return TokenMask(np.searchsorted(lines, self.lines[here]), self.words[here])

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """[m, vocab]"""
        return np.unpackbits(self.words.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)


class _Unread(NamedTuple):
    """Tokens that were sampled for rows with a grammar, on their way to the host."""

    rows: "dict[int, ConstrainedRow]"  # by their places among the requests that sampled
    tokens: I32
    mark: Mark
    counts: I32 | None  # of tokens that each of these got; None: one each


class FailedBehind(NamedTuple):
    """A text cannot go on behind so many of its row's drafts, if they are accepted."""

    num_drafts: int
    why: RowFailed


class ConstrainedRow:
    """One row's constraint. `failed`: why its text cannot go on; `failed_behind`: in the last step."""

    __slots__ = (
        "failed", "failed_behind", "grammar", "is_over", "num_deaths", "num_sent", "number", "output", "sampling",
    )  # fmt: skip

    def __init__(self, number: int, sampling: SamplingParams, grammar: Grammar, output: list[int]) -> None:
        self.number, self.sampling, self.grammar, self.output = number, sampling, grammar, output
        self.num_sent = -1  # tokens of the output that its matcher has; -1: it has none
        self.is_over = False  # any token may come from now on
        self.failed: RowFailed | None = None
        self.failed_behind: FailedBehind | None = None
        self.num_deaths = 0


class Ask(NamedTuple):
    """A row that wants masks: of what follows its tokens and these drafts."""

    row: ConstrainedRow
    drafts: list[int]


class Grammars:
    def __init__(self, backend: "Matchers | MaskProcess") -> None:
        self._backend = backend
        self.rows: dict[int, ConstrainedRow] = {}
        self._removed: list[int] = []
        self._last = 0
        self._unread: list[_Unread] = []

    def prepare_ahead(self) -> None:
        """Has the vocabulary loaded. What is wrong with it, the first grammar says."""
        self._backend.start()

    def compile(self, text: str) -> str:
        """Why no row can have the grammar; "" once rows may. MatchersLost when that cannot be said. Called in any thread."""
        return self._backend.compile(text)

    # --- the stepper thread ---

    def reset(self) -> None:
        for row in list(self.rows):
            self.remove_row(row)
        self._unread.clear()

    def add_row(self, new: NewRow, grammar: Grammar) -> None:
        self._last += 1
        output = np.frombuffer(new.token_ids, np.int32)[new.num_prompt_tokens :].tolist()
        self.rows[new.row] = ConstrainedRow(self._last, new.sampling, grammar, output)

    def remove_row(self, row: int) -> None:
        found = self.rows.pop(row, None)
        if found is not None and found.num_sent >= 0:
            self._removed.append(found.number)

    def of_step(self, rows: I32, step: StepColumns | None = None, why_no_graph: str = "") -> "Constraint":
        """The constraint of a step in which these rows sample. The step's drafts are read when the masks are made."""
        places = enumerate(rows.tolist()) if self.rows else ()
        found = {nth: self.rows[row] for nth, row in places if row in self.rows and not self.rows[row].is_over}
        return Constraint(self, found, step, why_no_graph)

    def mask(
        self, rows: dict[int, ConstrainedRow], drafts: Drafts | None, take: "Callable[[int], I32] | None"
    ) -> TokenMask:
        """The masks of these requests that sample. Waits for the tokens of earlier steps."""
        self.advance()
        lines, asked = np.fromiter(rows, np.intp), [Ask(row, []) for row in rows.values()]
        if drafts is not None:
            before = (np.cumsum(drafts.counts) - drafts.counts)[lines]  # drafts of the requests before
            counts = drafts.counts[lines]
            ends = zip(rows.values(), before.tolist(), (before + counts).tolist(), strict=True)
            asked = [Ask(row, drafts.tokens[begin:end].tolist()) for row, begin, end in ends]
            nth = np.cumsum(1 + counts) - 1 - counts  # line of each among these
            lines = np.repeat(lines + before - nth, 1 + counts) + np.arange(len(lines) + counts.sum())
        words = np.empty((len(lines), self._backend.num_words), np.int32) if take is None else take(len(lines))
        go_on = np.repeat([ask.row.failed is None for ask in asked], [1 + len(ask.drafts) for ask in asked])
        # Others may be in steps planned before.
        masks = words if go_on.all() else np.empty((int(go_on.sum()), words.shape[1]), np.int32)
        asked = [ask for ask in asked if ask.row.failed is None]
        try:
            if asked:
                self._turn(asked, masks)
        except MatchersLost:
            self._anew(asked, masks)
        if masks is not words:
            words[:] = -1
            words[go_on] = masks
        return TokenMask(lines, words)

    def _turn(self, asked: list[Ask], words: I32) -> None:
        """The masks of these rows, whose matchers learn what is new."""
        rows = [ask.row for ask in asked]
        begins = [
            RowBegins(row.number, row.sampling, row.grammar, np.array(row.output, np.int32).tobytes())
            for row in rows
            if row.num_sent < 0
        ]
        pushed = [(row.number, row.output[row.num_sent :]) for row in rows if 0 <= row.num_sent < len(row.output)]
        drafts = {ask.row.number: ask.drafts for ask in asked if ask.drafts}
        turned = self._backend.turn(Turn([row.number for row in rows], begins, pushed, self._removed, drafts), words)
        self._removed = []
        for row in rows:
            row.num_sent = len(row.output)
            row.failed = RowFailed(error) if (error := turned.errors.get(row.number)) else None
            row.failed_behind = None
            if (behind := turned.behind.get(row.number)) is not None:
                row.failed_behind = FailedBehind(behind[0], RowFailed(behind[1]))
            row.is_over = row.number in turned.over

    def _anew(self, asked: list[Ask], words: I32) -> None:
        """The matchers of all rows are gone: these begin anew, each by itself, and those that end the process of matchers fail."""
        self._forget_sent()
        until = time.monotonic() + ANEW_S
        ends = np.cumsum([1 + len(ask.drafts) for ask in asked])
        for ask, each in zip(asked, np.split(words, ends[:-1]), strict=True):
            self._begin_anew(ask, each, until)

    def _begin_anew(self, ask: Ask, words: I32, until: float) -> None:
        """Writes the row's masks. One that ends the process by its drafts alone fails where the first of them is accepted."""
        row, drafts, behind = ask.row, ask.drafts, None
        row.num_deaths += 1
        while time.monotonic() <= until:
            try:
                self._turn([Ask(row, drafts)], words[: 1 + len(drafts)])
                row.failed_behind = behind or row.failed_behind
                return
            except MatchersLost as lost:
                self._forget_sent()
                row.num_deaths += not lost.by_grammar
                if lost.by_grammar and drafts:
                    drafts, behind, words[1:] = [], FailedBehind(1, lost.failed), -1
                elif lost.by_grammar or row.num_deaths > MOST_DEATHS:
                    row.failed, words[:] = lost.failed, -1
                    return
        row.failed, words[:] = TOO_LATE, -1

    def _forget_sent(self) -> None:
        self._removed = []
        for row in self.rows.values():
            row.num_sent = -1

    def sampled(self, rows: dict[int, ConstrainedRow], tokens: I32, mark: Mark, counts: I32 | None = None) -> None:
        """The tokens of these requests are on the host behind the mark."""
        self._unread.append(_Unread(rows, tokens, mark, counts))
        if len(self._unread) > MAX_UNREAD:
            self.advance()

    def advance(self) -> None:
        """Reads all tokens that are on their way."""
        unread, self._unread = self._unread, []
        for rows, tokens, mark, counts in unread:
            mark.synchronize()
            each = np.ones(len(tokens), np.int32) if counts is None else counts
            ends = np.cumsum(each)
            for nth, row in rows.items():
                row.output += tokens[ends[nth] - each[nth] : ends[nth]].tolist()


class Constraint(StepExtra[Any]):
    """One step's rows with a grammar, by their places among the requests that sample; few steps have any."""

    needs_pause = True

    def __init__(
        self,
        grammars: Grammars,
        rows: dict[int, ConstrainedRow],
        step: StepColumns | None = None,
        why_no_graph: str = "",
    ) -> None:
        """step: that the rows sample in."""
        self._grammars, self._rows, self._step, self.why_no_graph = grammars, rows, step, why_no_graph
        self.failed: dict[int, RowFailed] = {}  # why the row's text cannot go on
        self._behind: dict[int, FailedBehind] = {}  # or why not behind drafts
        self._counts: I32 | None = None

    def __bool__(self) -> bool:
        return bool(self._rows)

    def mask(self, take: Callable[[int], I32] | None = None) -> TokenMask | None:
        """Makes the masks, which waits for the tokens of the step before. take: where masks are written, of so many lines."""
        if not self._rows:
            return None
        mask = self._grammars.mask(self._rows, None if self._step is None else self._step.drafts, take)
        self.failed = {nth: row.failed for nth, row in self._rows.items() if row.failed is not None}
        self._behind = {nth: row.failed_behind for nth, row in self._rows.items() if row.failed_behind is not None}
        return mask

    def before_head(self, head: MaskTaker) -> None:
        if (mask := self.mask(head.take_mask)) is not None:
            head.mask(mask)

    def after_head(self, tokens: I32, end: Mark, counts: I32 | None = None) -> None:
        self._counts = counts
        if self._rows:
            self._grammars.sampled(self._rows, tokens, end, counts)

    def findings(self) -> StepFindings:
        assert self._step is not None
        failed, counts = dict(self.failed), self._counts
        for nth, behind in self._behind.items():
            if counts is not None and counts[nth] > behind.num_drafts:
                failed.setdefault(nth, behind.why)
        return StepFindings(failed={int(self._step.places[nth]): why for nth, why in failed.items()})


class GrammarRows(RowExtra[Any]):
    extra = Grammar

    def __init__(self, grammars: Grammars, *, together: bool = False, loads_ahead: bool = False) -> None:
        """together: ranks that step together replay the same graphs, and no pause is in these. loads_ahead: in idle time."""
        self.grammars, self._loads_ahead = grammars, loads_ahead
        self._why_no_graph = "grammar" if together else ""

    def prepare(self, extra: ExtraKind) -> RowFailed | None:
        assert isinstance(extra, Grammar)
        try:
            error = self.grammars.compile(extra.text)
        except MatchersLost as lost:
            return lost.failed
        return RowFailed(error) if error else None

    def rewritten(self, new: NewRow) -> NewRow:
        # its mask does that
        sampling = replace(new.sampling, min_tokens=0, allowed_token_ids=(), bad_words_token_ids=())
        return replace(new, sampling=sampling)

    def add_row(self, new: NewRow) -> None:
        grammar = find_extra(new.extras, Grammar)
        assert grammar is not None
        self.grammars.add_row(new, grammar)

    def remove_row(self, row: int) -> None:
        self.grammars.remove_row(row)

    def for_step(self, step: StepColumns) -> StepExtra[Any] | None:
        return self.grammars.of_step(step.rows[step.places], step, self._why_no_graph) or None

    def in_idle_time(self) -> None:
        if self._loads_ahead:
            self._loads_ahead = False
            self.grammars.prepare_ahead()
