"""The incarnations of processes, with small programs in the place of the mesh's."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.supervisor.group import events, rolling
from meshlm.supervisor.processes import children, incarnations
from meshlm.supervisor.processes.incarnations import WARM_AFTER_S, WARM_AGAIN_S, Incarnations

WORKER = Identity(Role.WORKER, 0)
LIMIT_S = 20.0

PROGRAM = """
import signal, socket, sys
standby = int(sys.argv[1])
if standby >= 0:
    turn = socket.socket(fileno=standby)
    turn.send(b"loaded")
    turn.recv(64)
    sys.exit(7)
signal.pause()
"""


class Seen:
    """Incarnations whose news are kept in the order in which they came."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[rolling.Event | Identity] = asyncio.Queue()
        self.incarnations = Incarnations(MeshConfig, self.news.put_nowait)

    async def next(self) -> rolling.Event | Identity:
        return await asyncio.wait_for(self.news.get(), LIMIT_S)


class Watched(children.Child):
    """A child of whose end the fixture hears."""

    def watch(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[children.Child, int], None]) -> None:
        self.over = asyncio.Event()

        def over(child: children.Child, code: int) -> None:
            on_exit(child, code)
            self.over.set()

        super().watch(loop, over)
        born.append(self)

    def when_loaded(self, loop: asyncio.AbstractEventLoop, on_loaded: Callable[[children.Child], None]) -> None:
        self.is_loaded = asyncio.Event()

        def loaded(child: children.Child) -> None:
            on_loaded(child)
            self.is_loaded.set()

        super().when_loaded(loop, loaded)


born: list[Watched] = []


@pytest.fixture
async def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Seen]:
    def command(identity: Identity, incarnation: Incarnation, descriptors: Mapping[str, int]) -> list[str]:
        return [sys.executable, "-P", "-c", PROGRAM, str(descriptors.get("--standby", -1))]

    monkeypatch.setattr(children, "command", command)
    monkeypatch.setattr(incarnations, "Child", Watched)
    born.clear()
    yield Seen()
    for child in born:  # none is left
        child.kill()
        await asyncio.wait_for(child.over.wait(), LIMIT_S)


async def test_a_life_ends_once(seen: Seen) -> None:
    seen.incarnations.spawn(WORKER, Incarnation(5))
    assert seen.incarnations.pids().keys() == {WORKER}
    seen.incarnations.kill(WORKER)
    assert await seen.next() == events.Exited(WORKER, Incarnation(5), -signal.SIGKILL)
    assert seen.incarnations.of(WORKER) is None
    seen.incarnations.kill(WORKER)  # nobody is there


async def test_all_are_gone_when_they_were_to_be_ended(seen: Seen) -> None:
    """A killed process holds its port and its memory for a moment more."""
    await seen.incarnations.end_all(0.0)  # nobody is there
    seen.incarnations.spawn(WORKER, Incarnation(5))
    seen.incarnations.prepare(Identity(Role.WORKER, 1))
    seen.incarnations.keep_warm([Role.SCHEDULER], 100.0)
    seen.incarnations.keep_warm([Role.SCHEDULER], 100.0 + WARM_AFTER_S)
    assert len(born) == 3
    await seen.incarnations.end_all(LIMIT_S)
    assert [child.over.is_set() for child in born] == [True] * 3
    assert not seen.incarnations.pids()


async def test_a_worker_that_follows_another_measures_nothing(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for it, and it computes with the kernels that the other had."""
    told: list[tuple[Identity, str]] = []

    def config_file(config: MeshConfig, role: Role) -> int:
        told.append((identity, config.worker.tune))
        return os.open(os.devnull, os.O_RDONLY)

    monkeypatch.setattr(children, "config_file", config_file)
    for identity in (WORKER, Identity(Role.WORKER, 1)):
        seen.incarnations.spawn(identity, Incarnation(5))
    identity = WORKER
    seen.incarnations.kill(WORKER)
    await seen.next()
    seen.incarnations.spawn(WORKER, Incarnation(6))
    assert told == [(WORKER, "quick"), (Identity(Role.WORKER, 1), "quick"), (WORKER, "kept")]


async def test_an_end_by_a_signal_is_told(seen: Seen) -> None:
    seen.incarnations.spawn(WORKER, Incarnation(5))
    child = seen.incarnations.of(WORKER)
    assert child is not None
    child.send_signal(signal.SIGBUS)
    assert await seen.next() == events.Exited(WORKER, Incarnation(5), -signal.SIGBUS)


async def test_a_standby_takes_the_place(seen: Seen) -> None:
    seen.incarnations.prepare(WORKER)
    assert [(child.identity, child.loaded) for child in seen.incarnations.standbys()] == [(WORKER, False)]
    assert await seen.next() == rolling.Prepared(WORKER)
    assert [child.loaded for child in seen.incarnations.standbys()] == [True]
    assert seen.incarnations.of(WORKER) is None
    seen.incarnations.spawn(WORKER, Incarnation(6))
    assert await seen.next() == events.Exited(WORKER, Incarnation(6), 7)


async def test_a_standby_that_ends_is_news_of_its_own(seen: Seen) -> None:
    seen.incarnations.prepare(WORKER)
    assert await seen.next() == rolling.Prepared(WORKER)
    seen.incarnations.kill_standbys()
    assert await seen.next() == rolling.Prepared(WORKER, "signal 9")


async def test_a_stopped_process_is_ended_too(seen: Seen) -> None:
    seen.incarnations.spawn(WORKER, Incarnation(8))
    child = seen.incarnations.of(WORKER)
    assert child is not None
    child.send_signal(signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert seen.incarnations.end_stuck(WORKER)
    ended = await seen.next()
    assert isinstance(ended, events.Exited)
    assert ended.code == -signal.SIGKILL, "it was not woken"


def warm(seen: Seen) -> dict[Role, int]:
    """The pids of those that wait for a place."""
    return {child.identity.role: child.pid for child in seen.incarnations.standbys()}


async def test_a_warm_standby_takes_any_place_of_its_role_and_another_is_loaded_later(seen: Seen) -> None:
    seen.incarnations.keep_warm([Role.WORKER], 100.0)
    assert warm(seen) == {}, "those that serve come first"
    seen.incarnations.keep_warm([Role.WORKER], 100.0 + WARM_AFTER_S)
    (pid,) = warm(seen).values()
    seen.incarnations.keep_warm([Role.WORKER], 200.0)
    assert list(warm(seen).values()) == [pid], "one is enough"
    assert [child.loaded for child in seen.incarnations.standbys()] == [False]
    await asyncio.wait_for(born[0].is_loaded.wait(), LIMIT_S)
    assert [child.loaded for child in seen.incarnations.standbys()] == [True]
    other = Identity(Role.WORKER, 3)
    seen.incarnations.spawn(other, Incarnation(9))
    assert seen.incarnations.pids() == {other: pid}
    assert seen.incarnations.standbys() == []
    assert await seen.next() == events.Exited(other, Incarnation(9), 7)
    now = asyncio.get_running_loop().time()
    seen.incarnations.keep_warm([Role.WORKER], now)
    assert warm(seen) == {}
    seen.incarnations.keep_warm([Role.WORKER], now + 2 * WARM_AFTER_S)
    assert warm(seen).keys() == {Role.WORKER}


async def test_a_warm_standby_of_another_role_or_a_stopped_one_takes_no_place(seen: Seen) -> None:
    seen.incarnations.keep_warm([Role.SCHEDULER], 0.0)
    seen.incarnations.keep_warm([Role.SCHEDULER], WARM_AFTER_S)
    (pid,) = warm(seen).values()
    seen.incarnations.spawn(WORKER, Incarnation(5))
    assert warm(seen) == {Role.SCHEDULER: pid}
    os.kill(pid, signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    scheduler = Identity(Role.SCHEDULER, 0)
    seen.incarnations.spawn(scheduler, Incarnation(6))
    assert seen.incarnations.pids()[scheduler] != pid


async def test_warm_standbys_are_ended_when_what_they_loaded_is_old(seen: Seen) -> None:
    seen.incarnations.keep_warm([Role.WORKER], 0.0)
    seen.incarnations.keep_warm([Role.WORKER], WARM_AFTER_S)
    (pid,) = warm(seen).values()
    seen.incarnations.end_warm()
    assert warm(seen) == {}
    seen.incarnations.spawn(WORKER, Incarnation(5))
    assert seen.incarnations.pids()[WORKER] != pid
    seen.incarnations.keep_warm([Role.WORKER], asyncio.get_running_loop().time() + 1.0)
    assert warm(seen).keys() == {Role.WORKER}


async def test_what_cannot_be_started_is_told_and_tried_again(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is left to have: the group hears of it as of a death, and no descriptor stays open."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", refuse)
        seen.incarnations.spawn(WORKER, Incarnation(5))
        seen.incarnations.prepare(WORKER)
        why = "Resource temporarily unavailable"
        told = f"worker/0 could not be started: {why}"
        assert await seen.next() == events.Exited(WORKER, Incarnation(5), 1, told)
        assert await seen.next() == rolling.Prepared(WORKER, why)
        seen.incarnations.keep_warm([Role.WORKER], 0.0)
        seen.incarnations.keep_warm([Role.WORKER], WARM_AFTER_S)
        assert seen.incarnations.standbys() == []
        assert seen.incarnations.of(WORKER) is None
    assert len(os.listdir("/proc/self/fd")) == before
    seen.incarnations.keep_warm([Role.WORKER], WARM_AFTER_S + 1.0)
    assert warm(seen) == {}, "it is not tried again at once"
    seen.incarnations.keep_warm([Role.WORKER], WARM_AFTER_S + WARM_AGAIN_S)
    assert warm(seen).keys() == {Role.WORKER}
    seen.incarnations.spawn(WORKER, Incarnation(6))
    assert seen.incarnations.pids().keys() == {WORKER}
