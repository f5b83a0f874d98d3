"""Another number of ranks over HTTP: POST /scale_elastic_ep and /is_scaling_elastic_ep ask the supervisor, as `meshlm scale` does.

The mesh serves meanwhile; a request waits for the end of its own change alone. Called by operating.py.
"""

import asyncio
import uuid
from collections.abc import Callable

from msgspec import Struct

from meshlm.frontend.http.errors import HttpError
from meshlm.protocol.edges.control import RanksScaled, ScaleRanks

ANSWER_S = 10.0  # the supervisor is alive, and says at once what it does
LOAD_S = 1800.0  # a new rank may load a large model, as in protocol/operations.py


class AskedRanks:
    """Questions to the supervisor that are not answered yet. `tell`: sends it a message."""

    def __init__(self, tell: Callable[[Struct], None]) -> None:
        self._tell = tell
        self._waiting: dict[str, asyncio.Future[RanksScaled]] = {}

    async def scale(self, num_ranks: int, drain_s: float | None) -> RanksScaled:
        """Have so many ranks; the answer comes when they are there, or why they are not. HttpError when it takes too long."""
        return await self._ask(ScaleRanks(uuid.uuid4().hex, num_ranks, drain_s), LOAD_S + (drain_s or 0.0))

    async def now(self) -> RanksScaled:
        """How many there are, and what is being changed."""
        return await self._ask(ScaleRanks(uuid.uuid4().hex), ANSWER_S)

    def answered(self, answer: RanksScaled) -> None:
        """An answer that nobody waits for is dropped."""
        future = self._waiting.get(answer.id)
        if future is not None and not future.done():
            future.set_result(answer)

    async def _ask(self, question: ScaleRanks, limit_s: float) -> RanksScaled:
        future: asyncio.Future[RanksScaled] = asyncio.get_running_loop().create_future()
        self._waiting[question.id] = future
        try:
            self._tell(question)
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError:
            text = f"the supervisor did not answer in {limit_s:.0f} s"
            raise HttpError(504, text, kind="timeout_error") from None
        finally:
            del self._waiting[question.id]
