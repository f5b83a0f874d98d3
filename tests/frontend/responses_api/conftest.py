"""A scripted frontend and a client of it; and frontends that share a store."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import openai
import pytest
from openai_client import SERVER, Frontend, client_of
from scripted import Scripted

from meshlm.frontend.responses_api import background
from meshlm.protocol.config import ServerConfig


@pytest.fixture
async def backend() -> Scripted:
    return Scripted(SERVER)


@pytest.fixture
async def client(backend: Scripted) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(backend) as found:
        yield found


@pytest.fixture
async def frontends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Frontend]:
    """Makes frontends that share a store, as those of one mesh do."""
    monkeypatch.setattr(background, "LOOK_S", 0.02)
    monkeypatch.setattr(background, "FLUSH_S", 0.005)
    made: list[Scripted] = []

    def make(server: ServerConfig = SERVER) -> Scripted:
        found = Scripted(msgspec.structs.replace(server, responses_store=str(tmp_path / "store.sqlite")))
        found.routes.responses.start()
        made.append(found)
        return found

    yield make
    for one in made:
        await one.routes.responses.stop()
