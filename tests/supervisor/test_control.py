"""Places for processes that a command adds: each asker has its own, as long as it lives."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.supervisor import control
from meshlm.supervisor.errors import StartError

PRESENT = (Identity(Role.DETOKENIZER, 0), Identity(Role.FRONTEND, 0), Identity(Role.FRONTEND, 1))


async def attached(run_dir: Path, role: Role, index: int | None = None) -> tuple[socket.socket, str]:
    link, place, config = await asyncio.to_thread(control.attach, run_dir, role, index)
    assert config == MeshConfig()
    return link, str(place)


async def test_each_asker_has_a_place_of_its_own(tmp_path: Path) -> None:
    def answer(request: dict[str, object]) -> object:
        return {"place": str(server.place(request, PRESENT)), "config": msgspec.to_builtins(MeshConfig())}

    server = control.ControlServer(answer)
    await server.open(tmp_path)
    with contextlib.ExitStack() as links:
        found = await asyncio.gather(*(attached(tmp_path, Role.DETOKENIZER) for _ in range(3)))
        for link, _ in found:
            links.enter_context(link)
        assert sorted(place for _, place in found) == ["detokenizer/1", "detokenizer/2", "detokenizer/3"]
        link, place = await attached(tmp_path, Role.FRONTEND, 7)
        links.enter_context(link)
        assert place == "frontend/7"
        for taken in (0, 7):
            with pytest.raises(StartError, match=f"--index {taken}: frontend/{taken} is running already"):
                await attached(tmp_path, Role.FRONTEND, taken)
        server.close()
        assert await asyncio.wait_for(asyncio.to_thread(link.recv, 1), 10) == b"", "the mesh has ended"


async def test_whoever_finds_the_socket_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a socket's making and its listening it refuses."""
    begin, found = asyncio.start_unix_server, []

    async def begun(*given: Any, **named: Any) -> asyncio.Server:
        server = await begin(*given, **named)
        found.append((tmp_path / "status.sock").exists())
        return server

    monkeypatch.setattr(asyncio, "start_unix_server", begun)
    server = control.ControlServer(lambda request: {"ready": True})
    await server.open(tmp_path)
    assert found == [False]
    assert await asyncio.to_thread(os.listdir, tmp_path) == ["status.sock"]
    assert await asyncio.to_thread(control.request, tmp_path, {"command": "status"}) == {"ready": True}
    server.close()
