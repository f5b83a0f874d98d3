"""When a request is given up for the deaths that it met."""

import pytest

from meshlm.protocol.config import RunConfig
from meshlm.protocol.wire.ids import Role
from meshlm.runtime.process.deaths import (
    LONG_S,
    MAX_DEATHS,
    MAX_SLOW_DEATHS,
    WINDOW_S,
    Death,
    allowed,
    one_more,
    too_many,
)
from meshlm.supervisor.group import core


def met(count: int, apart_s: float, role: Role = Role.SCHEDULER, before: tuple[Death, ...] = ()) -> tuple[Death, ...]:
    deaths = before
    begin = before[-1].at if before else 0.0
    for number in range(count):
        deaths = one_more(deaths, role, begin + number * apart_s)
    return deaths


def test_the_limits_are_the_supervisors() -> None:
    """A request is given up at the last death that the mesh survives."""
    assert WINDOW_S == core.WINDOW_S
    assert RunConfig().max_restarts >= MAX_DEATHS


@pytest.mark.parametrize(("max_restarts", "most"), [(0, 2), (1, 2), (2, 2), (3, 3), (5, 5), (100, 5)])
def test_a_request_is_given_up_before_the_mesh(max_restarts: int, most: int) -> None:
    assert allowed(max_restarts) == most
    assert allowed(max_restarts, 4) == min(most, 4)
    assert not too_many(met(most - 1, 1.0), most)
    assert f"died {most} times" in too_many(met(most, 1.0), most)


@pytest.mark.parametrize("apart_s", [0.0, 1.0, 11.9])
def test_what_kills_one_process_too_often_for_the_mesh_is_given_up_before(apart_s: float) -> None:
    """Six deaths of one process within a minute would end the mesh."""
    assert not too_many(met(MAX_DEATHS - 1, apart_s))
    assert "its scheduler died 5 times within 60 s" in too_many(met(MAX_DEATHS, apart_s))


def test_old_deaths_and_other_roles_do_not_count() -> None:
    assert not too_many(())
    assert not too_many(met(MAX_SLOW_DEATHS - 1, WINDOW_S / (MAX_DEATHS - 1)))
    assert not too_many(met(MAX_DEATHS - 1, 1.0, Role.COORDINATOR, met(MAX_DEATHS - 1, 1.0)))
    assert not too_many(met(3 * MAX_SLOW_DEATHS, LONG_S / (MAX_SLOW_DEATHS - 1)))


def test_what_takes_long_to_kill_is_given_up_as_well() -> None:
    assert "after 20 deaths" in too_many(met(MAX_SLOW_DEATHS, 100.0))
