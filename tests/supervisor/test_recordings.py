"""Who is asked for a timeline, and what is done with the answers: of this node, of others, of processes that are late or gone."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from meshlm.protocol.timeline import RecordTimeline, Span, TimelinePart
from meshlm.protocol.wire.ids import HEAD, Identity, Role
from meshlm.supervisor.recordings import LATE_S, Recordings

WORKER, FRONTEND, NODE = Identity(Role.WORKER), Identity(Role.FRONTEND), Identity(Role.SUPERVISOR, 1)
THERE = Identity(Role.WORKER, 1)


class Mesh:
    def __init__(self, folder: Path, is_guest: bool = False) -> None:
        self.sent: list[tuple[Identity, Struct]] = []
        self.peers = [WORKER, FRONTEND, *([HEAD] if is_guest else [NODE])]
        elsewhere = () if is_guest else (THERE,)
        self.recordings = Recordings(folder, self._of, self._send, lambda: elsewhere, is_guest, self._operate)

    def _of(self, role: Role) -> list[Identity]:
        return [peer for peer in self.peers if peer.role is role]

    def _send(self, to: Identity, message: Struct) -> bool:
        self.sent.append((to, message))
        return True

    async def _operate(self, action: object) -> Any:
        raise AssertionError(action)

    def ask(self, command: str, now: float, **more: object) -> dict[str, Any]:
        return self.recordings.answer({"command": command, **more}, now)

    def tell(self, process: Identity, number: int) -> None:
        self.recordings.came(TimelinePart(number, process, 1, 0, (Span("plan", "loop", 1, 2),)))


def test_all_processes_of_all_nodes_are_collected(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    begun = mesh.ask("trace", 0.0, seconds=2.0)
    assert begun["processes"] == 3
    assert {to for to, _ in mesh.sent} == {WORKER, FRONTEND, NODE}
    number = begun["number"]
    for process in (WORKER, FRONTEND):
        mesh.tell(process, number)
    mesh.tell(WORKER, number - 1)  # of an older one
    assert mesh.ask("trace-state", 2.1, number=number) == {"done": False}
    mesh.tell(THERE, number)
    told = mesh.ask("trace-state", 2.2, number=number)
    assert (told["done"], told["missing"]) == (True, [])
    parts = msgspec.msgpack.decode(Path(told["path"]).read_bytes(), type=list[TimelinePart])
    assert {part.process for part in parts} == {WORKER, FRONTEND, THERE}


def test_who_does_not_tell_is_named_and_not_waited_for(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    number = mesh.ask("trace", 0.0, seconds=2.0)["number"]
    mesh.tell(WORKER, number)
    assert mesh.ask("trace-state", 2.0 + LATE_S - 0.1, number=number) == {"done": False}
    told = mesh.ask("trace-state", 2.0 + LATE_S, number=number)
    assert told["missing"] == ["frontend/0", "worker/1"]


def test_one_at_a_time_and_bad_questions(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    for seconds in (0, -1, 1e9, "5", None):
        assert "error" in mesh.ask("trace", 0.0, seconds=seconds)
    assert "error" not in mesh.ask("trace", 0.0, seconds=2.0)
    assert "already" in mesh.ask("trace", 1.0, seconds=2.0)["error"]
    assert "error" not in mesh.ask("trace", 2.0 + LATE_S, seconds=2.0), "whoever asked for the first has gone"
    assert "error" in mesh.ask("trace-state", 0.0, number=5)
    assert "error" in mesh.ask("profile-state", 0.0)


def test_a_node_asks_its_own_and_hands_on_what_comes(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, is_guest=True)
    mesh.recordings.begin(RecordTimeline(7, 2.0), 0.0)
    assert {to for to, _ in mesh.sent} == {WORKER, FRONTEND}
    mesh.sent.clear()
    mesh.tell(WORKER, 7)
    ((to, part),) = mesh.sent
    assert to == HEAD
    assert isinstance(part, TimelinePart)


@pytest.mark.parametrize("seconds", [0.5])
def test_a_recording_that_nobody_fetched_is_forgotten(tmp_path: Path, seconds: float) -> None:
    mesh = Mesh(tmp_path)
    first = mesh.ask("trace", 0.0, seconds=seconds)["number"]
    mesh.tell(WORKER, first)
    second = mesh.ask("trace", 100.0, seconds=seconds)["number"]
    mesh.tell(WORKER, first)
    for process in (WORKER, FRONTEND, THERE):
        mesh.tell(process, second)
    told = mesh.ask("trace-state", 100.5, number=second)
    assert len(msgspec.msgpack.decode(Path(told["path"]).read_bytes())) == 3
