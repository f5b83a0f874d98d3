"""The mesh's figures as the coordinator tells them, once a second and when they are asked for. Owned by a frontend's io.py, and by the
Python API's client, which stands in a frontend's place."""

import asyncio
import contextlib
from collections.abc import Callable

from meshlm.protocol.edges.control import AskStats, MeshStats
from meshlm.runtime.errors import LinkDown

# Readers wait so long for the ranks' newest figures, then answer with those of the last second.
FRESH_S = 0.5
AGAIN_S = 0.05  # between two questions to a coordinator that may be away


class Figures:
    """`now` is what came last."""

    def __init__(self) -> None:
        self.now = MeshStats(False, "starting")
        self._asking = asyncio.Lock()
        self._answered = asyncio.Event()

    def take(self, stats: MeshStats) -> None:
        self.now = stats
        if stats.asked:
            self._answered.set()

    async def fresh(self, ask: Callable[[AskStats], None]) -> MeshStats:
        """The figures of this moment, or the last ones after FRESH_S; `ask` sends one question at a time."""
        await self._renew(ask)
        return self.now

    async def certain(self, ask: Callable[[AskStats], None], limit_s: float) -> MeshStats:
        """The figures of this moment, with those of a rank at least: a coordinator that is away is waited for. TimeoutError."""
        async with asyncio.timeout(limit_s):
            while True:
                if await self._renew(ask) and self.now.ranks:
                    return self.now
                await asyncio.sleep(AGAIN_S)

    async def _renew(self, ask: Callable[[AskStats], None]) -> bool:
        with contextlib.suppress(TimeoutError, LinkDown):
            async with asyncio.timeout(FRESH_S), self._asking:
                self._answered.clear()
                ask(AskStats())
                return await self._answered.wait()
        return False
