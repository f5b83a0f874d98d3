"""Figures of the mesh while its coordinator is there, away, and new."""

import pytest

from meshlm.protocol.edges.control import AskStats, MeshStats, RankStats
from meshlm.protocol.wire.ids import COORDINATOR
from meshlm.runtime.errors import LinkDown
from meshlm.runtime.process import figures
from meshlm.runtime.process.figures import Figures

RANKS = (RankStats(0, 1, 5, 0.0, 0, 0, 0, 0, 0),)
OLD = MeshStats(True, ranks=RANKS)
NEW = MeshStats(True, ranks=RANKS, paused=True, asked=True)
KNOWS_NO_RANK = MeshStats(False, "starting", asked=True)


class Coordinator:
    """Answers each question with the next of these; None: the link is down."""

    def __init__(self, known: Figures, *answers: MeshStats | None) -> None:
        self._known = known
        self.answers = list(answers)

    def ask(self, question: AskStats) -> None:
        answer = self.answers.pop(0)
        if answer is None:
            raise LinkDown(COORDINATOR)
        self._known.take(answer)


def figures_with_old() -> Figures:
    known = Figures()
    known.take(OLD)
    return known


async def test_the_last_figures_stand_in_for_a_coordinator_that_is_away() -> None:
    known = figures_with_old()
    assert await known.fresh(Coordinator(known, None).ask) == OLD
    assert await known.fresh(Coordinator(known, NEW).ask) == NEW


async def test_certain_ones_wait_until_it_is_back_and_knows_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "AGAIN_S", 0.0)
    known = figures_with_old()
    coordinator = Coordinator(known, None, KNOWS_NO_RANK, NEW)
    assert await known.certain(coordinator.ask, 10.0) == NEW
    assert coordinator.answers == []


async def test_or_are_given_up() -> None:
    known = figures_with_old()
    with pytest.raises(TimeoutError):
        await known.certain(Coordinator(known, None, None, None, None).ask, 0.01)
