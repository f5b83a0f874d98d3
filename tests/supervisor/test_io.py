"""The supervisor's clock and timer: neither a clock that is set nor a failure in one turn keeps dead processes from being replaced."""

import asyncio
import time

import pytest

from meshlm.protocol.config import MeshConfig
from meshlm.supervisor import io
from meshlm.supervisor.cli.display import StartDisplay
from meshlm.supervisor.group import events
from meshlm.supervisor.group.clock import steady


def test_the_groups_clock_does_not_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = steady()
    before = now()
    assert abs(before - time.time()) < 60.0
    monkeypatch.setattr(time, "time", lambda: before - 3600.0)  # somebody sets it
    assert before <= now() < before + 60.0


async def test_a_turn_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "TICK_S", 0.0)
    supervisor = io.Supervisor(MeshConfig(), [], StartDisplay())
    turns: asyncio.Queue[events.Event] = asyncio.Queue()
    errors: list[object] = []

    def fail(event: events.Event) -> None:
        turns.put_nowait(event)
        raise RuntimeError("a bug")

    monkeypatch.setattr(supervisor, "_do", fail)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    loop.call_soon(supervisor._tick)
    supervisor._begun = True
    for _ in range(3):
        assert await asyncio.wait_for(turns.get(), 10) == events.Tick()
    await supervisor.close()
    assert len(errors) >= 2
