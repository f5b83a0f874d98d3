"""A scripted frontend that has Ollama's API."""

import pytest
from ollama_site import SERVER
from scripted import Scripted


@pytest.fixture
def backend() -> Scripted:
    return Scripted(SERVER)
