"""Processes that are added to a running group and taken out of it."""

from group_bench import FRONTEND, NEW, OTHER, WORKER, die, ready, running

from meshlm.supervisor.group.core import State
from meshlm.supervisor.group.events import (
    Add,
    AskToStop,
    Changed,
    Drained,
    Exited,
    Kill,
    Retire,
    SaidFailed,
    Spawn,
    TellDied,
    Tick,
)


def test_what_is_added_is_there_when_all_of_it_is_ready() -> None:
    group = running()
    assert [type(effect) for effect in group.handle(Add((NEW, OTHER)), 1002.0)] == [Spawn, Spawn]
    assert ready(group, NEW) == []
    assert ready(group, OTHER) == [Changed()]
    assert not group.changing
    assert [type(effect) for effect in die(group, NEW, 1003.0)] == [TellDied, Spawn], "as any other"


def test_a_failed_addition_touches_nothing_else() -> None:
    group = running()
    group.handle(Add((NEW, OTHER)), 1002.0)
    ready(group, NEW)
    incarnation = group.processes[OTHER].incarnation
    group.handle(SaidFailed(OTHER, incarnation, "no such device"), 1002.0)
    assert group.handle(Exited(OTHER, incarnation, 1), 1002.0) == [TellDied(OTHER, incarnation), Kill(NEW)]
    gone = group.processes[NEW].incarnation
    assert die(group, NEW, 1002.1) == [TellDied(NEW, gone), Changed("no such device")]
    assert set(group.processes) == {FRONTEND, WORKER}
    assert not group.changing


def test_a_death_does_not_undo_an_addition() -> None:
    """Of one that was killed, or was ready already: it is started again, as at any other time."""
    group = running()
    group.handle(Add((NEW, OTHER)), 1002.0)
    assert [type(effect) for effect in die(group, NEW, 1003.0)] == [TellDied, Spawn]
    ready(group, OTHER)
    effects = group.handle(Exited(OTHER, group.processes[OTHER].incarnation, 1), 1004.0)
    assert [type(effect) for effect in effects] == [TellDied, Spawn]
    assert group.changing
    assert ready(group, NEW, 1005.0) == []
    assert ready(group, OTHER, 1005.0) == [Changed()]
    group.check()


def test_an_addition_that_is_killed_again_and_again_is_undone() -> None:
    group = running(max_restarts=2)
    group.handle(Add((NEW, OTHER)), 1002.0)
    for number in range(2):
        assert type(die(group, NEW, 1003.0 + number)[0]) is TellDied
        group.handle(Tick(), 1003.9 + number)
    assert isinstance(die(group, OTHER, 1005.0)[1], Spawn)
    die(group, OTHER, 1005.1)  # it waits for its turn to be started
    assert group.processes[OTHER].state is State.BACKOFF
    (told, changed) = die(group, NEW, 1005.11)
    assert isinstance(told, TellDied)
    assert isinstance(changed, Changed)
    assert "NEW" not in changed.failure
    assert set(group.processes) == {FRONTEND, WORKER}
    group.check()


def test_an_addition_that_takes_too_long_is_taken_back() -> None:
    group = running()
    group.handle(Add((NEW,)), 1002.0)
    group.processes[FRONTEND].beaten_at = group.processes[WORKER].beaten_at = 1063.0
    assert group.handle(Tick(), 1063.0) == [Kill(NEW)]
    assert isinstance(die(group, NEW, 1063.1)[1], Changed)


def test_who_leaves_stops_when_drained_or_at_the_deadline() -> None:
    group = running()
    group.handle(Add((NEW, OTHER)), 1002.0)
    for identity in (NEW, OTHER):
        ready(group, identity)
    assert group.handle(Drained((NEW,)), 1002.0) == [], "it does not leave"
    assert group.handle(Retire((NEW, OTHER), 1010.0), 1003.0) == []
    assert group.handle(Drained((NEW,)), 1004.0) == [AskToStop(NEW)]
    assert group.handle(Drained((NEW,)), 1005.0) == []
    incarnation = group.processes[NEW].incarnation
    assert group.handle(Exited(NEW, incarnation, 0), 1005.0) == [TellDied(NEW, incarnation)]
    assert group.handle(Tick(), 1010.0) == [AskToStop(OTHER)]
    assert die(group, OTHER, 1011.0)[1:] == [Changed()]
    assert set(group.processes) == {FRONTEND, WORKER}


def test_who_leaves_is_not_started_again() -> None:
    group = running()
    group.handle(Add((NEW,)), 1002.0)
    ready(group, NEW)
    group.handle(Retire((NEW,), 1010.0), 1003.0)
    assert die(group, NEW, 1004.0)[1:] == [Changed()]
