"""A turn as Ollama's answers: lines of JSON, the last with `done` and the figures. Pure; see turn.py."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.response_fields import chat_logprobs
from meshlm.frontend.openai.turn import TurnFormat, TurnResponse
from meshlm.protocol.edges.text import Finished, PositionLogprobs
from meshlm.protocol.wire.ids import FinishReason

Json = dict[str, Any]
LINES = "application/x-ndjson"
_encode = msgspec.json.Encoder().encode


def timestamp(seconds: float) -> str:
    """The time as Go writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class LineFormat(TurnFormat):
    """`is_chat`: an answer has a message, else `response`. `streams`: each piece is a line; the end is one either way."""

    def __init__(self, is_chat: bool, streams: bool) -> None:
        super().__init__()
        self._is_chat, self._streams = is_chat, streams
        self._frame: Json = {}
        self._thinking: list[str] = []
        self._calls: list[Json] = []  # the last one may be open
        self._arguments: list[str] = []  # of the open one
        self._logprobs: list[Json] = []
        self._end: Json = {}

    def begin(self, turn: TurnResponse) -> None:
        self._frame = {"model": turn.model, "created_at": timestamp(turn.created)}

    def reasoning(self, text: str) -> None:
        self._thinking.append(text)
        self._line("", thinking=text)

    def text(self, text: str) -> None:
        self._texts.append(text)
        self._line(text)

    def logprobs(self, positions: list[PositionLogprobs]) -> None:
        self._logprobs += chat_logprobs(positions, has_sampled=False)["content"]

    def call(self, call: Json) -> None:
        if call["index"] != self._call:
            self._close_call()
            self._call = call["index"]
            self._calls.append({"id": call["id"], "function": {"name": call["function"]["name"]}})
        self._arguments.append(call["function"].get("arguments") or "")

    def end(self, turn: TurnResponse, finished: Finished) -> None:
        self._close_call()
        reason = "length" if finished.reason is FinishReason.LENGTH else "stop"
        self._end = {"done": True, "done_reason": reason, **_figures(turn)}
        if self._streams:
            end = {**self._frame, **self._piece(""), **self._end}
            self.last_events = _encode(end | self._taken_logprobs()) + b"\n"

    def failed(self, turn: TurnResponse, error: HttpError) -> bytes:
        return _encode({"error": error.message}) + b"\n"

    def body(self, turn: TurnResponse) -> bytes:
        said = self._piece("".join(self._texts), "".join(self._thinking), self._calls)
        return _encode({**self._frame, **said, **self._end, **self._taken_logprobs()})

    def _close_call(self) -> None:
        """The open call is whole: clients of Ollama get it in one piece."""
        if self._call < 0 or "arguments" in self._calls[-1]["function"]:
            return
        self._calls[-1]["function"] |= {"arguments": arguments_of("".join(self._arguments)), "index": self._call}
        self._arguments.clear()
        self._line("", calls=self._calls[-1:])

    def _line(self, text: str, thinking: str = "", calls: list[Json] | None = None) -> None:
        if self._streams:
            line = {**self._frame, **self._piece(text, thinking, calls), "done": False}
            self.events.append(_encode(line | self._taken_logprobs()) + b"\n")

    def _piece(self, text: str, thinking: str = "", calls: list[Json] | None = None) -> Json:
        others: Json = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {"response": text, **others, **({"tool_calls": calls} if calls else {})}
        return {"message": {"role": "assistant", "content": text, **others, **({"tool_calls": calls} if calls else {})}}

    def _taken_logprobs(self) -> Json:
        """Those of the tokens since the line before."""
        found, self._logprobs = self._logprobs, []
        return {"logprobs": found} if found else {}


def arguments_of(text: str) -> Json:
    """The arguments as the object that clients expect. Those that are none, as where num_predict cut them, are not lost."""
    try:
        found = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        found = None
    return found if isinstance(found, dict) else {"arguments": text}


def _figures(turn: TurnResponse) -> Json:
    """Durations in nanoseconds; where a token had come on another connection before, nobody knows them."""
    choice = turn.choices[0]
    counts = {"prompt_eval_count": turn.num_prompt_tokens(), "eval_count": turn.num_output_tokens()}
    if choice.first is None or not choice.first_at or choice.num_told:
        return counts
    prompt, decode = choice.first.prefill_us * 1000, int((choice.last_at - choice.first_at) * 1e9)
    total = int((choice.last_at - choice.opened_at) * 1e9)
    durations = {"prompt_eval_duration": prompt, "eval_duration": decode}
    return {"total_duration": total, "load_duration": 0, **counts, **durations}
