"""mesh.py by itself: what fails at its start leaves nothing behind, and what fails in one turn does not end the others."""

import asyncio
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from msgspec import Struct

from meshlm.protocol.config import MeshConfig, NetworkConfig, Node, RunConfig
from meshlm.protocol.ids import Identity, Incarnation, Role
from meshlm.runtime import mesh as mesh_module
from meshlm.runtime.errors import ProcessFatal
from meshlm.runtime.mesh import Mesh

LIMIT_S = 10


class Deaf:
    """An App that nobody tells anything."""

    def on_message(self, peer: Identity, message: Struct) -> None: ...
    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None: ...
    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None: ...
    def flush(self) -> None: ...


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
    broken: Any = SimpleNamespace(session=SimpleNamespace(tick=fail))
    mesh._peers[Identity(Role.WORKER)] = broken
    for _ in range(3):
        await asyncio.wait_for(turns.get(), LIMIT_S)
    mesh._peers.clear()
    await mesh.close()
    assert len(errors) >= 2
