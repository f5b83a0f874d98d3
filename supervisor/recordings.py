"""Timelines of all processes (`meshlm trace`): asks them to record, collects what they tell, and leaves it in the run directory.

Owned by io.py. Other nodes' processes are asked by their supervisors, which hand on what comes.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from meshlm.protocol.operations import Action, OperationDone, Profile
from meshlm.protocol.timeline import MAX_SECONDS, RecordTimeline, TimelinePart
from meshlm.protocol.wire.ids import HEAD, Identity, Role

LATE_S = 5.0  # after the end of a recording: who has not told by then is left out
FILE = "timeline.msgpack"
_encode = msgspec.msgpack.Encoder().encode


class Recordings:
    """`peers` are those with an open link; `send` is the supervisor's; `processes` are those of other nodes."""

    COMMANDS = ("trace", "trace-state", "profile", "profile-state")

    def __init__(
        self,
        run_dir: Path,
        peers: Callable[[Role], Iterable[Identity]],
        send: Callable[[Identity, Struct], bool],
        processes: Callable[[], Iterable[Identity]],
        is_guest: bool,
        operate: Callable[[Action], Coroutine[Any, Any, OperationDone]],
    ) -> None:
        self._path, self._peers, self._send = run_dir / FILE, peers, send
        self._processes, self._is_guest, self._operate = processes, is_guest, operate
        self._profiling: asyncio.Task[OperationDone] | None = None
        self._number, self._until = 0, 0.0
        self._waited_for: set[Identity] = set()
        self._parts: list[TimelinePart] = []

    def answer(self, request: dict[str, object], now: float) -> dict[str, object]:
        if request["command"] == "profile":
            self._profiling = asyncio.ensure_future(self._operate(Profile(request.get("start") is True)))
            return {}
        if request["command"] == "profile-state":
            return self._profiled()
        if request["command"] == "trace":
            seconds = request.get("seconds")
            if not isinstance(seconds, int | float) or not 0 < seconds <= MAX_SECONDS:
                return {"error": f"seconds must be a number, more than 0 and at most {MAX_SECONDS:g}"}
            if self._waited_for and now < self._until:
                return {"error": "a timeline is being recorded already"}
            self.begin(RecordTimeline(time.time_ns(), float(seconds)), now)
            return {"number": self._number, "processes": len(self._waited_for)}
        if request.get("number") != self._number:
            return {"error": "no such timeline"}
        if self._waited_for and now < self._until:
            return {"done": False}
        missing = sorted(str(one) for one in self._waited_for)
        self._waited_for.clear()
        if self._parts:
            self._path.write_bytes(_encode(self._parts))
            self._parts = []
        return {"done": True, "path": str(self._path), "missing": missing}

    def _profiled(self) -> dict[str, object]:
        """Whether all workers have begun or ended torch's profiler."""
        task = self._profiling
        if task is None or not task.done():
            return {"done": False} if task is not None else {"error": "nobody asked for it"}
        self._profiling = None
        if isinstance(task.exception(), TimeoutError):
            return {"error": "the workers did not answer"}
        done = task.result()
        return {"error": done.error} if done.error else {"done": True, "paths": list(done.paths)}

    def begin(self, ask: RecordTimeline, now: float) -> None:
        """Asks all processes of this node, and the other nodes where this is the head."""
        self._number, self._until, self._parts = ask.number, now + ask.seconds + LATE_S, []
        roles = [role for role in Role if role is not Role.SUPERVISOR or not self._is_guest]
        own = [peer for role in roles for peer in self._peers(role) if self._send(peer, ask)]
        self._waited_for = {peer for peer in own if peer.role is not Role.SUPERVISOR} | set(self._processes())

    def came(self, part: TimelinePart) -> None:
        if self._is_guest:
            self._send(HEAD, part)
        elif part.number == self._number and part.process in self._waited_for:
            self._waited_for.remove(part.process)
            self._parts.append(part)
