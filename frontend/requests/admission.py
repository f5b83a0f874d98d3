"""The open requests of this frontend, and what they may take: the mesh's client within a budget. Owned by io.py."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator

from meshlm.frontend.http.budget import Budget
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.protocol.edges.text import Detokenize, DetokenizeReply, Submit, Tokenize, TokenizeReply
from meshlm.runtime.client.choice import Choice
from meshlm.runtime.client.mesh_client import MeshClient
from meshlm.runtime.errors import RequestError

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

    def admit(self, parsed_request: ParsedRequest) -> int:
        """Counts the request against the budget and gives its cost, for `release`. HttpError when there is no room for it."""
        return self.budget.open(parsed_request)

    def release(self, cost: int) -> None:
        self.budget.close(cost)

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
        size = self.budget.open_question(message.prompt if isinstance(message, Tokenize) else message.token_ids)
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return await self._client.ask(message)
        except RequestError as error:
            raise HttpError.of_kind(error.kind, error.message, error.param) from None
        except TimeoutError:
            raise HttpError(504, "the detokenizer did not answer", kind="timeout_error") from None
        finally:
            self.budget.close_question(size)
