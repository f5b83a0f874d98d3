"""Which requests this frontend takes: those within a budget, while the mesh serves, whose bodies are no poison. Owned by io.py."""

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.requests.budget import Budget
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.resolved import Resolved
from meshlm.protocol.edges.control import Died
from meshlm.protocol.edges.text import Detokenize, DetokenizeReply, Submit, Tokenize, TokenizeReply
from meshlm.protocol.wire.ids import ErrorKind, Identity, Incarnation
from meshlm.runtime.client.mesh_client import HOLD_S, MeshClient
from meshlm.runtime.client.placement import Choice
from meshlm.runtime.errors import RequestError
from meshlm.runtime.process.deaths import poison
from meshlm.runtime.process.figures import Figures

ASK_TIMEOUT_S = 30.0
MOVED_S = 0.1


class Admission:
    """`num_open` counts prompts. `closed` is called when that number falls."""

    def __init__(self, client: MeshClient, closed: Callable[[], None]) -> None:
        self._client, self._closed = client, closed
        self.budget = Budget(0)
        self.num_open = 0
        self.new_handle = client.tracker.new_handle
        self._moved, self._all_closed = asyncio.Event(), asyncio.Event()

    def open(self, choices: list[Choice], submit: Submit) -> None:
        self.num_open += 1
        self._client.open(choices, submit)

    def close(self, choices: list[Choice]) -> None:
        self._left(len({choice.prompt_index for choice in choices}))
        self._closed()
        self._client.close(choices)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """A request that is not opened yet counts as one."""
        self.num_open += 1
        try:
            yield
        finally:
            self._left(1)

    def _left(self, count: int) -> None:
        self.num_open = max(0, self.num_open - count)
        if not self.num_open:
            self._all_closed.set()

    def open_choices(self) -> Iterable[Choice]:
        return self._client.tracker.by_handle.values()

    def note_moved(self) -> None:
        """Some sequence has begun or ended."""
        self._moved.set()

    async def moved(self) -> None:
        """Wait until some sequence has begun or ended, MOVED_S at most: one may have failed without a word from elsewhere."""
        self._moved.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MOVED_S):
                await self._moved.wait()

    async def all_closed(self) -> None:
        """Wait until none is open."""
        while self.num_open:
            self._all_closed.clear()
            await self._all_closed.wait()

    async def ask(self, message: Tokenize | Detokenize) -> TokenizeReply | DetokenizeReply:
        """Asks a detokenizer. A waiting question counts towards the budget; when its client leaves (cancelled), that is told."""
        with self.budget.open_question(message.prompt if isinstance(message, Tokenize) else message.token_ids):
            try:
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    return await self._client.ask(message)
            except RequestError as error:
                raise HttpError.of_kind(error.kind, error.message, error.param) from None
            except TimeoutError:
                raise HttpError(504, "the detokenizer did not answer") from None


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


MAX_NAMES = 1024


def name_of(path: str, body: bytes) -> str:
    """What a frontend has in hand while it reads this body: a client whose connection breaks sends the same again."""
    return f"body {hashlib.blake2b(path.encode() + b' ' + body, digest_size=16).hexdigest()}"


class PoisonBodies:
    """The supervisor tells each frontend of these deaths, and again with each new link."""

    def __init__(self) -> None:
        self._known: set[tuple[Identity, Incarnation]] = set()
        self._deaths: OrderedDict[str, Died] = OrderedDict()
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._alone = asyncio.Lock()

    def learn(self, died: Died) -> None:
        """A frontend died, maybe one of whose death this one has heard."""
        if (died.identity, died.incarnation) in self._known or not died.in_hand:
            return
        self._known.add((died.identity, died.incarnation))
        for name in died.in_hand:
            self._counts[name] = self._counts.get(name, 0) + 1
            self._deaths[name] = died
            while len(self._counts) > MAX_NAMES:
                self._deaths.pop(self._counts.popitem(last=False)[0])

    @contextlib.asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """The turn of this body to be read: one of which a frontend may have died is read beside no other such. HttpError for what two
        died of."""
        if name not in self._counts:
            yield
            return
        if text := poison(self._deaths[name].identity.role, self._counts[name]):
            raise HttpError.of_kind(ErrorKind.POISON, text)
        async with self._alone:
            yield
