"""Open questions to detokenizers (tokenize and detokenize): who was asked, and who waits for the answer. Owned by mesh_client.py."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from meshlm.protocol.edges.text import Detokenize, DetokenizeReply, Tokenize, TokenizeReply
from meshlm.protocol.wire.ids import ErrorKind, Handle, Identity, Role
from meshlm.runtime.errors import RequestError
from meshlm.runtime.process.deaths import MAX_DEATHS, Death, one_more, poison, too_many
from meshlm.runtime.process.in_hand import question_name

Reply = TokenizeReply | DetokenizeReply


@dataclass(eq=False)
class Question:
    """One question, and the detokenizer that has it."""

    message: Tokenize | Detokenize
    answer: "asyncio.Future[Reply]"
    detokenizer: Identity | None = None
    deaths: tuple[Death, ...] = ()  # of detokenizers that had it
    num_in_hand: int = 0  # of those, deaths in which it was in hand

    def refuse(self, kind: ErrorKind, message: str, param: str = "") -> None:
        """Whoever waits gets a RequestError."""
        if not self.answer.done():
            self.answer.set_exception(RequestError(kind, message, param))


class Questions:
    asker = Identity(Role.FRONTEND)
    max_deaths = MAX_DEATHS  # of its detokenizers, after which a question is given up

    def __init__(self) -> None:
        self._open: dict[Handle, Question] = {}

    def open(self, message: Tokenize | Detokenize) -> Question:
        question = Question(message, asyncio.get_running_loop().create_future())
        self._open[message.handle] = question
        return question

    def close(self, question: Question) -> None:
        del self._open[question.message.handle]

    def unplaced(self) -> list[Question]:
        """Those that no detokenizer has."""
        return [one for one in self._open.values() if one.detokenizer is None and not one.answer.done()]

    def answered(self, reply: Reply) -> None:
        """A reply that nobody waits for any more is left alone."""
        question = self._open.get(reply.handle)
        if question is not None and not question.answer.done():
            question.answer.set_result(reply)

    def detokenizer_down(self, peer: Identity, now: float, in_hand: Collection[str] = ()) -> None:
        """Those that it had are `unplaced` now, or given up. `in_hand`: what it worked on when it died."""
        for handle, question in self._open.items():
            if question.detokenizer != peer or question.answer.done():
                continue
            question.detokenizer = None
            question.deaths = one_more(question.deaths, Role.DETOKENIZER, now)
            question.num_in_hand += question_name(self.asker, handle) in in_hand
            if text := poison(Role.DETOKENIZER, question.num_in_hand):
                question.refuse(ErrorKind.POISON, text)
            elif text := too_many(question.deaths, self.max_deaths):
                question.refuse(ErrorKind.INTERNAL, text)

    def fail(self, reason: str) -> None:
        """Everybody who waits gets an error of their own with this reason."""
        for question in self._open.values():
            question.refuse(ErrorKind.OVERLOADED, reason)
