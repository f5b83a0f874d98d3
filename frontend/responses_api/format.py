"""A turn as items and events of OpenAI's Responses API. Pure; see turn.py."""

import hashlib
from typing import Any

import msgspec

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.response_fields import chat_logprobs
from meshlm.frontend.openai.turn import TurnFormat, TurnResponse, event_of
from meshlm.frontend.responses_api import tools, translate
from meshlm.frontend.responses_api.items import sealed
from meshlm.frontend.responses_api.schema import ENCRYPTED, ResponsesRequest
from meshlm.protocol.edges.text import Finished, PositionLogprobs
from meshlm.protocol.wire.columns import unpack_i32
from meshlm.protocol.wire.ids import FinishReason

Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode
# The event that ends an item's text, and its field, by the item's type.
_DONE = {
    "reasoning": ("response.reasoning_text.done", "text"),
    "message": ("response.output_text.done", "text"),
    "function_call": ("response.function_call_arguments.done", "arguments"),
}
_WHOLE = ("completed", "incomplete")  # statuses of an answer that has all of its text


class ResponseFormat(TurnFormat):
    """`stores`: the answer is kept; `streams`: events are wanted."""

    def __init__(self, fields: ResponsesRequest, parsed_request: ParsedRequest, *, stores: bool, streams: bool) -> None:
        super().__init__()
        self.output: list[Json] = []
        self.num_events = 0
        self._repeated = translate.repeated(fields, parsed_request, stores=stores)
        self._namespaces, self._streams = tools.namespaces(fields), streams
        self._seals = ENCRYPTED in (fields.include or ())  # reasoning has an encrypted_content too
        self._name = ""
        self._pending: list[PositionLogprobs] = []  # of tokens whose text is still to come
        self._logprobs: list[Json] = []  # of the open message
        self.final: Json = {}  # the answer, once it has ended

    def begin(self, turn: TurnResponse) -> None:
        self._name = turn.request_id.removeprefix("resp_")
        if not self.num_events:  # a response in the background begins when it is asked for
            self._emit("response.created", {"response": self.snapshot(turn, "in_progress")})
        self._emit("response.in_progress", {"response": self.snapshot(turn, "in_progress")})

    def queued(self, turn: TurnResponse) -> None:
        """The first event of a response in the background."""
        self._emit("response.created", {"response": self.snapshot(turn, "queued")})

    def reasoning(self, text: str) -> None:
        self._pending = []
        if self._kind != "reasoning":
            fields: Json = {"summary": [], "content": [], "encrypted_content": None}
            self._open("reasoning", "rs", fields, {"type": "reasoning_text", "text": ""})
        self._delta("response.reasoning_text.delta", text, {"content_index": 0})

    def text(self, text: str) -> None:
        if self._kind != "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._open("message", "msg", {"role": "assistant", "content": []}, part)
        logprobs = chat_logprobs(self._pending, has_sampled=False)["content"] if self._pending else []
        self._pending = []
        self._logprobs += logprobs
        self._delta("response.output_text.delta", text, {"content_index": 0, "logprobs": logprobs})

    def logprobs(self, positions: list[PositionLogprobs]) -> None:
        self._pending += positions

    def call(self, call: Json) -> None:
        self._pending = []
        function = call["function"]
        if self.is_new(call, "function_call"):
            namespace, name = self._namespaces.get(function["name"], (None, function["name"]))
            fields = {"call_id": call["id"], "name": name, "namespace": namespace, "arguments": ""}
            self._open("function_call", "fc", fields, None)
        if arguments := function.get("arguments"):
            self._delta("response.function_call_arguments.delta", arguments, {})

    def end(self, turn: TurnResponse, finished: Finished) -> None:
        status = "incomplete" if finished.reason is FinishReason.LENGTH else "completed"
        self._close(status)
        self.final = self.snapshot(turn, status)
        self.last_events = self._event(f"response.{status}", {"response": self.final})

    def failed(self, turn: TurnResponse, error: HttpError) -> bytes:
        self._close("incomplete")
        self.final = self.snapshot(turn, "failed", error)
        self._emit("response.failed", {"response": self.final})
        events = b"".join(self.events)
        self.events.clear()
        return events

    def is_not_stored(self) -> None:
        """After the end: the answer says so."""
        self.final["store"] = False
        if self.last_events:
            self.last_events = self._event(f"response.{self.final['status']}", {"response": self.final})

    def body(self, turn: TurnResponse) -> bytes:
        return _encode(self.final)

    def outcome(self) -> tuple[str, bytes]:
        """The status and the answer, after the end."""
        return self.final["status"], _encode(self.final)

    def snapshot(self, turn: TurnResponse, status: str, error: HttpError | None = None) -> Json:
        """The answer as it is now."""
        ended = status in ("completed", "incomplete", "failed", "cancelled")
        code = "server_error" if error is not None and error.status >= 500 else "invalid_prompt"
        return {
            "id": turn.request_id,
            "object": "response",
            "created_at": turn.created,
            "completed_at": turn.now() if status == "completed" else None,
            "status": status,
            "error": {"code": code, "message": error.message} if error is not None else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": turn.model,
            "output": list(self.output),
            "usage": usage_of(turn) if ended else None,
            **self._repeated,
            **(_raw_messages(turn) if turn.options.return_prompt_text and status in _WHOLE else {}),
        }

    def _open(self, kind: str, prefix: str, fields: Json, part: Json | None) -> None:
        self._close("completed")
        self._kind, self._texts, self._logprobs = kind, [], []
        digest = hashlib.sha256(f"{self._name}-{len(self.output)}".encode()).hexdigest()[:32]
        item = {"id": f"{prefix}_{digest}", "type": kind, "status": "in_progress", **fields}
        self.output.append(item)
        self._emit("response.output_item.added", {"output_index": len(self.output) - 1, "item": item})
        if part is not None:
            self._of_item("response.content_part.added", {"content_index": 0, "part": part})

    def _delta(self, kind: str, text: str, more: Json) -> None:
        self._texts.append(text)
        self._of_item(kind, {"delta": text, **more})

    def _close(self, status: str) -> None:
        if not self._kind:
            return
        item, text = self.output[-1], "".join(self._texts)
        kind, field = _DONE[self._kind]
        if self._kind == "function_call":
            item["arguments"] = text
            self._of_item(kind, {field: text, "name": item["name"]})
        else:
            part: Json = {"type": "reasoning_text", "text": text}
            more: Json = {}
            if self._kind == "message":
                part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
                more = {"logprobs": self._logprobs}
            elif self._seals:
                item["encrypted_content"] = sealed(text)
            item["content"] = [part]
            self._of_item(kind, {"content_index": 0, field: text, **more})
            self._of_item("response.content_part.done", {"content_index": 0, "part": part})
        item["status"] = status
        self._emit("response.output_item.done", {"output_index": len(self.output) - 1, "item": item})
        self._kind = ""

    def _of_item(self, kind: str, fields: Json) -> None:
        self._emit(kind, {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, **fields})

    def _emit(self, kind: str, fields: Json) -> None:
        if self._streams:
            self.events.append(self._event(kind, fields))
        self.num_events += 1

    def _event(self, kind: str, fields: Json) -> bytes:
        return event_of(kind, {"sequence_number": self.num_events, **fields})


def _raw_messages(turn: TurnResponse) -> Json:
    """The prompt and the answer as the model has them; without the answer where its reasoning is left out."""
    prompt = turn.prompt[0]
    read = {"message": prompt.prompt_text, "tokens": unpack_i32(prompt.prompt_token_ids).tolist()}
    wrote = {"message": "".join(turn.raw), "tokens": turn.choices[0].token_ids.tolist()}
    of_output = [] if turn.options.hides_tokens else [{**wrote, "type": "raw_message_tokens"}]
    return {"input_messages": [{**read, "type": "raw_message_tokens"}], "output_messages": of_output}


def usage_of(turn: TurnResponse) -> Json:
    prompt, output = turn.num_prompt_tokens(), turn.num_output_tokens()
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": sum(turn.num_cached.values()), "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": turn.num_reasoning_tokens},
        "total_tokens": prompt + output,
    }
