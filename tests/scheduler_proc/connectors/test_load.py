"""The states of a load."""

import itertools

import pytest

from meshlm.runtime.process.events import InvalidTransition
from meshlm.scheduler_proc.connectors.load import TRANSITIONS, WAITED_FOR, Load, LoadState


def load(state: LoadState) -> Load:
    return Load([], [], [], 0, is_wanted=False, num_resets=0, state=state)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(LoadState, LoadState)))
def test_nothing_but_the_table_may_follow(before: LoadState, after: LoadState) -> None:
    one = load(before)
    if after in TRANSITIONS[before]:
        one.move(after)
        assert one.state is after
    else:
        with pytest.raises(InvalidTransition, match="a load of KV"):
            one.move(after)


def test_every_state_is_reached_and_left() -> None:
    assert set(TRANSITIONS) == set(LoadState)
    assert {state for states in TRANSITIONS.values() for state in states} == set(LoadState) - {LoadState.ASKED}
    assert [state for state, states in TRANSITIONS.items() if not states] == [LoadState.OVER]


@pytest.mark.parametrize("state", list(LoadState))
def test_requests_wait_until_it_counts(state: LoadState) -> None:
    assert load(state).waits is (state in WAITED_FOR)
    assert load(state).waits is not (state in (LoadState.LOADED, LoadState.OVER))
