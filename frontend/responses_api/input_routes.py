"""What is done with the input of a response where none is made: its tokens are counted, or it is made shorter.

To compact a conversation the model writes a summary of it. What comes back are the user's messages and one item with the summary,
which the client sends as the input of the next response: items.py reads it as the assistant's message.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import bodies
from meshlm.frontend.http.endpoint import json_response
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai import limits, parse
from meshlm.frontend.openai.answer_fields import ANSWER, PROMPT
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.stream_response import StreamResponse
from meshlm.frontend.openai.tool_choice import for_counting
from meshlm.frontend.openai.turn import TurnResponse
from meshlm.frontend.requests.generation import Backend, Form, Generation
from meshlm.frontend.requests.retry import IdempotencyKey
from meshlm.frontend.responses_api import items, schema, tools, translate
from meshlm.frontend.responses_api.format import usage_of
from meshlm.frontend.responses_api.history import History
from meshlm.frontend.responses_api.items import text_of
from meshlm.frontend.responses_api.keys import key_of
from meshlm.frontend.responses_api.schema import ResponsesRequest
from meshlm.frontend.routes.operation import NAMED, Group, route
from meshlm.frontend.routes.request_reader import RequestReader
from meshlm.protocol.edges.text import Finished, PositionLogprobs, Tokenize

Json = dict[str, Any]
MAX_SUMMARY_TOKENS = 2048  # or as many as the context leaves
SUMMARIZE = (
    "Write a summary of this conversation, from which it can be continued without it. Keep what was asked for and why, "
    "what was decided and found out, names, numbers, code and paths that matter, the results of calls, and what is still "
    "to be done. Write the summary and nothing else."
)


class CompactRequest(Struct, frozen=True, kw_only=True):
    """POST /v1/responses/compact."""

    changes: ClassVar[tuple[str, ...]] = (PROMPT, ANSWER)
    names_here: ClassVar[Mapping[str, str]] = ResponsesRequest.names_here

    input: str | list[Json] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None


class CompactedResponse(Struct, frozen=True):
    """The user's messages, and an item of type compaction: together they are the input that the conversation goes on with."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[Json]
    usage: schema.ResponsesUsage


class CompactionFormat:
    """A TurnFormat: the text that the model writes is the summary; its reasoning is none of it. `given`: the conversation's items."""

    def __init__(self, given: list[Json]) -> None:
        self.events: list[bytes] = []
        self.last_events = b""
        self._given, self._texts = given, list[str]()

    def begin(self, turn: TurnResponse) -> None:
        """Nothing is told before the end."""

    def reasoning(self, text: str) -> None:
        """It is left out."""

    def text(self, text: str) -> None:
        self._texts.append(text)

    def logprobs(self, positions: list[PositionLogprobs]) -> None:
        """None are asked for."""

    def call(self, call: Json) -> None:
        """There are no tools."""

    def end(self, turn: TurnResponse, finished: Finished) -> None:
        """`body` has all of it."""

    def failed(self, turn: TurnResponse, error: HttpError) -> bytes:
        return b""

    def body(self, turn: TurnResponse) -> bytes:
        summary = "".join(self._texts).strip()
        if not summary:
            raise HttpError(500, "the model has written no summary", kind="internal_error")
        of_user = [item for item in self._given if item.get("type", "message") == "message" and item["role"] == "user"]
        compaction = {
            "id": f"cmp_{turn.request_id.removeprefix('resp_')}",
            "type": "compaction",
            "encrypted_content": items.sealed(summary),
        }
        usage = msgspec.convert(usage_of(turn), schema.ResponsesUsage)
        output = [*items.stored(of_user, turn.request_id), compaction]
        return msgspec.json.encode(
            CompactedResponse(turn.request_id, "response.compaction", turn.created, output, usage)
        )


class InputRoutes:
    """Of one frontend."""

    def __init__(self, backend: Backend, generation: Generation, reader: RequestReader, history: History) -> None:
        self._backend, self._generation, self._reader, self._history = backend, generation, reader, history

    @route(
        "/v1/responses/input_tokens",
        "The tokens that the input of a response has.",
        answers=schema.InputTokensResponse,
        body=schema.InputTokensRequest,
        group=Group.TEXT,
    )
    async def input_tokens(self, request: Request) -> HttpResponse | None:
        fields, unknown = await self._reader.read(request, self._read_counted)
        fields, before = await self._history.complete(fields, key_of(request))
        parsed_request = self._counted(fields, unknown, before)
        self._backend.observer.ignored(parsed_request.unknown_fields, request.url.path)
        question = Tokenize(self._backend.requests.new_handle(), parsed_request.mesh.prompts[0])
        if (reply := await self._reader.ask(request, question)) is None:
            return None
        count = len(reply.token_ids) // 4
        if most := parsed_request.mesh.text.truncate_prompt_tokens:  # truncation: auto
            count = min(count, most)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    @route(
        "/v1/responses/compact",
        "Make a conversation shorter: the user's messages, and a summary of all of it.",
        answers=CompactedResponse,
        body=CompactRequest,
        parameters=NAMED,
        group=Group.GENERATION,
    )
    async def compact(self, request: Request) -> HttpResponse | None:
        fields, unknown, key = await self._reader.read(request, self._read_compacted)
        fields, before = await self._history.complete(fields, key_of(request))
        given = [*before, *items.listed(fields.input or [])]
        parsed_request = self._compacted(fields, unknown, before)
        whole = partial(TurnResponse, write=None, form=CompactionFormat(given))
        model, form = self._reader.check_model(fields.model), Form(whole, StreamResponse)
        return await self._generation.answer(request, parsed_request, model, key, "resp_", form)

    def _read_compacted(
        self, request: Request, raw: bytes
    ) -> tuple[ResponsesRequest, tuple[str, ...], IdempotencyKey | None]:
        body, unknown = self._decoded(raw, CompactRequest)
        fields = self._checked(ResponsesRequest(**msgspec.structs.asdict(body)))
        return fields, unknown, self._reader.idempotency_key(request, raw)

    def _compacted(self, fields: ResponsesRequest, unknown: tuple[str, ...], before: list[Json]) -> ParsedRequest:
        """The request for the summary. It goes on with the conversation, whose beginning is in the prefix cache."""
        try:
            chat = translate.chat_request(fields, before)
            messages = list(chat.messages)
            if messages[-1]["role"] == "user":  # not every template takes two in a row
                messages[-1] = {"role": "user", "content": f"{text_of(messages[-1])}\n\n{SUMMARIZE}"}
            else:
                messages.append({"role": "user", "content": SUMMARIZE})
            chat = msgspec.structs.replace(chat, messages=messages, continue_final_message=False)
            found = parse.chat(chat, unknown, self._backend.resolved, self._backend.config.server)
        except HttpError as error:
            raise translate.renamed(error) from None
        return translate.parsed(found.with_mesh(max_tokens=MAX_SUMMARY_TOKENS, cap_max_tokens=True), fields)

    def _read_counted(self, request: Request, raw: bytes) -> tuple[ResponsesRequest, tuple[str, ...]]:
        body, unknown = self._decoded(raw, schema.InputTokensRequest)
        return self._checked(ResponsesRequest(**msgspec.structs.asdict(body))), unknown

    def _decoded(self, raw: bytes, kind: type[bodies.Body]) -> tuple[bodies.Body, tuple[str, ...]]:
        check = partial(limits.check_raw_texts, resolved=self._backend.resolved)
        return bodies.decode(raw, kind, check, self._reader.longest)

    def _checked(self, fields: ResponsesRequest) -> ResponsesRequest:
        """The request, which may go on with a conversation without more input."""
        self._reader.check_model(fields.model)
        goes_on = fields.previous_response_id or translate.conversation_of(fields)
        translate.check(fields if fields.input or not goes_on else msgspec.structs.replace(fields, input="-"))
        return fields

    def _counted(self, fields: ResponsesRequest, unknown: tuple[str, ...], before: list[Json]) -> ParsedRequest:
        """The request whose prompt is counted: nothing is generated."""
        try:
            chat = translate.chat_request(fields, before)
            chat, server = for_counting(chat, self._backend.config.server)
            found = parse.chat(chat, (*unknown, *tools.left_out(fields)), self._backend.resolved, server)
        except HttpError as error:
            raise translate.renamed(error) from None
        return found.with_answer(client_names=translate.NAMES)
