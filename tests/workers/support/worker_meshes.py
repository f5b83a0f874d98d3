"""The mesh of one worker in a test: what it says is in `said`."""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime.process.timeline import Timeline


class WorkerMesh:
    """What WorkerApp uses of runtime.mesh.Mesh."""

    def __init__(self, config: MeshConfig) -> None:
        self.identity = Identity(Role.WORKER, 0)
        self.config = config
        self.log: Any = structlog.get_logger()
        self.said: asyncio.Queue[object] = asyncio.Queue()
        self.timeline = Timeline(self.identity)
        self._loop = asyncio.get_running_loop()

    def call_soon_threadsafe(self, callback: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(callback, *arguments)

    def call_later(self, delay_s: float, callback: Callable[..., None], *arguments: object) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_s / 100, callback, *arguments)

    def send(self, to: Identity, message: object) -> None:
        self.said.put_nowait(message)

    def progress(self, *arguments: object) -> None:
        """Nobody looks."""

    def fatal(self, message: str) -> None:
        self.said.put_nowait(message)

    def tell_supervisor(self, message: object) -> None:
        self.said.put_nowait(message)
