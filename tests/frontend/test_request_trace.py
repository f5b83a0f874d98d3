"""How far a request runs from file to file in its frontend, until it is submitted: each move is one that a reader makes."""

import asyncio
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx
import pytest
from msgspec import Struct
from parsing import RESOLVED, USER

import meshlm
from meshlm.frontend.io import FrontendApp
from meshlm.frontend.routes.application import Application
from meshlm.protocol.config import MeshConfig, ServerConfig
from meshlm.protocol.edges.control import MeshStats
from meshlm.protocol.edges.text import Submit
from meshlm.protocol.wire.ids import Identity, Incarnation, Role

OWN = Path(meshlm.__file__).parents[2]
ROOMS = ("frontend", "runtime", "protocol")
MOST_CALLS, MOST_FILES, MOST_MOVES = 180, 42, 140


class Trace:
    """Counts calls of own functions, and moves from one own file to another, until a request is submitted."""

    def __init__(self) -> None:
        self.num_calls = self.num_moves = 0
        self.files: list[str] = []
        self._stack: list[str] = []
        self._rooms: dict[CodeType, str] = {}

    def file_of(self, code: CodeType) -> str:
        """The own file of a function; empty for one of a library."""
        if code not in self._rooms:
            path = Path(code.co_filename).resolve()
            own = path.is_relative_to(OWN) and path.relative_to(OWN).parts[0] in ROOMS
            self._rooms[code] = str(path.relative_to(OWN)) if own else ""
        return self._rooms[code]

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return") or not (file := self.file_of(frame.f_code)):
            return
        before = self._stack[-1] if self._stack else ""
        if event == "call":
            self._stack.append(file)
            self.num_calls += 1
        elif self._stack:
            self._stack.pop()
        now = self._stack[-1] if self._stack else before
        if now != before:
            self.num_moves += 1
            self.files.append(now)


class TracedMesh:
    """The links of a frontend whose trace ends with the Submit."""

    def __init__(self, config: MeshConfig) -> None:
        self.config, self.identity, self.blocked = config, Identity(Role.FRONTEND), ""
        self.submitted = asyncio.Event()
        self.submit: Submit | None = None

    def send(self, peer: Identity, message: Struct) -> None:
        sys.setprofile(None)
        if isinstance(message, Submit):
            self.submit = message
            self.submitted.set()


async def traced(path: str, body: dict[str, object]) -> tuple[Trace, Submit]:
    """A second request of this kind on its way through a frontend, when all that it needs is imported."""
    config = MeshConfig(server=ServerConfig(responses_store="off"), resolved=RESOLVED)
    mesh: Any = TracedMesh(config)
    app = FrontendApp()
    app._use(mesh)
    app.requests.budget.max_bytes = config.server.max_concurrent_bytes
    app.figures.take(MeshStats(True))
    app.on_peer_up(Identity(Role.DETOKENIZER), Incarnation(1))
    asgi, trace = Application(app).app(), Trace()

    async def begun(scope: Any, receive: Any, send: Any) -> None:
        if mesh.submit is not None:
            mesh.submitted.clear()
            sys.setprofile(trace)
        await asgi(scope, receive, send)

    observed: Any = app.observer
    observed.done = lambda answer, started, path, status: None
    async with httpx.AsyncClient(transport=httpx.ASGITransport(begun), base_url="http://localhost") as http:
        for _ in range(2):
            asking = asyncio.ensure_future(http.post(path, json=body))
            await asyncio.wait_for(mesh.submitted.wait(), 30)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    assert mesh.submit is not None
    return trace, mesh.submit


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER], "stream": True}),
        ("/v1/completions", {"prompt": "hi", "stream": True}),
    ],
)
async def test_a_request_does_not_run_from_file_to_file(path: str, body: dict[str, object]) -> None:
    trace, submit = await traced(path, body)
    assert submit.max_tokens is None or submit.max_tokens
    story = " ".join(trace.files)
    assert trace.num_calls <= MOST_CALLS, story
    assert len(set(trace.files)) <= MOST_FILES, story
    assert trace.num_moves <= MOST_MOVES, story
