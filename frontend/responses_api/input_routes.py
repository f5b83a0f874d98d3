"""What is done with the input of a response where none is made: its tokens are counted."""

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import bodies
from meshlm.frontend.http.endpoint import json_response
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai import limits, parse
from meshlm.frontend.openai.parse import ParsedRequest
from meshlm.frontend.openai.tool_choice import for_counting
from meshlm.frontend.requests.generation import Backend
from meshlm.frontend.responses_api import schema, tools, translate
from meshlm.frontend.responses_api.history import History
from meshlm.frontend.responses_api.keys import key_of
from meshlm.frontend.responses_api.schema import ResponsesRequest
from meshlm.frontend.routes.operation import Group, route
from meshlm.frontend.routes.request_reader import RequestReader
from meshlm.protocol.edges.text import Tokenize

Json = dict[str, Any]


class InputRoutes:
    """Of one frontend."""

    def __init__(self, backend: Backend, reader: RequestReader, history: History) -> None:
        self._backend, self._reader, self._history = backend, reader, history

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
        question = Tokenize(self._backend.requests.new_handle(), parsed_request.prompts[0])
        if (reply := await self._reader.ask(request, question)) is None:
            return None
        count = len(reply.token_ids) // 4
        if most := parsed_request.text.truncate_prompt_tokens:  # truncation: auto
            count = min(count, most)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

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
        return found._replace(client_names=translate.NAMES)
