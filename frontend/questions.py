"""Open questions to detokenizers (/tokenize and /detokenize): who was asked, and who waits for the answer. Owned by io.py."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from msgspec import Struct

from meshlm.frontend.errors import HttpError
from meshlm.protocol.ids import ErrorKind, Handle, Identity
from meshlm.protocol.text_edge import Cancel, Detokenize, DetokenizeReply, Tokenize, TokenizeReply
from meshlm.runtime.errors import LinkDown, LinkFull, MessageTooLong

FULL = "the queue is full; try again"
Answer = asyncio.Future[TokenizeReply | DetokenizeReply | None]


class Questions:
    """See the module docstring."""

    def __init__(self) -> None:
        self._open: dict[Handle, tuple[Identity, Answer]] = {}

    @contextlib.contextmanager
    def asked(self, detokenizer: Identity, handle: Handle) -> Iterator[Answer]:
        """The answer to a question that this detokenizer is asked; None when it died before."""
        future: Answer = asyncio.get_running_loop().create_future()
        self._open[handle] = (detokenizer, future)
        try:
            yield future
        finally:
            del self._open[handle]

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

    def detokenizer_lost(self, peer: Identity) -> None:
        for detokenizer, future in self._open.values():
            if detokenizer == peer and not future.done():
                future.set_result(None)

    def fail(self, reason: str) -> None:
        """Everybody who waits gets an error of their own with this reason."""
        for _, future in self._open.values():
            if not future.done():
                future.set_exception(HttpError.of(ErrorKind.OVERLOADED, reason))
