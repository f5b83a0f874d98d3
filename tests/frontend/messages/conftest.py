"""A scripted frontend and a client of it."""

from collections.abc import AsyncIterator

import anthropic
import pytest
from anthropic_client import SERVER, client_of
from scripted import Scripted


@pytest.fixture
async def backend() -> Scripted:
    return Scripted(SERVER)


@pytest.fixture
async def client(backend: Scripted) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with client_of(backend) as found:
        yield found
