"""What a worker may be after what it was: the table of workers/worker_states.py."""

from itertools import product

import pytest

from meshlm.workers.worker_states import TRANSITIONS, InvalidTransition, WorkerState, WorkerStates


def test_the_table_has_every_state_and_each_can_be_reached() -> None:
    assert TRANSITIONS.keys() == set(WorkerState)
    assert {after for following in TRANSITIONS.values() for after in following} == set(WorkerState)


@pytest.mark.parametrize(("before", "after"), list(product(WorkerState, WorkerState)))
def test_what_the_table_has_not_is_a_bug(before: WorkerState, after: WorkerState) -> None:
    states = WorkerStates()
    states.state = before
    if after in TRANSITIONS[before]:
        states.move(after)
        assert states.state is after
        return
    with pytest.raises(InvalidTransition, match=f"a worker that is {before.value}: {after.value}"):
        states.move(after)
    assert states.state is before


def test_no_step_follows_where_memory_is_missing() -> None:
    into = {before for before, following in TRANSITIONS.items() if WorkerState.STEPPING in following}
    assert into == {WorkerState.IDLE}


def test_a_heartbeat_has_one_word_for_all_that_sleep() -> None:
    states = WorkerStates()
    assert states.phase == "loading"
    states.move(WorkerState.UNLOADED)
    assert states.phase == "asleep"
    for state in (WorkerState.LOADING, WorkerState.IDLE, WorkerState.FALLING_ASLEEP, WorkerState.ASLEEP):
        states.move(state)
    assert states.phase == "asleep"
