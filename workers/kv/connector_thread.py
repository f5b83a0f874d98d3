"""One connector (connectors.py) and its two threads: one calls its methods, and never two beside each other; the other takes the
scheduler's messages in order, waits for what the first does, at most for a limit, and answers.

What raises, hangs, or answers with another number than it was asked for is the failure of that message. While a call hangs all others
fail at once. A load's bytes go to memory of its own first, so that what comes too late goes nowhere.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import structlog
from msgspec import Struct

from meshlm.protocol.edges.kv import KEY_BYTES, NOT_HERE, FindPages, MovePages, PagesFound, PagesMoved
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.runtime import plugins
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.kv.connectors import Connector
from meshlm.workers.kv.mover import Copied, Copy, Mover
from meshlm.workers.kv.pages import Column

LIMIT_S = 30.0  # of one call
BATCH_BYTES = 64 << 20  # of the pages of one call, unless those of one key are more
T = TypeVar("T")
MakeConnector = Callable[[bytes, int, Mapping[str, Any]], Connector]
_makers: dict[str, MakeConnector] = {}  # of plug-ins, by name, in this process
_log = structlog.get_logger()


class ConnectorFailed(Exception):
    """A call of a connector; one line that names it."""


def maker_of(name: str) -> MakeConnector:
    """What the plug-in of this name makes a connector with. ProcessFatal."""
    try:
        plugins.load(plugins.KV_CONNECTORS, os.environ, _makers.__setitem__, only=name)
    except plugins.PluginError as error:
        raise ProcessFatal(str(error)) from None
    if name not in _makers:
        raise ProcessFatal(f"--kv-transfer-config: no installed package has a connector {name}")
    return _makers[name]


class ConnectorCalls:
    """Makes a connector, and calls its methods in one thread. Where its pages come to mean something else it is made anew."""

    def __init__(self, name: str, make: Callable[[], Connector], limit_s: float = LIMIT_S) -> None:
        """ConnectorFailed."""
        self.name, self._make, self._limit_s = name, make, limit_s
        self._calls: queue.SimpleQueue[tuple[Callable[[Connector], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._made: Connector | None = None  # the thread's
        self._last: Future[Any] | None = None
        threading.Thread(target=self._work, name=f"connector {name}", daemon=True).start()
        self.call(lambda connector: None)

    def call(self, method: Callable[[Connector], T], limit_s: float | None = None) -> T:
        """What the method gives. ConnectorFailed."""
        if self._last is not None and not self._last.done():
            raise ConnectorFailed(f"connector {self.name}: an earlier call has not returned")
        self._last = future = Future[T]()
        self._calls.put((method, future))
        limit_s = self._limit_s if limit_s is None else min(limit_s, self._limit_s)
        try:
            return future.result(max(0.0, limit_s))
        except TimeoutError:
            if future.done():  # it raised that itself
                raise ConnectorFailed(f"connector {self.name}: TimeoutError") from None
            raise ConnectorFailed(f"connector {self.name}: a call has not returned within {limit_s:.3g} s") from None
        except (Exception, SystemExit) as error:  # a plug-in may raise anything, and the user must read whose it is
            text = next(iter(str(error).splitlines()), "")
            raise ConnectorFailed(f"connector {self.name}: {type(error).__name__}: {text}") from None

    def remake(self) -> None:
        """The next call is the first of a new connector."""
        self._calls.put((lambda connector: self._close(), Future()))

    def close(self) -> None:
        self._calls.put((lambda connector: self._close(), Future()))
        self._calls.put(None)

    def _close(self) -> None:
        made, self._made = self._made, None
        assert made is not None
        made.close()

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            method, future = item
            try:
                if self._made is None:
                    self._made = self._make()
                future.set_result(method(self._made))
            except BaseException as error:  # who waits for it raises it
                future.set_exception(error)


class _Move(NamedTuple):
    """A MovePages and its columns."""

    message: MovePages
    pages: list[int]
    keys: list[bytes]  # of each page
    after: object  # the mark of the steps before it

    def batches(self, page_bytes: int) -> Iterator[range]:
        """Runs of its pages that one call moves: the pages of a key stay together."""
        begin, most = 0, max(1, BATCH_BYTES // page_bytes)
        for at in range(1, len(self.pages)):
            if at - begin >= most and self.keys[at] != self.keys[at - 1]:
                yield range(begin, at)
                begin = at
        if self.pages:
            yield range(begin, len(self.pages))


class ConnectorThread:
    """Answers the messages that name one connector. `say` sends an answer, from any thread."""

    def __init__(
        self,
        calls: ConnectorCalls,
        mover: Mover,
        page_bytes: int,
        say: Callable[[Struct], None],
        end: Callable[[Any, Mapping[str, Any]], None] | None = None,
    ) -> None:
        """end: called with the connector and a load's params behind its last page."""
        self._calls, self._mover, self._page_bytes, self._say, self._end = calls, mover, page_bytes, say, end
        self._messages: queue.SimpleQueue[tuple[FindPages | MovePages | None, object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"messages of {calls.name}", daemon=True).start()

    def submit(self, message: FindPages | MovePages, after: object = None) -> None:
        """From any thread. after: the mark of the steps before it."""
        self._messages.put((message, after))

    def remake(self) -> None:
        """The pages' bytes mean something else from now on."""
        self._messages.put((None, None))

    def close(self) -> None:
        self._messages.put(None)
        self._calls.close()

    def _work(self) -> None:
        while (item := self._messages.get()) is not None:
            message, after = item
            if message is None:  # behind what was saved before
                self._calls.remake()
                continue
            if message.session != self._mover.session:
                continue  # nobody waits for it
            if isinstance(message, FindPages):
                self._say(self._found(message))
            else:
                self._say(moved := self._moved(_Move(message, ints(message.pages), _split(message.keys), after)))
                if message.is_load and not moved.failed:
                    self._end_of(message)

    def _found(self, find: FindPages) -> PagesFound:
        """A connector that fails has none of the keys."""
        keys, found = _split(find.keys), list[bool]()
        try:
            found = self._calls.call(lambda connector: list(connector.find(keys, _params(find.params))))
            self._check_length("find", len(found), len(keys))
        except ConnectorFailed as error:
            _log.warning("a connector finds nothing", reason=str(error))
            found = []
        pages = b""
        if any(found):
            there = (
                0 if each else NOT_HERE for each, width in zip(found, find.widths, strict=True) for _ in range(width)
            )
            pages = pack_i32(there)
        return PagesFound(find.number, pages, session=find.session)

    def _moved(self, move: _Move) -> PagesMoved:
        begin_ns, failed, message = time.monotonic_ns(), list[int](), ""
        if len(move.keys) != len(move.pages):
            failed, message = list(range(len(move.pages))), f"{len(move.keys)} keys of {len(move.pages)} pages"
        else:
            for batch in move.batches(self._page_bytes):
                try:
                    wrong, text = self._load(move, batch) if move.message.is_load else self._save(move, batch)
                except ConnectorFailed as error:
                    wrong, text = list(batch), str(error)
                failed, message = failed + wrong, message or text
        num_bytes = (len(move.pages) - len(failed)) * self._page_bytes
        duration_ns = time.monotonic_ns() - begin_ns
        of = move.message
        return PagesMoved(of.session, of.number, pack_i32(failed), num_bytes, duration_ns, message)

    def _end_of(self, move: MovePages) -> None:
        """Whoever kept the pages for this load need not any more; a lease ends it in any case."""
        end = self._end
        if end is not None:
            try:
                self._calls.call(lambda connector: end(connector, _params(move.params)))
            except ConnectorFailed as error:
                _log.warning("what was loaded is kept by its lease", reason=str(error))

    def _load(self, move: _Move, batch: range) -> tuple[list[int], str]:
        """The places that failed, and why the first did. ConnectorFailed: all did."""
        keys, buffers = move.keys[batch.start : batch.stop], self._buffers(batch)

        def load(connector: Connector) -> list[bool]:
            return [bool(filled) for filled in connector.load(keys, list(buffers), _params(move.message.params))]

        filled = self._calls.call(load, self._limit_s(move))
        self._check_length("load", len(filled), len(keys))
        lines = [line for line, is_filled in enumerate(filled) if is_filled]
        copied = self._copied(move, batch, lines, buffers)
        there = set(lines[: copied.num_pages])
        message = copied.message or f"connector {self._calls.name}: {len(filled) - len(lines)} pages are not there"
        failed = [batch.start + line for line in range(len(keys)) if line not in there]
        return failed, message if failed else ""

    def _save(self, move: _Move, batch: range) -> tuple[list[int], str]:
        """As `_load`."""
        buffers, lines = self._buffers(batch), list(range(len(batch)))
        copied = self._copied(move, batch, lines, buffers)
        count = copied.num_pages
        keys, pages = move.keys[batch.start : batch.start + count], list(buffers[:count])
        if count:
            self._calls.call(lambda connector: connector.save(keys, pages), self._limit_s(move))
        return list(batch[count:]), copied.message

    def _copied(self, move: _Move, batch: range, lines: list[int], buffers: Column) -> Copied:
        """What the mover has made of it."""
        done, of = Future[Copied](), move.message
        pages = [move.pages[batch.start + line] for line in lines]
        copy = Copy(of.session, of.is_load, pages, lines, [buffers], move.after, of.deadline_ns, done.set_result)
        self._mover.submit(copy)
        return done.result()

    def _buffers(self, batch: range) -> Column:
        """uint8 [pages, page_bytes]."""
        return np.empty((len(batch), self._page_bytes), np.uint8)

    def _limit_s(self, move: _Move) -> float:
        deadline_ns = move.message.deadline_ns
        return (deadline_ns - time.monotonic_ns()) / 1e9 if deadline_ns else LIMIT_S

    def _check_length(self, method: str, count: int, expected: int) -> None:
        """ConnectorFailed."""
        if count != expected:
            raise ConnectorFailed(
                f"connector {self._calls.name}: {method} answers {count} times, and {expected} were asked"
            )


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def _params(params: bytes) -> Mapping[str, Any]:
    return msgspec.json.decode(params, type=dict[str, Any]) if params else {}
