"""The lives of processes, with small programs in the place of the mesh's."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshlm.protocol.ids import Identity, Incarnation, Role
from meshlm.supervisor import children, events, rolling
from meshlm.supervisor.lives import Lives

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
    """Lives whose news are kept in the order in which they came."""

    def __init__(self, folder: Path) -> None:
        self.news: asyncio.Queue[rolling.Event | Identity] = asyncio.Queue()
        self.lives = Lives(folder / "mesh.json", self.news.put_nowait, self.news.put_nowait)

    async def next(self) -> rolling.Event | Identity:
        return await asyncio.wait_for(self.news.get(), LIMIT_S)


@pytest.fixture
async def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    def command(config_file: Path, identity: Identity, incarnation: Incarnation, standby: int = -1) -> list[str]:
        return [sys.executable, "-P", "-c", PROGRAM, str(standby)]

    monkeypatch.setattr(children, "command", command)
    return Seen(tmp_path)


@pytest.fixture(autouse=True)
def none_is_left(seen: Seen) -> Iterator[None]:
    yield
    seen.lives.kill_all()


async def test_a_life_ends_once(seen: Seen) -> None:
    seen.lives.spawn(WORKER, Incarnation(5))
    assert seen.lives.pids().keys() == {WORKER}
    seen.lives.kill(WORKER)
    assert await seen.next() == WORKER
    assert await seen.next() == events.Exited(WORKER, Incarnation(5), -signal.SIGKILL)
    assert seen.lives.of(WORKER) is None
    seen.lives.kill(WORKER)  # nobody is there


async def test_a_standby_takes_the_place(seen: Seen) -> None:
    seen.lives.prepare(WORKER)
    assert await seen.next() == rolling.Prepared(WORKER)
    assert seen.lives.of(WORKER) is None
    seen.lives.spawn(WORKER, Incarnation(6))
    assert await seen.next() == WORKER
    assert await seen.next() == events.Exited(WORKER, Incarnation(6), 7)


async def test_a_standby_that_ends_is_news_of_its_own(seen: Seen) -> None:
    seen.lives.prepare(WORKER)
    assert await seen.next() == rolling.Prepared(WORKER)
    seen.lives.kill_standbys()
    assert await seen.next() == rolling.Prepared(WORKER, "signal 9")


async def test_a_stopped_process_is_ended_too(seen: Seen) -> None:
    seen.lives.spawn(WORKER, Incarnation(8))
    child = seen.lives.of(WORKER)
    assert child is not None
    child.send_signal(signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert seen.lives.end_stuck(WORKER)
    assert await seen.next() == WORKER
    ended = await seen.next()
    assert isinstance(ended, events.Exited)
    assert ended.code in (-signal.SIGUSR1, -signal.SIGKILL)
