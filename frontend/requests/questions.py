"""Open questions to detokenizers (/tokenize and /detokenize): who was asked, and who waits for the answer. Owned by io.py."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator

from msgspec import Struct

from meshlm.frontend.http.errors import HttpError
from meshlm.protocol.edges.text import Cancel, Detokenize, DetokenizeReply, Tokenize, TokenizeReply
from meshlm.protocol.wire.ids import ErrorKind, Handle, Identity, Role
from meshlm.runtime.errors import LinkDown, LinkFull, MessageTooLong
from meshlm.runtime.process.deaths import poison
from meshlm.runtime.process.in_hand import question_name

FULL = "the queue is full; try again"
Answer = asyncio.Future[TokenizeReply | DetokenizeReply | None]


class Questions:
    """See the module docstring."""

    asker = Identity(Role.FRONTEND)

    def __init__(self) -> None:
        self._open: dict[Handle, tuple[Identity, Answer]] = {}
        self._blamed: Counter[Handle] = Counter()  # deaths of detokenizers that had one in hand

    @contextlib.contextmanager
    def asked(self, detokenizer: Identity, handle: Handle) -> Iterator[Answer]:
        """The answer to a question that this detokenizer is asked; None when it died before."""
        future: Answer = asyncio.get_running_loop().create_future()
        self._open[handle] = (detokenizer, future)
        try:
            yield future
        finally:
            del self._open[handle]

    async def ask_any(
        self,
        message: Tokenize | Detokenize,
        target: Callable[[], Awaitable[Identity]],
        send: Callable[[Identity, Struct], None],
        most: int,
    ) -> TokenizeReply | DetokenizeReply:
        """Asks one detokenizer after the other, which all know the same, until one lives to answer; `most` deaths are too many."""
        try:
            for _ in range(most):
                if (reply := await self.ask(await target(), message, send)) is not None:
                    return reply
                if text := poison(Role.DETOKENIZER, self._blamed[message.handle]):
                    raise HttpError.of(ErrorKind.POISON, text)
        finally:
            self._blamed.pop(message.handle, None)
        raise HttpError.of(ErrorKind.INTERNAL, f"given up: its detokenizer died {most} times before it answered")

    async def ask(
        self, target: Identity, message: Tokenize | Detokenize, send: Callable[[Identity, Struct], None]
    ) -> TokenizeReply | DetokenizeReply | None:
        """Asks one detokenizer; gives None when it died before it answered, and tells it when nobody waits any more."""
        with self.asked(target, message.handle) as answer:
            try:
                send(target, message)
                return await answer
            except (LinkDown, LinkFull):
                raise HttpError.of(ErrorKind.OVERLOADED, FULL) from None
            except MessageTooLong as error:
                raise HttpError(400, str(error), "tokens" if isinstance(message, Detokenize) else "prompt") from None
            finally:
                if not answer.done() or answer.cancelled():
                    with contextlib.suppress(LinkDown, LinkFull, MessageTooLong):
                        send(target, Cancel(message.handle))

    def answered(self, reply: TokenizeReply | DetokenizeReply) -> None:
        """A reply that nobody waits for any more is left alone."""
        found = self._open.get(reply.handle)
        if found is not None and not found[1].done():
            found[1].set_result(reply)

    def detokenizer_lost(self, peer: Identity, in_hand: Collection[str] = ()) -> None:
        for handle, (detokenizer, future) in self._open.items():
            if detokenizer == peer and not future.done():
                self._blamed[handle] += question_name(self.asker, handle) in in_hand
                future.set_result(None)

    def fail(self, reason: str) -> None:
        """Everybody who waits gets an error of their own with this reason."""
        for _, future in self._open.values():
            if not future.done():
                future.set_exception(HttpError.of(ErrorKind.OVERLOADED, reason))
