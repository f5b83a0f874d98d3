"""Responses that are computed in the background: who computes each of them, and how its events get to the store. One per frontend.

The mesh computes such a response as one that has an Idempotency-Key, so it runs on while nobody holds it (docs/retries.md). Each
frontend writes what came every FLUSH_S, renews its leases, and looks once a second for responses whose holder is gone. It goes on with
them where their events end.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.http.retry import IdempotencyKey
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.responses import AnswerHead, trace_headers
from meshlm.frontend.openai.turn import TurnResponse
from meshlm.frontend.requests import submits
from meshlm.frontend.requests.generation import Backend, Generation
from meshlm.frontend.responses_api.format import ResponseFormat
from meshlm.frontend.responses_api.records import Chunk, Stored, Written
from meshlm.frontend.responses_api.shelf import Shelf
from meshlm.runtime.client.placement import Choice, RowDetails

FLUSH_S, LEASE_S, LOOK_S = 0.05, 4.0, 1.0
DEFER_S = 2.0  # until a response is tried again for which there was no room
MAX_ATTEMPTS, CLAIMED_AT_ONCE = 10, 8
PATH = "/v1/responses"
Asked = Callable[[Stored], Awaitable[tuple[ParsedRequest, ResponseFormat, str]]]  # with the model's name


class Running(TurnResponse):
    """One response that this frontend computes. The tokens that its stored events tell bring no events again."""

    def __init__(self, stored: Stored, parsed_request: ParsedRequest, model: str, form: ResponseFormat) -> None:
        self.ended_event = asyncio.Event()
        head = AnswerHead(parsed_request, stored.id, stored.created, model, self.ended_event.set)
        super().__init__(head, self._take, form)
        self.id, self.form = stored.id, form
        self.cuts = (stored.tokens,)
        self._skips, self._next = stored.tokens, stored.next_event
        self._is_behind = stored.tokens > 0
        form.num_events = stored.next_event
        self._first = stored.next_event  # the number of the first event that is not written
        self._waiting: list[bytes] = []
        self.wakes: Callable[[], None] = lambda: None
        self.is_lost = False

    def row(self, choice: Choice, num_tokens: int, text: str, details: RowDetails | None) -> None:
        have = len(choice.token_ids)
        if self._is_behind and have - num_tokens >= self._skips:
            self._catch_up()
        if self._is_behind and details is not None and details.finished is not None:  # its end is not stored
            super().row(choice, num_tokens, text, msgspec.structs.replace(details, finished=None))
            self._catch_up()
            num_tokens, text, details = 0, "", RowDetails(finished=details.finished)
        super().row(choice, num_tokens, text, details)

    def _catch_up(self) -> None:
        self._is_behind, self.form.num_events = False, self._next

    def _take(self, events: bytes) -> None:
        if not self._is_behind:
            self._waiting.append(events)
            self.wakes()

    def unwritten(self) -> Written:
        """Takes the events that came since the last call."""
        tokens = self._skips if self._is_behind else self.num_output_tokens()
        next_event = self._next if self._is_behind else self.form.num_events
        chunk = Chunk(self._first, next_event - self._first, b"".join(self._waiting)) if self._waiting else None
        self._waiting, self._first = [], next_event
        return Written(self.id, chunk, tokens, next_event)

    def put_back(self, written: Written) -> None:
        """It could not be written."""
        if written.chunk is not None:
            self._waiting.insert(0, written.chunk.data)
            self._first = written.chunk.first

    def final(self) -> Written:
        """All that is left, with the end."""
        if self._is_behind:
            self._catch_up()
        rest = self.last_events()
        if rest:
            self._waiting.append(rest)
            self.form.num_events += self.error is None  # that of a failure is counted already
        status, answer = self.form.outcome()
        return msgspec.structs.replace(self.unwritten(), status=status, answer=answer)


class Background:
    """The responses that this frontend computes in the background. `asked` makes a stored response's request anew."""

    def __init__(self, backend: Backend, generation: Generation, shelf: Shelf, asked: Asked) -> None:
        self._backend, self._generation, self._shelf, self._asked = backend, generation, shelf, asked
        self._running: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()

    def start(self) -> None:
        self._spawn(self._flush())
        self._spawn(self._look())

    async def stop(self) -> None:
        """Leaves what is not ended to others."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def begin(
        self, stored: Stored, asked: tuple[ParsedRequest, ResponseFormat, str], headers: Mapping[str, str] | None = None
    ) -> None:
        """Computes it from now on: the request, its form and the model's name. It is this frontend's by the store. Without the
        `headers` of its request, where another frontend began it, any rank may have it, and a trace begins."""
        parsed_request, form, model = asked
        rank = -1 if headers is None else submits.dp_rank(headers)
        running = Running(stored, parsed_request, model, form)
        running.trace_headers = trace_headers(headers or {})
        running.wakes = self._wake.set
        self._running[stored.id] = running
        self._spawn(self._run(running, rank))

    async def _run(self, running: Running, rank: int) -> None:
        started, status, is_left = time.monotonic(), 200, True
        backend, asked, key = self._backend, running.parsed_request, key_of(running.id)
        try:
            with backend.requests.budget.open(asked):
                if reason := await backend.readiness.wait_serving():
                    raise HttpError(503, reason)
                for submit in await self._generation.submits_of(running, asked, rank, key, running.cuts):
                    backend.requests.open(*submit)
                await running.ended_event.wait()
            if running.error is not None:
                raise running.error
            is_left = False
            status = 499 if running.is_lost else 200
        except HttpError as error:
            running.error, status = error, error.status
            is_left = error.status in (422, 503)  # another frontend has it, or there is no room now
        finally:
            self._running.pop(running.id, None)
            if running.is_lost:  # nobody will ask for it again
                for choice in running.choices:
                    choice.submit = msgspec.structs.replace(choice.submit, retry=None)
            if running.choices:
                backend.requests.close(running.choices)
                backend.observer.done(running, started, PATH, status)
            with contextlib.suppress(HttpError):  # the lease ends, and somebody tries again
                await asyncio.shield(self._settle(running, is_left))

    async def _settle(self, running: Running, is_left: bool) -> None:
        if running.is_lost:
            return
        if is_left:
            await self._shelf.release(running.id, DEFER_S if running.error is not None else 0.0)
        else:
            await self._shelf.write([running.final()], LEASE_S)

    def lose(self, response_id: str) -> None:
        """The response was cancelled or deleted: it is computed no further."""
        if (running := self._running.get(response_id)) is not None:
            running.is_lost = True
            running.ended_event.set()

    def partial(self, response_id: str) -> Running | None:
        return self._running.get(response_id)

    async def _flush(self) -> None:
        """Writes what came, soon after it came; at the latest when a lease must be renewed."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LEASE_S / 4)
            self._wake.clear()
            if self._running:
                await self._write([(one, one.unwritten()) for one in self._running.values()])
            await asyncio.sleep(FLUSH_S)

    async def _write(self, news: list[tuple[Running, Written]]) -> None:
        try:
            lost = await self._shelf.write([written for _, written in news], LEASE_S)
        except HttpError:  # the next time, then
            for running, written in news:
                running.put_back(written)
            return
        for response_id in lost:
            self.lose(response_id)

    async def _look(self) -> None:
        """Takes over what nobody computes any more."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._backend.readiness.refusal(attaches=True) or self._backend.readiness.not_ready_reason():
                continue
            with contextlib.suppress(HttpError):
                for stored in await self._shelf.claim(LEASE_S, CLAIMED_AT_ONCE):
                    await self._take_over(stored)

    async def _take_over(self, stored: Stored) -> None:
        try:
            if stored.attempts > MAX_ATTEMPTS:
                raise HttpError(500, f"given up after {MAX_ATTEMPTS} attempts")
            asked = await self._asked(stored)
        except HttpError as error:
            await self._shelf.fail(stored, error)
            return
        self.begin(stored, asked)


def key_of(response_id: str) -> IdempotencyKey:
    """The key by which any frontend finds the response in the mesh."""
    digest = hashlib.sha256(f"response {response_id}".encode())
    return IdempotencyKey(digest.hexdigest()[:32], digest.digest()[:16], "")
