"""The status socket: one JSON line asked, one answered, over a Unix socket in the run directory, which is its user's alone.

Asked by `meshlm status` and other commands of the same user; answered by the supervisor.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.control import ProcessReport, StandbyReport
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.supervisor.errors import StartError
from meshlm.supervisor.processes.rundir import STATUS_SOCKET

MAX_REQUEST_BYTES, TIMEOUT_S = 64 << 10, 5.0
ATTACH = "attach"
"""Asks for a place and the configuration; the connection stays open as long as the mesh and the asker live."""


# The fields that a ProcessReport and a ProcessStatus have in common.
SAME = ("pid", "incarnation", "state", "restarts", "phase", "rss_bytes", "sent")


class ProcessStatus(Struct, frozen=True):
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
    last_end: str = ""  # how the incarnation before ended
    sent: dict[str, int] = {}  # messages in the present session of each link, by the peer's name

    def report(self, now_s: float) -> ProcessReport:
        """The same for another process of the mesh; `now_s` is the wall clock."""
        same: dict[str, Any] = {name: getattr(self, name) for name in SAME}
        identity = Identity(Role(self.role), self.index)
        return ProcessReport(identity=identity, started_s=now_s - self.uptime_s, host=self.host, **same)

    @classmethod
    def of(cls, report: ProcessReport, now_s: float, host: str) -> "ProcessStatus":
        """What another node's supervisor reported of a process there."""
        same: dict[str, Any] = {name: getattr(report, name) for name in SAME}
        uptime_s = round(now_s - report.started_s, 3) if report.pid else 0.0
        return cls(role=report.identity.role.value, index=report.identity.index, uptime_s=uptime_s, host=host, **same)


class StandbyStatus(Struct, frozen=True):
    """A process that has no place in the mesh yet."""

    role: str
    pid: int
    state: str  # "loading", "standby", or "lost" with its node
    uptime_s: float
    rss_bytes: int = 0
    host: str = ""

    def report(self, now_s: float) -> StandbyReport:
        return StandbyReport(Role(self.role), self.pid, self.state, now_s - self.uptime_s, self.rss_bytes)

    @classmethod
    def of(cls, report: StandbyReport, now_s: float, host: str) -> "StandbyStatus":
        uptime_s = round(now_s - report.started_s, 3)
        return cls(report.role.value, report.pid, report.state, uptime_s, report.rss_bytes, host)


class MeshStatus(Struct, frozen=True):
    """The status that `meshlm status --json` prints."""

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
    record_requests: str = ""  # the folder of its recordings
    missing: str = ""  # ranks or workers that no node of the mesh has now
    dp_roles: str = ""  # as the flag has it, now


class ControlServer:
    """Answers requests until it is closed. `answer` gets the request's object and returns a JSON value."""

    def __init__(self, answer: Callable[[dict[str, object]], object]) -> None:
        self._answer = answer
        self._held: dict[asyncio.StreamWriter, Identity] = {}  # who holds which place; see `attach`
        self._server: asyncio.Server | None = None

    async def open(self, run_dir: Path) -> None:
        """The socket is there when it listens: whoever finds it is answered."""
        begun = run_dir / "new.sock"
        begun.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._talk, path=str(begun), limit=MAX_REQUEST_BYTES)
        begun.replace(run_dir / STATUS_SOCKET)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._held:
            writer.close()

    def place(self, request: dict[str, object], present: Iterable[Identity]) -> Identity:
        """A free one for one more process. ValueError when the one that is wanted is not."""
        role, wanted = Role(request.get("role")), request.get("index")
        taken = {identity.index for identity in (*present, *self._held.values()) if identity.role is role}
        if isinstance(wanted, int) and wanted in taken:
            raise ValueError(f"--index {wanted}: {role.value}/{wanted} is running already")
        free = next(number for number in range(len(taken) + 1) if number not in taken)
        return Identity(role, wanted if isinstance(wanted, int) else free)

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
        if isinstance(reply, dict) and "place" in reply:
            self._held[writer] = Identity.parse(reply["place"])
        writer.write(json.dumps(reply).encode() + b"\n")
        if writer in self._held:
            with contextlib.suppress(OSError):
                await reader.read()  # until the asker has ended
            del self._held[writer]
        writer.close()


def request(run_dir: Path, command: dict[str, object], timeout_s: float = TIMEOUT_S) -> dict[str, object]:
    """The answer of a mesh's supervisor to a command. StartError when it does not answer."""
    link, reply = _exchange(run_dir, command, timeout_s)
    link.close()
    return reply


def attach(run_dir: Path, role: Role, index: int | None) -> tuple[socket.socket, Identity, MeshConfig]:
    """A place for one more process, the configuration, and a connection that holds the place and ends when the mesh does."""
    link, reply = _exchange(run_dir, {"command": ATTACH, "role": role.value, "index": index}, TIMEOUT_S)
    link.settimeout(None)
    return link, Identity.parse(str(reply["place"])), msgspec.convert(reply["config"], MeshConfig)


def _exchange(run_dir: Path, command: dict[str, object], timeout_s: float) -> tuple[socket.socket, dict[str, object]]:
    with contextlib.ExitStack() as on_error:
        link = on_error.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            link.settimeout(timeout_s)
            link.connect(str(run_dir / STATUS_SOCKET))
            link.sendall(json.dumps(command).encode() + b"\n")
            with link.makefile("rb") as replies:
                reply = json.loads(replies.readline())
        except (OSError, ValueError) as error:
            raise StartError(f"the mesh in {run_dir} does not answer: {error}") from None
        if not isinstance(reply, dict):
            raise StartError(f"the mesh in {run_dir} answers nonsense")
        if "error" in reply:
            raise StartError(str(reply["error"]))
        on_error.pop_all()
        return link, reply
