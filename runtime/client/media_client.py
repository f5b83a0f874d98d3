"""A client's questions to the media process: asked again where that dies, twice at most. Frontends and the Python API have one each.

What an answer brings is held (`Held`) until the request that needs it is over: the media process keeps the files so long, and is told
every RENEW_S seconds what is held here.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from meshlm.protocol.edges.media import LEASE_S, RENEW_S, Hold, MediaRead, MediaSource, ReadMedia, ReleaseMedia
from meshlm.protocol.media import MediaItem
from meshlm.protocol.wire.ids import ErrorKind, Handle, Identity, Role
from meshlm.runtime.errors import LinkDown, LinkFull, MessageTooLong, RequestError
from meshlm.runtime.mesh.media_holds import hold_messages

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


@dataclass(eq=False)
class Held:
    """The items of a request, whose files stay until it lets go of them: as often as it has users."""

    items: tuple[MediaItem, ...]
    handle: Handle
    let_go: Callable[[Handle], None]
    num_users: int = 1

    def release(self) -> None:
        self.num_users -= 1
        if not self.num_users:
            self.let_go(self.handle)

    def leave(self) -> None:
        """Its client has left, and the request runs on: a detokenizer holds the files before this lease ends."""
        asyncio.get_running_loop().call_later(LEASE_S, self.release)


class MediaClient:
    """`send` is the mesh's."""

    def __init__(self) -> None:
        self.send: Callable[[Identity, Struct], None] | None = None
        self._open: dict[Handle, Question] = {}
        self._held: dict[Handle, tuple[bytes, ...]] = {}  # digests
        self._next = 0
        self._renewal: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing is held or asked, and nothing will be said."""
        return not self._held and not self._open and self._renewal is None

    async def read(self, sources: Sequence[MediaSource]) -> Held:
        """The items of these sources, which are held from now on. RequestError."""
        self._next += 1
        message = ReadMedia(Handle(self._next), tuple(sources))
        question = self._open[message.handle] = Question(message, asyncio.get_running_loop().create_future())
        if self._renewal is None:
            self._renewal = asyncio.get_running_loop().call_later(RENEW_S, self._renew)
        found: MediaRead | None = None
        try:
            self._ask(question)
            found = await question.answer
        finally:
            del self._open[message.handle]
            if question.is_sent and found is None:
                self._release(message.handle)
        if found.error:
            raise RequestError(found.kind, found.error, found.param)
        self._held[message.handle] = tuple(item.digest for item in found.items)
        return Held(found.items, message.handle, self._let_go)

    def _let_go(self, handle: Handle) -> None:
        del self._held[handle]
        self._release(handle)

    def _renew(self) -> None:
        """Says what is held, for as long as something is or may soon be."""
        goes_on = self._held or self._open
        self._renewal = asyncio.get_running_loop().call_later(RENEW_S, self._renew) if goes_on else None
        self._say_held()

    def _say_held(self) -> None:
        """A question that is not answered here may be answered there: what it brings is held."""
        assert self.send is not None
        holds = [Hold(handle) for handle in self._open] + [Hold(*one) for one in self._held.items()]
        with contextlib.suppress(LinkDown, LinkFull):
            for message in hold_messages(holds, self._next):
                self.send(MEDIA, message)

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

    def _release(self, handle: Handle) -> None:
        """Where that does not reach the media process, the next renewal says it."""
        assert self.send is not None
        with contextlib.suppress(LinkDown, LinkFull):
            self.send(MEDIA, ReleaseMedia(handle))

    def answered(self, reply: MediaRead) -> None:
        """An answer that nobody waits for any more is left alone."""
        question = self._open.get(reply.handle)
        if question is not None and not question.answer.done():
            question.answer.set_result(reply)

    def up(self) -> None:
        """It is there, perhaps a new one: it is told what is held before it is asked anything."""
        if self._held:
            self._say_held()
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
