"""A turn as Anthropic's content blocks and events. Pure; see turn.py."""

import hashlib
from typing import Any

import msgspec

from meshlm.frontend.http.errors import HttpError, anthropic_error
from meshlm.frontend.openai.turn import TurnFormat, TurnResponse, event_of
from meshlm.protocol.edges.text import Finished
from meshlm.protocol.wire.ids import FinishReason

Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageFormat(TurnFormat):
    """`streams`: events are wanted; the blocks are kept either way, as the end needs to know them."""

    def __init__(self, streams: bool) -> None:
        super().__init__()
        self._streams = streams
        self._request_id = ""
        self._blocks: list[Json] = []
        self._end: Json = {}

    def begin(self, turn: TurnResponse) -> None:
        self._request_id = turn.request_id
        message = {**self._frame(turn), "content": [], "stop_reason": None, "stop_sequence": None}
        self._emit("message_start", {"message": {**message, "usage": _usage(turn)}})
        if self._streams:
            self.events.append(_PING)

    def reasoning(self, text: str) -> None:
        if self._kind != "thinking":
            self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        self._delta({"type": "thinking_delta", "thinking": text}, text)

    def text(self, text: str) -> None:
        if self._kind != "text":
            self._open("text", {"type": "text", "text": ""})
        self._delta({"type": "text_delta", "text": text}, text)

    def call(self, call: Json) -> None:
        function = call["function"]
        if self.is_new(call, "tool_use"):
            self._open("tool_use", {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
        if arguments := function.get("arguments"):
            self._delta({"type": "input_json_delta", "partial_json": arguments}, arguments)

    def end(self, turn: TurnResponse, finished: Finished) -> None:
        self._close()
        if not self._blocks:  # clients read the first one
            self.text("")
            self._close()
        calls = any(block["type"] == "tool_use" for block in self._blocks)
        self._end = {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
        if finished.reason is FinishReason.LENGTH:
            self._end["stop_reason"] = "max_tokens"
        elif isinstance(finished.stop_reason, str):
            self._end = {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_reason}
        self._emit("message_delta", {"delta": self._end, "usage": _usage(turn)})
        self._emit("message_stop", {})

    def failed(self, turn: TurnResponse, error: HttpError) -> bytes:
        return b"event: error\ndata: " + _encode(anthropic_error(error.message, error.status)) + b"\n\n"

    def body(self, turn: TurnResponse) -> bytes:
        return _encode({**self._frame(turn), "content": self._blocks, **self._end, "usage": _usage(turn)})

    def _frame(self, turn: TurnResponse) -> Json:
        frame = {"id": turn.request_id, "type": "message", "role": "assistant", "model": turn.model}
        return {**frame, "stop_details": None, "container": None}

    def _open(self, kind: str, block: Json) -> None:
        self._close()
        self._kind, self._texts = kind, []
        self._blocks.append(block)
        self._emit("content_block_start", {"index": len(self._blocks) - 1, "content_block": block})

    def _delta(self, delta: Json, text: str) -> None:
        self._texts.append(text)
        self._emit("content_block_delta", {"index": len(self._blocks) - 1, "delta": delta})

    def _close(self) -> None:
        if not self._kind:
            return
        block, text, kind = self._blocks[-1], "".join(self._texts), self._kind
        if kind == "tool_use":
            block["input"] = _input(text)
        else:
            block[kind] = text
        if kind == "thinking":  # nobody checks it; it is the same when the request is asked again
            name = f"{self._request_id}-{len(self._blocks)}"
            block["signature"] = hashlib.sha256(name.encode()).hexdigest()
            delta = {"type": "signature_delta", "signature": block["signature"]}
            self._emit("content_block_delta", {"index": len(self._blocks) - 1, "delta": delta})
        self._emit("content_block_stop", {"index": len(self._blocks) - 1})
        self._kind = ""

    def _emit(self, kind: str, fields: Json) -> None:
        if self._streams:
            self.events.append(event_of(kind, fields))


def _input(arguments: str) -> Json:
    """The arguments as the object that clients expect. Those that are none, as where max_tokens cut them, are not lost."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


def _usage(turn: TurnResponse) -> Json:
    cached = sum(turn.num_cached.values())
    return {
        "input_tokens": turn.num_prompt_tokens() - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": turn.num_output_tokens(),
    }
