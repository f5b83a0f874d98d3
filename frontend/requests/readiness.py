"""Whether this frontend takes requests now, why not, and the wait until it does. What is known of the mesh comes from io.py."""

import asyncio
import contextlib

from meshlm.frontend.requests.admission import Admission
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.resolved import Resolved
from meshlm.runtime.client.mesh_client import HOLD_S, MeshClient
from meshlm.runtime.process.figures import Figures

STOPPING = "this server is stopping"


class Readiness:
    """Used by one loop."""

    config: MeshConfig
    resolved: Resolved

    def __init__(self, client: MeshClient, requests: Admission, figures: Figures) -> None:
        self._client, self._requests, self._figures = client, requests, figures
        self.is_draining = False
        self.is_refusing = False  # meshlm drain
        self.queue_full = False  # by the coordinator's word
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """The answer of not_ready_reason may be another one now."""
        self._changed.set()

    def not_ready_reason(self) -> str:
        if self.is_draining:
            return STOPPING
        if self.is_refusing:
            return "this server is draining and takes no new requests (meshlm drain)"
        figures, has_detokenizer = self._figures.now, bool(self._client.tracker.load)
        serves_alone = self.resolved.renders_only
        if (serves_alone or figures.serving) and not has_detokenizer:
            return "no detokenizer can be reached"
        if serves_alone:
            return ""
        if not figures.serving:
            return figures.reason
        return self._client.mesh.blocked if self._client.mesh is not None else ""

    def blocked(self) -> str:
        """A link anywhere in the mesh on which nothing moves: requests may be served, but not all."""
        return self._figures.now.blocked

    def refusal(self, *, attaches: bool) -> str:
        """Why a new request gets 503 before anything is done for it, "" when it does not. `attaches`: it may be one that runs."""
        if self.is_draining or self.is_refusing:
            return self.not_ready_reason()
        if self._requests.num_open >= self.config.server.max_concurrent_requests:
            return "too many open requests (--max-concurrent-requests)"
        if attaches:
            return ""
        waiting = self.config.scheduler.max_waiting
        if self.queue_full:
            return f"{waiting} requests are waiting already (--max-waiting)"
        most = waiting + self.resolved.max_num_seqs * max(1, len(self._figures.now.ranks))
        if len(self._client.tracker.unaccepted) >= most:
            return "more prompts wait to be tokenized than can run or wait (--max-waiting, --max-num-seqs)"
        return ""

    async def wait_serving(self) -> str:
        """Wait until requests can be served, HOLD_S at most; what is missing then, "" when nothing is."""
        if not (reason := self.not_ready_reason()) or self.is_draining or self.is_refusing:
            return reason
        with self._requests.counted(), contextlib.suppress(TimeoutError):  # towards --max-concurrent-requests
            async with asyncio.timeout(HOLD_S):
                while self.not_ready_reason() and not (self.is_draining or self.is_refusing):
                    self._changed.clear()
                    await self._changed.wait()
        return self.not_ready_reason()
