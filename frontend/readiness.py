"""Whether this frontend takes requests now, why not, the wait until it does, and figures. The base of io.py's FrontendApp."""

import asyncio
import contextlib
from functools import partial

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.requests.request_tracker import RequestTracker
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.resolved import Resolved
from meshlm.protocol.edges.control import MeshStats, RankStats
from meshlm.protocol.wire.ids import COORDINATOR, ErrorKind, Identity
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.process.figures import Figures

STOPPING = "this server is stopping"
HOLD_S = 10.0  # how long a new request waits for a mesh that is starting, or replacing a process
CERTAIN_S = 20.0  # how long an operation waits for figures while the coordinator is replaced


class Readiness:
    """Used by one loop. What is known of the mesh comes from io.py."""

    config: MeshConfig
    resolved: Resolved

    def __init__(self) -> None:
        self._tracker = RequestTracker()
        self._mesh: Mesh | None = None
        self._renders_only = False
        self.figures = Figures()
        self._draining = False
        self._refusing = False  # meshlm drain
        self._queue_full = False  # by the coordinator's word
        self._news = asyncio.Event()  # set whenever the answer of not_ready_reason may have changed
        self.num_open = 0

    def not_ready_reason(self) -> str:
        if self._draining:
            return STOPPING
        if self._refusing:
            return "this server is draining and takes no new requests (meshlm drain)"
        if self._renders_only:
            return "" if self._tracker.load else "no detokenizer can be reached"
        if self.figures.now.serving and not self._tracker.load:
            return "no detokenizer can be reached"
        if not self.figures.now.serving:
            return self.figures.now.reason
        return self._mesh.blocked if self._mesh is not None else ""

    def blocked(self) -> str:
        """A link anywhere in the mesh on which nothing moves: requests may be served, but not all."""
        return self.figures.now.blocked

    def refusal(self, *, attaches: bool) -> str:
        """Why a new request gets 503 before anything is done for it, "" when it does not. `attaches`: it may be one that runs."""
        if self._draining or self._refusing:
            return self.not_ready_reason()
        if self.num_open >= self.config.server.max_concurrent_requests:
            return "too many open requests (--max-concurrent-requests)"
        if attaches:
            return ""
        waiting = self.config.scheduler.max_waiting
        if self._queue_full:
            return f"{waiting} requests are waiting already (--max-waiting)"
        if len(self._tracker.unaccepted) >= waiting + self.resolved.max_num_seqs * max(1, len(self.figures.now.ranks)):
            return "more prompts wait to be tokenized than can run or wait (--max-waiting, --max-num-seqs)"
        return ""

    async def wait_serving(self) -> str:
        """Wait until requests can be served, HOLD_S at most; what is missing then, "" when nothing is."""
        if not self.not_ready_reason() or self._draining or self._refusing:
            return self.not_ready_reason()
        self.num_open += 1  # it counts towards --max-concurrent-requests
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HOLD_S):
                    while self.not_ready_reason() and not (self._draining or self._refusing):
                        self._news.clear()
                        await self._news.wait()
        finally:
            self.num_open -= 1
        return self.not_ready_reason()

    async def any_detokenizer(self) -> Identity:
        """Wait for one, HOLD_S at most: the only one may be the one that died."""
        try:
            async with asyncio.timeout(HOLD_S):
                while (target := self._tracker.least_loaded()) is None:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise HttpError.of(ErrorKind.OVERLOADED, "no detokenizer is ready") from None
        return target

    # --- figures ---

    async def is_paused(self) -> bool:
        return (await self.fresh_stats()).paused

    async def rank_stats(self) -> tuple[RankStats, ...]:
        """The figures of each rank as of now, as far as the mesh tells them."""
        return (await self.fresh_stats()).ranks

    async def fresh_stats(self) -> MeshStats:
        assert self._mesh is not None
        return await self.figures.fresh(partial(self._mesh.send, COORDINATOR))

    async def certain_stats(self) -> MeshStats:
        """Of this moment, for what is decided by them. HttpError where the coordinator does not come back in time."""
        assert self._mesh is not None
        try:
            return await self.figures.certain(partial(self._mesh.send, COORDINATOR), CERTAIN_S)
        except TimeoutError:
            raise HttpError.of(ErrorKind.OVERLOADED, "the coordinator does not tell what the ranks do") from None
