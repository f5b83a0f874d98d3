"""mesh.py by itself: what fails at its start leaves nothing behind, and what fails in one turn does not end the others."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from meshes import LIMIT_S, Deaf
from msgspec import Struct

from meshlm.protocol.config import MeshConfig, NetworkConfig, Node, RunConfig
from meshlm.protocol.edges.control import Blocked
from meshlm.protocol.operations import Operation, OperationId, Profile
from meshlm.protocol.wire import session as session_module
from meshlm.protocol.wire.channels import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.runtime.errors import MessageTooLong, ProcessFatal
from meshlm.runtime.mesh import mesh as mesh_module
from meshlm.runtime.mesh.mesh import Mesh


def mesh_of(config: MeshConfig, role: Role = Role.SUPERVISOR) -> Mesh:
    return Mesh(Identity(role), Incarnation(1), config, Deaf())


async def test_a_taken_port_is_told_and_the_process_can_end(tmp_path: Path) -> None:
    """An inbox that could not be bound must not keep the context from its end: the process would stay for ever."""
    public, secret = zmq.curve_keypair()
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(json.dumps({"public_key": public.decode(), "secret_key": secret.decode()}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config = MeshConfig(
            run=RunConfig(run_dir=str(tmp_path)),
            network=NetworkConfig(listen=listen, key_file=str(keys)),
            node=Node(index=0, id="a", address="127.0.0.1"),
        )
        mesh = mesh_of(config)
        with pytest.raises(ProcessFatal, match=f"--listen {listen}.*in use") as told:
            await mesh.open()
        await asyncio.wait_for(mesh.close(), LIMIT_S)
        assert told.value.__context__ is not None, "the failure still refers to the inbox"


async def test_an_inbox_whose_folder_is_gone(tmp_path: Path) -> None:
    mesh = mesh_of(MeshConfig(run=RunConfig(run_dir=str(tmp_path / "gone"))))
    with pytest.raises(zmq.ZMQError):
        await mesh.open()
    await asyncio.wait_for(mesh.close(), LIMIT_S)


async def test_a_turn_that_fails_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_module, "TICK_S", 0.0)
    errors: list[object] = []
    turns: asyncio.Queue[float] = asyncio.Queue()

    def fail(now: float) -> None:
        turns.put_nowait(now)
        raise RuntimeError("a bug")

    mesh = mesh_of(MeshConfig(run=RunConfig(run_dir=str(tmp_path))))
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    await mesh.open()
    broken: Any = SimpleNamespace(session=SimpleNamespace(tick=fail), expires_at=0.0)
    mesh._peers[Identity(Role.WORKER)] = broken
    for _ in range(3):
        await asyncio.wait_for(turns.get(), LIMIT_S)
    mesh._peers.clear()
    await mesh.close()
    assert len(errors) >= 2


def operation(name: str) -> Operation:
    return Operation(OperationId(name), Profile(True))


class Inbox(Deaf):
    """Notes what comes."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Struct] = asyncio.Queue()
        self.peers: asyncio.Queue[Identity] = asyncio.Queue()

    def on_message(self, peer: Identity, message: Struct) -> None:
        self.messages.put_nowait(message)

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        self.peers.put_nowait(peer)


@contextlib.asynccontextmanager
async def pair(run_dir: Path) -> AsyncIterator[tuple[Mesh, Mesh, Inbox]]:
    """A supervisor's and a coordinator's mesh that see each other, and what comes to the coordinator."""
    config = MeshConfig(run=RunConfig(run_dir=str(run_dir)))
    inbox = Inbox()
    supervisor = mesh_of(config)
    coordinator = Mesh(Identity(Role.COORDINATOR), Incarnation(2), config, inbox)
    try:
        await supervisor.open()
        await coordinator.open()
        assert await asyncio.wait_for(inbox.peers.get(), LIMIT_S) == supervisor.identity
        yield supervisor, coordinator, inbox
    finally:
        await coordinator.close()
        await supervisor.close()


async def test_a_message_that_no_frame_holds_is_not_sent(tmp_path: Path) -> None:
    """It went into the session, which replayed it each second for ever, and all behind it waited."""
    async with pair(tmp_path) as (supervisor, coordinator, inbox):
        smallest = len(msgspec.msgpack.encode(operation("")))
        room = MAX_MESSAGE_BYTES - smallest - 4  # a longer string has a longer head
        with pytest.raises(MessageTooLong, match=rf"{MAX_MESSAGE_BYTES + 1} bytes.*Operation to coordinator/0"):
            supervisor.send(coordinator.identity, operation("x" * (room + 1)))
        supervisor.send(coordinator.identity, operation("x" * room))
        supervisor.send(coordinator.identity, operation("3"))
        told = [await asyncio.wait_for(inbox.messages.get(), LIMIT_S) for _ in range(2)]
        assert told == [operation("x" * room), operation("3")]


async def test_a_link_on_which_nothing_moves_is_told_and_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However such a frame came into the session: the peer's socket refuses it each time, and answers the hello before it."""
    monkeypatch.setattr(mesh_module, "MAX_MESSAGE_BYTES", 1 << 30)
    monkeypatch.setattr(session_module, "REPLAY_AFTER_S", 0.2)
    monkeypatch.setattr(mesh_module, "TICK_S", 0.02)
    logged: asyncio.Queue[tuple[str, dict[str, object]]] = asyncio.Queue()
    async with pair(tmp_path) as (supervisor, coordinator, inbox):
        log = SimpleNamespace(error=lambda event, **fields: logged.put_nowait((event, fields)))
        monkeypatch.setattr(supervisor, "_limited", log)
        ticks: asyncio.Queue[str] = asyncio.Queue()

        def tick() -> None:
            Mesh._tick(supervisor)
            ticks.put_nowait(supervisor.blocked)

        monkeypatch.setattr(supervisor, "_tick", tick)
        size = MAX_FRAME_BYTES
        supervisor.send(coordinator.identity, operation("x" * size))
        async with asyncio.timeout(LIMIT_S):
            while (blocked := await ticks.get()) == "":
                pass
            event, fields = await logged.get()
        assert event == "frame never taken"
        assert (fields["peer"], fields["message"]) == ("coordinator/0", "operation")
        assert size < int(str(fields["size"])) < size + 100
        assert blocked == "coordinator/0 does not take what supervisor/0 sends it"
        async with asyncio.timeout(LIMIT_S):
            while not isinstance(said := await inbox.messages.get(), Blocked):  # the coordinator sees it too
                pass
        assert said.reason == "what supervisor/0 sends does not come to coordinator/0"
        assert await asyncio.wait_for(inbox.peers.get(), LIMIT_S) == supervisor.identity, "no new session"
        async with asyncio.timeout(LIMIT_S):
            while supervisor.blocked or not supervisor.peers(Role.COORDINATOR):
                await ticks.get()
        supervisor.send(coordinator.identity, operation("2"))
        missing: list[Struct] = [Blocked(""), operation("2")]
        async with asyncio.timeout(LIMIT_S):
            while missing:
                if (told := await inbox.messages.get()) in missing:
                    missing.remove(told)
