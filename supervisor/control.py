"""The status socket: one JSON line asked, one answered, over a Unix socket in the run directory, which is its user's alone.

Asked by `meshlm status` and other commands of the same user; answered by the supervisor.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from meshlm.protocol.config import MeshConfig
from meshlm.supervisor.errors import StartError
from meshlm.supervisor.rundir import STATUS_SOCKET

MAX_REQUEST_BYTES = 64 << 10
ATTACH: dict[str, object] = {"command": "attach"}
"""Asks for the configuration; the connection stays open as long as the mesh lives."""


class ProcessStatus(Struct, frozen=True):
    """One row of `meshlm status`."""

    role: str
    index: int
    pid: int
    incarnation: int
    state: str
    uptime_s: float
    restarts: int
    phase: str = ""
    rss_bytes: int = 0
    host: str = ""  # in a mesh of several nodes


class StandbyStatus(Struct, frozen=True):
    """A process that has no place in the mesh yet."""

    role: str
    pid: int
    state: str  # "loading", "standby", or "lost" with its node
    uptime_s: float
    rss_bytes: int = 0
    host: str = ""


class MeshStatus(Struct, frozen=True):
    """What `meshlm status --json` prints."""

    processes: list[ProcessStatus]
    standbys: list[StandbyStatus] = []
    model: str = ""
    port: int = 0
    run_dir: str = ""
    version: str = ""
    ready: bool = False
    data_parallel_size: int = 1
    scaling: str = ""  # what is being changed
    scaling_failed: str = ""  # why the last change was undone
    missing: str = ""  # ranks or workers that no node of the mesh has now


class ControlServer:
    """Answers requests until it is closed. `answer` gets the request's object and returns a JSON value."""

    def __init__(self, answer: Callable[[dict[str, object]], object]) -> None:
        self._answer = answer
        self._held: set[asyncio.StreamWriter] = set()  # see `attach`
        self._server: asyncio.Server | None = None

    async def open(self, run_dir: Path) -> None:
        path = run_dir / STATUS_SOCKET
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._talk, path=str(path), limit=MAX_REQUEST_BYTES)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._held:
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request: object = None
        try:
            request = json.loads(await asyncio.wait_for(reader.readline(), timeout=5))
            reply = self._answer(request) if isinstance(request, dict) else {"error": "not a JSON object"}
        except (ValueError, RecursionError, TimeoutError, ConnectionError) as error:
            reply = {"error": f"bad request: {error}"}
        except BaseException:  # a bug: the asker must not wait, nor its descriptor stay
            writer.close()
            raise
        writer.write(json.dumps(reply).encode() + b"\n")
        if request == ATTACH:
            self._held.add(writer)
            with contextlib.suppress(OSError):
                await reader.read()  # until the asker has ended
            self._held.discard(writer)
        writer.close()


def ask(run_dir: Path, request: dict[str, object], timeout_s: float = 5.0) -> dict[str, object]:
    """Ask a mesh's supervisor. StartError when it does not answer."""
    link, reply = _asked(run_dir, request, timeout_s)
    link.close()
    return reply


def attach(run_dir: Path, timeout_s: float = 5.0) -> tuple[socket.socket, MeshConfig]:
    """The configuration, for one more process of the mesh, and a connection that ends when the mesh does."""
    link, reply = _asked(run_dir, ATTACH, timeout_s)
    link.settimeout(None)
    return link, msgspec.convert(reply["config"], MeshConfig)


def _asked(run_dir: Path, request: dict[str, object], timeout_s: float) -> tuple[socket.socket, dict[str, object]]:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(timeout_s)
        link.connect(str(run_dir / STATUS_SOCKET))
        link.sendall(json.dumps(request).encode() + b"\n")
        with link.makefile("rb") as replies:
            reply = json.loads(replies.readline())
        if not isinstance(reply, dict):
            raise StartError(f"the mesh in {run_dir} answers nonsense")
        if "error" in reply:
            raise StartError(str(reply["error"]))
    except (OSError, ValueError) as error:
        link.close()
        raise StartError(f"the mesh in {run_dir} does not answer: {error}") from None
    except StartError:
        link.close()
        raise
    return link, reply
