"""The client's links to detokenizers: sends what the tracker says, hands it what comes back, and asks questions.

Owned by a frontend's io.py and by the Python API, which stands in a frontend's place. It starts and ends no process.
"""

import asyncio
import contextlib
import time

from msgspec import Struct

from meshlm.protocol.edges import text as edge
from meshlm.protocol.wire.ids import ErrorKind, Handle, Identity, Incarnation
from meshlm.runtime.client.placement import Choice
from meshlm.runtime.client.questions import Question, Questions, Reply
from meshlm.runtime.client.request_tracker import RequestTracker
from meshlm.runtime.errors import LinkDown, LinkFull, MessageTooLong
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.process.events import Send
from meshlm.runtime.process.readable import about

FULL = "the queue is full; try again"
HOLD_S = 10.0  # how long a question waits for a detokenizer: the only one may be the one that died
RETRY_S = 0.1  # between two looks of a patient client whether there is room


class MeshClient:
    """All requests and questions of one process. A `patient` one waits where another is refused for want of room."""

    def __init__(self, *, patient: bool = False) -> None:
        self.mesh: Mesh | None = None
        self.tracker = RequestTracker(patient=patient)
        self.questions = Questions()
        self._patient = patient
        self._places_later = self._retries_later = False

    def set_max_deaths(self, most: int) -> None:
        """After so many deaths of its detokenizers a request is given up."""
        self.tracker.max_deaths = self.questions.max_deaths = most

    def new_handle(self) -> Handle:
        return self.tracker.new_handle()

    # --- requests ---

    def open(self, choices: list[Choice], submit: edge.Submit) -> None:
        now = time.monotonic()
        for choice in choices:
            choice.opened_at = now
        self.send(self.tracker.open(choices, submit))

    def close(self, choices: list[Choice]) -> None:
        self.send(self.tracker.close(choices))

    def tick(self) -> None:
        """Ends what is past its deadline, and what has waited too long for a detokenizer."""
        self.send(self.tracker.expire(time.time()))
        self.tracker.expire_orphans(time.monotonic())

    def stop(self, reason: str) -> None:
        """Whoever still waits hears why this process stops."""
        self.send(self.tracker.end_all(reason))
        self.questions.fail(reason)

    def send(self, sends: list[Send]) -> None:
        assert self.mesh is not None
        if self.tracker.placement.places_more and not self._places_later:
            self._places_later = True  # in another turn of the loop
            self.mesh.call_soon_threadsafe(self._place)
        for send in sends:
            try:
                self.mesh.send(send.to, send.message)
            except LinkDown:
                # Its down-event follows and the choices go elsewhere.
                self.mesh.log.debug("not delivered", to=str(send.to), **about(send.message))
            except LinkFull:
                self._link_full(send)
            except MessageTooLong as error:
                if isinstance(send.message, edge.Submit):
                    kind = ErrorKind.INTERNAL if send.message.attempt else ErrorKind.INVALID
                    self.send(self.tracker.rejected(edge.Rejected(send.message.handles, kind, str(error), "prompt")))
        if self._patient and self.tracker.orphans:
            self._retry_later()

    def _link_full(self, send: Send) -> None:
        assert self.mesh is not None
        if isinstance(send.message, edge.Submit) and self._patient:
            self.tracker.not_sent(send.message.handles)
            return
        self.mesh.log.warning("queue full", to=str(send.to), **about(send.message))
        if isinstance(send.message, edge.Submit):
            self.send(self.tracker.rejected(edge.Rejected(send.message.handles, ErrorKind.OVERLOADED, FULL)))

    def _place(self) -> None:
        self._places_later = False
        self.send(self.tracker.place())

    def _retry_later(self) -> None:
        if not self._retries_later and self.mesh is not None:
            self._retries_later = True
            self.mesh.call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._retries_later = False
        self._ask_unplaced()
        self.send(self.tracker.retry_now())

    # --- questions ---

    async def ask(self, message: edge.Tokenize | edge.Detokenize) -> Reply:
        """Asks one detokenizer after the other, which all know the same, until one lives to answer. RequestError."""
        question = self.questions.open(message)
        try:
            self._ask(question)
            return await question.answer
        finally:
            self.questions.close(question)
            left = not question.answer.done() or question.answer.cancelled()
            if left and question.detokenizer is not None and self.mesh is not None:
                with contextlib.suppress(LinkDown, LinkFull, MessageTooLong):
                    self.mesh.send(question.detokenizer, edge.Cancel(message.handle))

    def _ask(self, question: Question) -> None:
        assert self.mesh is not None
        question.detokenizer = target = self.tracker.placement.least_loaded()
        if target is None:
            self._wait_for_detokenizer(question)
            return
        try:
            self.mesh.send(target, question.message)
        except (LinkDown, LinkFull):
            question.detokenizer = None
            if self._patient:
                self._retry_later()
            else:
                question.refuse(ErrorKind.OVERLOADED, FULL)
        except MessageTooLong as error:
            param = "tokens" if isinstance(question.message, edge.Detokenize) else "prompt"
            question.refuse(ErrorKind.INVALID, str(error), param)

    def _wait_for_detokenizer(self, question: Question) -> None:
        if self._patient:
            return
        num_deaths = len(question.deaths)

        def give_up() -> None:
            if question.detokenizer is None and len(question.deaths) == num_deaths:
                question.refuse(ErrorKind.OVERLOADED, "no detokenizer is ready")

        asyncio.get_running_loop().call_later(HOLD_S, give_up)

    def _ask_unplaced(self) -> None:
        for question in self.questions.unplaced():
            self._ask(question)

    # --- what comes ---

    def on_message(self, peer: Identity, message: Struct, now: float) -> None:
        match message:
            case edge.TextDeltas():
                self.send(self.tracker.deltas(message, peer, now))
            case edge.Accepted():
                self.tracker.accepted(message, now)
            case edge.Rejected():
                self.send(self.tracker.rejected(message))
            case edge.TokenizeReply() | edge.DetokenizeReply():
                self.questions.answered(message)

    def detokenizer_up(self, peer: Identity) -> None:
        sends = self.tracker.detokenizer_up(peer)
        if self.mesh is not None:  # before the start there is nothing to send
            self.send(sends)
            self._ask_unplaced()

    def detokenizer_down(self, peer: Identity, incarnation: Incarnation) -> None:
        now = time.monotonic()
        in_hand = self.mesh.in_hand_of(peer, incarnation) if self.mesh is not None else ()
        sends = self.tracker.detokenizer_down(peer, now, in_hand)
        self.questions.detokenizer_down(peer, now, in_hand)
        if self.mesh is not None:
            self.send(sends)
            self._ask_unplaced()
