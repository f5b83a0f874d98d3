"""The status socket: one JSON line asked, one answered, over a Unix socket in the run directory.

Asked by `meshlm status` and other commands of the same user; answered by the supervisor.
"""

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from meshlm.supervisor.errors import StartError
from meshlm.supervisor.rundir import STATUS_SOCKET

MAX_REQUEST_BYTES = 64 << 10


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


async def serve(run_dir: Path, answer: Callable[[dict[str, object]], object]) -> asyncio.Server:
    """Answer requests until the server is closed. `answer` gets the request's object and returns a JSON value."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = json.loads(await asyncio.wait_for(reader.readline(), timeout=5))
            reply = answer(request) if isinstance(request, dict) else {"error": "not a JSON object"}
        except (ValueError, RecursionError, TimeoutError, ConnectionError) as error:
            reply = {"error": f"bad request: {error}"}
        except BaseException:  # a bug: the asker must not wait, nor its descriptor stay
            writer.close()
            raise
        writer.write(json.dumps(reply).encode() + b"\n")
        writer.close()

    path = run_dir / STATUS_SOCKET
    path.unlink(missing_ok=True)
    return await asyncio.start_unix_server(talk, path=str(path), limit=MAX_REQUEST_BYTES)


def ask(run_dir: Path, request: dict[str, object], timeout_s: float = 5.0) -> dict[str, object]:
    """Ask a mesh's supervisor. StartError when it does not answer."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(timeout_s)
            link.connect(str(run_dir / STATUS_SOCKET))
            link.sendall(json.dumps(request).encode() + b"\n")
            with link.makefile("rb") as replies:
                reply = json.loads(replies.readline())
    except (OSError, ValueError) as error:
        raise StartError(f"the mesh in {run_dir} does not answer: {error}") from None
    if not isinstance(reply, dict):
        raise StartError(f"the mesh in {run_dir} answers nonsense")
    if "error" in reply:
        raise StartError(str(reply["error"]))
    return reply
