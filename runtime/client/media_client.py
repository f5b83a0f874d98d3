"""A client's questions to the media process: asked again where that dies, twice at most. Frontends and the Python API have one each."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from meshlm.protocol.edges.media import CancelMedia, MediaRead, MediaSource, ReadMedia
from meshlm.protocol.media import MediaItem
from meshlm.protocol.wire.ids import ErrorKind, Handle, Identity, Role
from meshlm.runtime.errors import LinkDown, LinkFull, MessageTooLong, RequestError

MEDIA = Identity(Role.MEDIA)
HOLD_S = 60.0  # that a question waits for a new media process
MAX_DEATHS = 2  # of it, with the question in its hands
POISON = "the process that reads media ended twice with this request in its hands; it is not to be sent again"
GONE = "the process that reads media is not there; try again"


@dataclass(eq=False)
class Question:
    message: ReadMedia
    answer: "asyncio.Future[MediaRead]"
    is_sent: bool = False
    num_deaths: int = 0

    def refuse(self, kind: ErrorKind, message: str, param: str = "") -> None:
        """Whoever waits gets a RequestError."""
        if not self.answer.done():
            self.answer.set_exception(RequestError(kind, message, param))


class MediaClient:
    """`send` is the mesh's."""

    def __init__(self) -> None:
        self.send: Callable[[Identity, Struct], None] | None = None
        self._open: dict[Handle, Question] = {}
        self._next = 0

    async def read(self, sources: Sequence[MediaSource]) -> tuple[MediaItem, ...]:
        """The items of these sources. RequestError."""
        self._next += 1
        message = ReadMedia(Handle(self._next), tuple(sources))
        question = self._open[message.handle] = Question(message, asyncio.get_running_loop().create_future())
        try:
            self._ask(question)
            found = await question.answer
        finally:
            del self._open[message.handle]
            if question.is_sent and (not question.answer.done() or question.answer.cancelled()):
                self._cancel(message.handle)
        if found.error:
            raise RequestError(found.kind, found.error, found.param)
        return found.items

    def _ask(self, question: Question) -> None:
        assert self.send is not None
        try:
            self.send(MEDIA, question.message)
            question.is_sent = True
        except LinkDown:
            self._hold(question)
        except LinkFull:
            question.refuse(ErrorKind.OVERLOADED, "too many images, videos and sounds wait to be read; try again")
        except MessageTooLong as error:
            question.refuse(ErrorKind.INVALID, str(error), "messages")

    def _hold(self, question: Question) -> None:
        """It waits for a media process, for a while."""
        question.is_sent, before = False, question.num_deaths

        def give_up() -> None:
            if not question.is_sent and question.num_deaths == before:
                question.refuse(ErrorKind.OVERLOADED, GONE)

        asyncio.get_running_loop().call_later(HOLD_S, give_up)

    def _cancel(self, handle: Handle) -> None:
        assert self.send is not None
        with contextlib.suppress(LinkDown, LinkFull):
            self.send(MEDIA, CancelMedia(handle))

    def answered(self, reply: MediaRead) -> None:
        """An answer that nobody waits for any more is left alone."""
        question = self._open.get(reply.handle)
        if question is not None and not question.answer.done():
            question.answer.set_result(reply)

    def up(self) -> None:
        for question in self._open.values():
            if not question.is_sent and not question.answer.done():
                self._ask(question)

    def down(self) -> None:
        for question in self._open.values():
            if question.is_sent and not question.answer.done():
                question.num_deaths += 1
                self._hold(question)
                if question.num_deaths >= MAX_DEATHS:
                    question.refuse(ErrorKind.POISON, POISON, "messages")
