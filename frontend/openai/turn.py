"""One turn of an assistant, for endpoints whose answers are a list of things said: reasoning, text, tool calls. Pure.

generation.py makes it where it makes a chat's answer; what the things look like is the `TurnFormat`'s: messages/format.py,
responses_api/format.py.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import msgspec

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.reading import Reader, Said
from meshlm.frontend.openai.responses import AnswerHead, StreamedAnswer, WholeAnswer
from meshlm.protocol.edges.text import Finished, PositionLogprobs
from meshlm.protocol.wire.ids import FinishReason
from meshlm.runtime.client.placement import NO_DETAILS, Choice, RowDetails

Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode


class TurnFormat(ABC):
    """An endpoint's form of a turn, made of what the model says in its order. Events that are to be sent are taken from `events` after
    each row; the last ones, `last_events`, go out once the answer is stored where it is to be. The form knows what it has open: an
    item of text, of reasoning, or a call. What a form does not tell, it leaves out."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.last_events = b""
        self._kind = ""  # of the open item
        self._texts: list[str] = []  # of the open item
        self._call = -1  # index of the open call

    def begin(self, turn: "TurnResponse") -> None:  # noqa: B027
        """The first row is here."""

    def reasoning(self, text: str) -> None:  # noqa: B027
        """More of the reasoning."""

    def text(self, text: str) -> None:  # noqa: B027
        """More of the answer's text."""

    def logprobs(self, positions: list[PositionLogprobs]) -> None:  # noqa: B027
        """Log-probabilities of the tokens of the text that follows."""

    def call(self, call: Json) -> None:  # noqa: B027
        """A tool call in the form of OpenAI's deltas: one with a new index begins it, more of the same index has more arguments."""

    def is_new(self, call: Json, kind: str) -> bool:
        """Whether this begins a call: none of that index is open as an item of that kind."""
        begins = self._kind != kind or call["index"] != self._call
        self._call = call["index"]
        return begins

    def end(self, turn: "TurnResponse", finished: Finished) -> None:  # noqa: B027
        """No more follows."""

    def failed(self, turn: "TurnResponse", error: HttpError) -> bytes:
        """The events of a stream that cannot go on."""
        return b""

    @abstractmethod
    def body(self, turn: "TurnResponse") -> bytes:
        """The JSON answer."""


def event_of(kind: str, fields: Json) -> bytes:
    """A server-sent event with its name and its data, which has the name too."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


class Blocks:
    """Hands what was said to a format, without white space that stands alone: between reasoning and a call, say, where a client that
    sends the turn back would be refused an empty text. An answer that is nothing else keeps it."""

    def __init__(self, form: TurnFormat) -> None:
        self._form, self._space = form, ""
        self._in_text = self._has_said = False

    def said(self, said: Said) -> None:
        if said.reasoning:
            self._in_text = False
            self._form.reasoning(said.reasoning)
        calls = list(said.calls)
        if calls and "id" not in calls[0]:  # the end of a call stands before the text that came with it
            self._form.call(calls.pop(0))
        if said.content:
            self._text(said.content)
        for call in calls:
            self._in_text, self._has_said, self._space = False, True, ""
            self._form.call(call)

    def _text(self, text: str) -> None:
        if not self._in_text:
            self._space += text
            if not self._space.strip():
                return
            text, self._space = self._space, ""
            self._in_text = self._has_said = True
        self._form.text(text)

    def finish(self) -> None:
        """No more follows."""
        if self._space and not self._has_said:
            self._form.text(self._space)


class TurnResponse(WholeAnswer, StreamedAnswer):
    """The answer to one request for one turn, streamed or whole."""

    def __init__(self, head: AnswerHead, write: Callable[[bytes], None] | None, form: TurnFormat) -> None:
        super().__init__(head)
        self._form, self._write = form, write
        self._blocks = Blocks(form)
        self._reader: Reader | None = None
        self.raw: list[str] = []  # the text of all tokens, where it is to be shown
        self.num_reasoning_tokens = 0  # of the output, up to the last that brought reasoning

    def row(self, choice: Choice, num_tokens: int, text: str, details: RowDetails | None) -> None:
        details = details or NO_DETAILS
        finished = details.finished
        if self.is_refused:
            return
        self.note(choice, details)
        if finished is not None and finished.reason is FinishReason.ERROR:
            self.ended()
            return
        if self._reader is None:
            self._reader = Reader(self.parsed_request, self.request_id, choice.index)
            self._form.begin(self)
        if details.logprobs and not self.options.hides_tokens:
            self._form.logprobs(details.logprobs)
        if self.options.return_prompt_text:
            self.raw.append(text)
        said = self._reader.push(text, last=finished is not None)
        if said.reasoning:
            self.num_reasoning_tokens = len(choice.token_ids)
        self._blocks.said(said)
        if finished is not None:
            self._blocks.finish()
            self._form.end(self, finished)
        self._send()
        if finished is not None:
            self.ended()

    def _send(self) -> None:
        """Sends all that a row brought in one piece."""
        events = self._form.events
        if self._write is not None and events:
            self._write(b"".join(events))
        events.clear()

    @staticmethod
    def now() -> int:
        return int(time.time())

    def num_output_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    def body(self) -> bytes:
        return self._form.body(self)

    def last_events(self) -> bytes:
        """The events that a stream ends with: those that the format kept for it, or the error."""
        return self._form.last_events if self.error is None else self._form.failed(self, self.error)
