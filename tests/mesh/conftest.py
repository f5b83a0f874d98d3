"""One mesh for all tests of a kind that do not harm it."""

import inspect
from collections.abc import Generator, Iterator
from typing import Any

import httpx
import pytest
from http_clients import AUTH, FLAGS
from serving import Serving, serving

SHOWN = 80  # of the lines that a mesh said last

# A busy machine takes more than the client's 5 seconds for an answer. What is too slow is said by the tests that measure.
_timeout = inspect.signature(httpx.get).parameters["timeout"].default
_timeout.connect = _timeout.read = _timeout.write = _timeout.pool = 60


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where a test fails, what the meshes of its fixtures said tells why."""
    report = yield
    given: dict[str, Any] = getattr(item, "funcargs", {})
    if report.failed:
        for name, server in given.items():
            if isinstance(server, Serving):
                report.sections.append((f"what {name} said", "\n".join(server.lines[-SHOWN:])))
    return report


@pytest.fixture(scope="session")
def fake() -> Iterator[Serving]:
    """The whole mesh with the fake device."""
    with serving("--device", "fake", "--max-model-len", "4096", "--enable-prompt-embeds") as server:
        yield server


@pytest.fixture(scope="session")
def smol() -> Iterator[Serving]:
    """The whole mesh with SmolLM2 on the CPU, whose products are those of transformers."""
    flags = ("--cpu-exact", "--kv-cache-memory", "1G", "--max-num-batched-tokens", "256", "--enable-prompt-embeds")
    with serving("--device", "cpu", "--cpu-threads", "1", *flags) as server:
        yield server


@pytest.fixture(scope="session")
def keyed() -> Iterator[Serving]:
    """The whole mesh with the fake device and an API key, for clients that do all that they should not."""
    with serving(*FLAGS) as server:
        yield server
    assert server.process.returncode == 0


@pytest.fixture(scope="module")
def client(keyed: Serving) -> Iterator[httpx.Client]:
    """Of the keyed mesh."""
    with httpx.Client(base_url=keyed.url, headers=AUTH, timeout=300) as found:
        yield found
