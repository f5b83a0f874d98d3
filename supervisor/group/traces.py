"""Profiler traces of all workers: asks each, gathers the answers. Used by io.py for frontends and the Python API."""

import asyncio
from collections.abc import Callable

from msgspec import Struct

from meshlm.protocol.control_edge import Profile, Profiled
from meshlm.protocol.ids import Identity

LIMIT_S = 120.0  # writing a long trace takes a while


class Traces:
    """`send` says whether the process could be reached."""

    def __init__(self, send: Callable[[Identity, Struct], bool]) -> None:
        self._send = send
        self._waiting: dict[tuple[int, Identity], asyncio.Future[Profiled]] = {}
        self._next = 0

    async def ask(self, workers: list[Identity], *, start: bool) -> Profiled:
        """Begin or end a trace in each. The files, or what went wrong first; answers within LIMIT_S."""
        self._next += 1
        handle = self._next
        loop = asyncio.get_running_loop()
        futures = {worker: loop.create_future() for worker in workers}
        for worker, future in futures.items():
            self._waiting[handle, worker] = future
            if not self._send(worker, Profile(handle, start)):
                self.lost(worker)
        if not futures:
            return Profiled(handle, error="no worker is there")
        await asyncio.wait(futures.values(), timeout=LIMIT_S)
        answers = []
        for worker, future in futures.items():
            del self._waiting[handle, worker]
            answers.append(
                future.result()
                if future.done()
                else Profiled(handle, error=f"{worker} did not answer in {LIMIT_S:.0f} s")
            )
        error = next((answer.error for answer in answers if answer.error), "")
        return Profiled(handle, () if error else tuple(path for answer in answers for path in answer.paths), error)

    def answered(self, worker: Identity, message: Profiled) -> None:
        """A worker's answer; one that nobody waits for is dropped."""
        future = self._waiting.get((message.handle, worker))
        if future is not None and not future.done():
            future.set_result(message)

    def lost(self, worker: Identity) -> None:
        """It died, or has no link: nobody need wait for it."""
        for (handle, asked), future in self._waiting.items():
            if asked == worker and not future.done():
                future.set_result(Profiled(handle, error=f"{worker} is not there"))
