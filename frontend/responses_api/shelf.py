"""The store of responses as the loop uses it: one call after the other in a thread, and errors as HttpError. One per frontend.

The file is opened by the first call that needs it: a server that is never asked for a response has none.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import structlog

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.responses_api.records import Chunk, Conversation, Stored, Written
from meshlm.runtime.process.logs import Limited

if TYPE_CHECKING:  # sqlite3 is loaded with the file
    from meshlm.frontend.responses_api.store import Store

Found = TypeVar("Found")
FULL = "this key's responses that are computed in the background take all the room of the store; try again when some are ended"
FILE = "responses.sqlite"

_log = Limited(structlog.get_logger())


class Shelf:
    """The store of one frontend. `path` is None where nothing is stored."""

    def __init__(self, path: Path | None, max_count: int, max_bytes: int) -> None:
        self.path, self._limits = path, (max_count, max_bytes)
        self.holder = uuid.uuid4().hex
        self._store: Store | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._news = asyncio.Event()

    async def _do(self, work: "Callable[[Store], Found]") -> Found:
        import sqlite3

        from meshlm.frontend.responses_api.store import StoreFull

        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "responses")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(self._open()))
        except StoreFull:
            raise HttpError(503, FULL) from None
        except sqlite3.Error as error:
            raise self._failed(str(error)) from None
        except OSError as error:
            raise self._failed(error.strerror or str(error)) from None

    def _failed(self, cause: str) -> HttpError:
        _log.error("the store of responses failed", cause=cause, file=str(self.path))
        return HttpError(500, f"the store of responses failed: {cause}")

    def _open(self) -> "Store":
        from meshlm.frontend.responses_api.store import Store

        if self._store is None:
            assert self.path is not None
            self._store = Store(self.path, *self._limits)
        return self._store

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        if self._store is not None:
            self._store.close()

    async def put(self, new: Stored, chunk: Chunk | None = None) -> bool:
        return await self._do(lambda store: store.put(new, time.time(), chunk))

    async def find(self, response_id: str, key: str, param: str = "response_id") -> Stored:
        """The response; HttpError where there is none for this key."""
        found = None
        if self.path is not None:
            found = await self._do(lambda store: store.get(response_id, key, time.time()))
        if found is None:
            text = f"{param}: there is no response {response_id[:80]!r}"
            raise HttpError(404, text, param)
        return found

    async def delete(self, response_id: str, key: str) -> None:
        await self.find(response_id, key)
        await self._do(lambda store: store.delete(response_id, key))
        self._tell()

    async def cancel(self, response_id: str, key: str, answer: bytes) -> bool:
        done = await self._do(lambda store: store.cancel(response_id, key, answer))
        self._tell()
        return done

    async def write(self, news: Sequence[Written], lease_s: float) -> list[str]:
        lost = await self._do(lambda store: store.write(self.holder, news, time.time() + lease_s))
        self._tell()
        return lost

    async def release(self, response_id: str, after_s: float) -> None:
        await self._do(lambda store: store.release(response_id, self.holder, time.time() + after_s))

    async def claim(self, lease_s: float, most: int) -> list[Stored]:
        if self.path is None or (self._store is None and not self.path.exists()):
            return []
        now = time.time()
        return await self._do(lambda store: store.claim(self.holder, now, now + lease_s, most))

    async def fail(self, stored: Stored, error: HttpError) -> None:
        """Ends one of this frontend's that cannot be computed."""
        failure = {"code": "server_error", "message": error.message}
        answer = {**msgspec.json.decode(stored.answer), "status": "failed", "error": failure}
        event = {"type": "response.failed", "sequence_number": stored.next_event, "response": answer}
        data = b"event: response.failed\ndata: " + msgspec.json.encode(event) + b"\n\n"
        chunk, encoded = Chunk(stored.next_event, 1, data), msgspec.json.encode(answer)
        await self.write([Written(stored.id, chunk, stored.tokens, stored.next_event + 1, "failed", encoded)], 0.0)

    async def events(self, response_id: str, after: int) -> tuple[str | None, list[Chunk]]:
        return await self._do(lambda store: store.events(response_id, after))

    async def conversation(self, name: str, key: str, param: str) -> Conversation:
        """The conversation without its items; HttpError where there is none for this key."""
        found = None
        if self.path is not None:
            found = await self._do(lambda store: store.conversations.get(name, key, time.time()))
        if found is None:
            raise HttpError(404, f"{param}: there is no conversation {name[:80]!r}", param)
        return found

    async def items(self, name: str) -> list[dict[str, Any]]:
        return [msgspec.json.decode(item) for item in await self._do(lambda store: store.conversations.items(name))]

    async def find_items(self, names: list[str], key: str) -> dict[str, dict[str, Any]]:
        """Items of ended responses, by their names; those that are not there are missing."""
        return {} if self.path is None else await self._do(lambda store: store.find_items(names, key))

    async def put_conversation(self, new: Conversation, items: list[dict[str, Any]]) -> None:
        await self._do(lambda store: store.put_conversation(new, items, time.time()))

    async def delete_conversation(self, name: str) -> None:
        await self._do(lambda store: store.delete_conversation(name))

    async def delete_item(self, name: str, item_id: str) -> bool:
        return await self._do(lambda store: store.delete_item(name, item_id))

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def news(self, limit_s: float) -> None:
        """Waits until this frontend has written something, or for so long: others write too."""
        try:
            await asyncio.wait_for(self._news.wait(), limit_s)
        except TimeoutError:
            return
