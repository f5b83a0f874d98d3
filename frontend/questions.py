"""Open questions to detokenizers (/tokenize and /detokenize): who was asked, and who waits for the answer. Owned by io.py."""

import asyncio
import contextlib
from collections.abc import Iterator

from meshlm.protocol.ids import Handle, Identity
from meshlm.protocol.text_edge import DetokenizeReply, TokenizeReply

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

    def answered(self, reply: TokenizeReply | DetokenizeReply) -> None:
        """A reply that nobody waits for any more is left alone."""
        found = self._open.get(reply.handle)
        if found is not None and not found[1].done():
            found[1].set_result(reply)

    def detokenizer_lost(self, peer: Identity) -> None:
        for detokenizer, future in self._open.values():
            if detokenizer == peer and not future.done():
                future.set_result(None)

    def fail(self, error: Exception) -> None:
        """Everybody who waits gets this error."""
        for _, future in self._open.values():
            if not future.done():
                future.set_exception(error)
