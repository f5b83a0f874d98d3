"""Rows whose text keeps to a grammar: their place in a step. What their masks are, output/grammars.py knows. No torch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshlm.protocol.edges.step import NewRow, RowFailed
from meshlm.protocol.extra_kind import ExtraKind
from meshlm.protocol.extras import find_extra
from meshlm.protocol.grammar import Grammar
from meshlm.workers.output.grammars import Constraint, Grammars, unconstrained
from meshlm.workers.output.matchers_lost import MatchersLost
from meshlm.workers.rows.changes import I32
from meshlm.workers.rows.extras.extra import Mark, MaskTaker, RowExtra, StepExtra, StepFindings
from meshlm.workers.rows.step_columns import StepColumns


class GrammarStep(StepExtra[Any]):
    """The constraint of the rows that sample in a step."""

    needs_pause = True

    def __init__(self, constraint: Constraint, places: NDArray[np.int64], why_no_graph: str) -> None:
        self._constraint, self._places, self.why_no_graph = constraint, places, why_no_graph

    def before_head(self, head: MaskTaker) -> None:
        if (mask := self._constraint.mask(head.take_mask)) is not None:
            head.mask(mask)

    def after_head(self, tokens: I32, end: Mark) -> None:
        self._constraint.sampled(tokens, end)

    def findings(self) -> StepFindings:
        failed = self._constraint.failed
        return StepFindings(failed={int(self._places[line]): why for line, why in failed.items()})


class GrammarRows(RowExtra[Any]):
    """See `RowExtra`."""

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
        return unconstrained(new)

    def add_row(self, new: NewRow) -> None:
        grammar = find_extra(new.extras, Grammar)
        assert grammar is not None
        self.grammars.add_row(new, grammar)

    def remove_row(self, row: int) -> None:
        self.grammars.remove_row(row)

    def for_step(self, step: StepColumns) -> StepExtra[Any] | None:
        places = step.places
        constraint = self.grammars.of_step(step.rows[places])
        return GrammarStep(constraint, places, self._why_no_graph) if constraint else None

    def in_idle_time(self) -> None:
        if self._loads_ahead:
            self._loads_ahead = False
            self.grammars.prepare_ahead()
