"""What is done with the input of a response where none is made: its tokens are counted, or it is made shorter.

To compact a conversation the model writes a summary of it. What comes back are the user's messages and one item with the summary,
which the client sends as the input of the next response: items.py reads it as the assistant's message.
"""

from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import bodies
from meshlm.frontend.http.endpoint import json_response
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.http.operation import NAMED, Group, OfClass, route
from meshlm.frontend.http.retry import IdempotencyKey
from meshlm.frontend.openai import limits
from meshlm.frontend.openai.schema import ChatRequest
from meshlm.frontend.openai.tool_choice import for_counting
from meshlm.frontend.openai.turn import TurnFormat, TurnResponse
from meshlm.frontend.requests.generation import Backend, Generation, ReadRequest, form_of_turns
from meshlm.frontend.requests.request_reader import RequestReader
from meshlm.frontend.responses_api import items, schema, translate
from meshlm.frontend.responses_api.format import usage_of
from meshlm.frontend.responses_api.history import History
from meshlm.frontend.responses_api.items import text_of
from meshlm.frontend.responses_api.listing import key_of
from meshlm.frontend.responses_api.schema import ResponsesRequest
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.edges.text import Tokenize

Json = dict[str, Any]
MAX_SUMMARY_TOKENS = 2048  # or as many as the context leaves
SUMMARIZE = (
    "Write a summary of this conversation, from which it can be continued without it. Keep what was asked for and why, "
    "what was decided and found out, names, numbers, code and paths that matter, the results of calls, and what is still "
    "to be done. Write the summary and nothing else."
)


class CompactedResponse(Struct, frozen=True):
    """The user's messages, and an item of type compaction: together they are the input that the conversation goes on with."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[Json]
    usage: schema.ResponsesUsage


class CompactionFormat(TurnFormat):
    """The text that the model writes is the summary; its reasoning is none of it. `given`: the conversation's items."""

    def __init__(self, given: list[Json]) -> None:
        super().__init__()
        self._given = given

    def text(self, text: str) -> None:
        self._texts.append(text)

    def body(self, turn: TurnResponse) -> bytes:
        summary = "".join(self._texts).strip()
        if not summary:
            raise HttpError(500, "the model has written no summary")
        of_user = [item for item in self._given if item.get("type", "message") == "message" and item["role"] == "user"]
        compaction = {
            "id": f"cmp_{turn.request_id.removeprefix('resp_')}",
            "type": "compaction",
            "encrypted_content": items.sealed(summary),
        }
        usage = msgspec.convert(usage_of(turn), schema.ResponsesUsage)
        output = [*items.stored(of_user, turn.request_id), compaction]
        answer = CompactedResponse(turn.request_id, "response.compaction", turn.created, output, usage)
        return msgspec.json.encode(answer)


class InputRoutes:
    routes = OfClass(Group.GENERATION)

    def __init__(self, backend: Backend, generation: Generation, reader: RequestReader, history: History) -> None:
        self._backend, self._generation, self._reader, self._history = backend, generation, reader, history

    @route(
        "/v1/responses/input_tokens",
        answers=schema.InputTokensResponse,
        body=schema.InputTokensRequest,
        group=Group.TEXT,
    )
    async def input_tokens(self, request: Request) -> HttpResponse:
        """The tokens that the input of a response has."""
        fields, unknown = await self._reader.read(request, self._read_counted)
        fields, before = await self._history.complete(fields, key_of(request))
        parsed_request = translate.asked(fields, unknown, before, self._backend, for_counting)
        self._backend.observer.ignored(parsed_request.unknown_fields, request.url.path)
        question = Tokenize(self._backend.requests.new_handle(), parsed_request.mesh.prompts[0])
        count = len((await self._reader.ask(request, question)).token_ids) // 4
        if most := parsed_request.mesh.text.truncate_prompt_tokens:  # truncation: auto
            count = min(count, most)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    @route("/v1/responses/compact", answers=CompactedResponse, body=schema.CompactRequest, parameters=NAMED)
    async def compact(self, request: Request) -> HttpResponse:
        """Make a conversation shorter: the user's messages, and a summary of all of it."""
        fields, unknown, key = await self._reader.read(request, self._read_compacted)
        fields, before = await self._history.complete(fields, key_of(request))
        given = [*before, *items.listed(fields.input or [])]
        # The request for the summary goes on with the conversation, whose beginning is in the prefix cache.
        parsed_request = translate.asked(fields, unknown, before, self._backend, _summarizing)
        parsed_request = parsed_request.with_mesh(max_tokens=MAX_SUMMARY_TOKENS, cap_max_tokens=True)
        model, form = self._reader.check_model(fields.model), form_of_turns(lambda _: CompactionFormat(given))
        return await self._generation.answer(request, ReadRequest(parsed_request, model, key), "resp_", form)

    def _read_compacted(
        self, request: Request, raw: bytes
    ) -> tuple[ResponsesRequest, tuple[str, ...], IdempotencyKey | None]:
        return *self._decoded(raw, schema.CompactRequest), self._reader.idempotency_key(request, raw)

    def _read_counted(self, request: Request, raw: bytes) -> tuple[ResponsesRequest, tuple[str, ...]]:
        return self._decoded(raw, schema.InputTokensRequest)

    def _decoded(self, raw: bytes, kind: type[schema.Input]) -> tuple[ResponsesRequest, tuple[str, ...]]:
        """The request, which may go on with a conversation without more input."""
        check = partial(limits.check_raw_texts, resolved=self._backend.resolved)
        body, unknown = bodies.decode(raw, kind, check, self._reader.longest)
        fields = ResponsesRequest(**msgspec.structs.asdict(body))
        self._reader.check_model(fields.model)
        goes_on = fields.previous_response_id or translate.conversation_of(fields)
        translate.check(fields if fields.input or not goes_on else msgspec.structs.replace(fields, input="-"))
        return fields, unknown


def _summarizing(chat: ChatRequest, server: ServerConfig) -> tuple[ChatRequest, ServerConfig]:
    """The chat that asks for a summary of itself."""
    messages = list(chat.messages)
    if messages[-1]["role"] == "user":  # not every template takes two in a row
        messages[-1] = {"role": "user", "content": f"{text_of(messages[-1])}\n\n{SUMMARIZE}"}
    else:
        messages.append({"role": "user", "content": SUMMARIZE})
    return msgspec.structs.replace(chat, messages=messages, continue_final_message=False), server
