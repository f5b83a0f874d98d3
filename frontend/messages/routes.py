"""The routes of Anthropic's API: a body to a chat's request, and from there on the path of every chat. Called by routes.py."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import bodies
from meshlm.frontend.http.endpoint import json_response
from meshlm.frontend.http.operation import NAMED, Group, OfClass, route
from meshlm.frontend.http.retry import LAST_ID, refuse_last_id
from meshlm.frontend.messages import schema
from meshlm.frontend.messages.format import MessageFormat
from meshlm.frontend.messages.translate import NAMES, chat_request, left_out
from meshlm.frontend.openai import limits, parse
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.tool_choice import for_counting
from meshlm.frontend.requests.generation import Backend, Generation, ReadRequest, form_of_turns
from meshlm.frontend.requests.request_reader import RequestReader
from meshlm.protocol.edges.text import Tokenize

_NAMES = ("X-Request-Id", "Request-Id")
MESSAGES = form_of_turns(lambda parsed_request: MessageFormat(parsed_request.answer.stream), id_headers=_NAMES)
_route = partial(route, error=schema.MessagesErrorResponse)


class MessageRoutes:
    routes = OfClass(Group.GENERATION)

    def __init__(self, backend: Backend, generation: Generation, reader: RequestReader) -> None:
        self._backend, self._generation, self._reader = backend, generation, reader

    @_route("/v1/messages", "", schema.MessagesResponse, schema.MessagesRequest, parameters=NAMED, streams=True)
    async def messages(self, request: Request) -> HttpResponse:
        """Answer a conversation, by Anthropic's API."""
        read = await self._reader.read(request, self._messages)
        return await self._generation.answer(request, read, "msg_", MESSAGES)

    def _messages(self, request: Request, raw: bytes) -> ReadRequest:
        parsed_request, model = self._read(raw, schema.MessagesRequest)
        refuse_last_id(request.headers.get(LAST_ID, ""))
        return ReadRequest(parsed_request, model, self._reader.idempotency_key(request, raw))

    @_route("/v1/messages/count_tokens", "", schema.CountTokensResponse, schema.CountTokensRequest, group=Group.TEXT)
    async def count_tokens(self, request: Request) -> HttpResponse:
        """The tokens that a conversation has, by Anthropic's API."""
        parsed_request, _ = await self._reader.read(
            request, lambda _, raw: self._read(raw, schema.CountTokensRequest, counts=True)
        )
        self._backend.observer.ignored(parsed_request.unknown_fields, request.url.path)
        mesh = parsed_request.mesh
        async with self._generation.to_count(request, mesh.prompts[0], mesh.media) as prompt:
            question = Tokenize(self._backend.requests.new_handle(), prompt, False)
            count = len((await self._reader.ask(request, question)).token_ids) // 4
        return json_response({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    def _read(self, raw: bytes, kind: type[schema.Conversation], *, counts: bool = False) -> tuple[ParsedRequest, str]:
        """What is asked, and the model's name."""
        resolved = self._backend.resolved
        check = partial(limits.check_raw_texts, resolved=resolved, vectors=resolved.spec.media is not None)
        body, unknown = bodies.decode(raw, kind, check, self._reader.longest)
        server = self._backend.config.server
        with parse.renamed(NAMES):
            chat = chat_request(body, server, sees=resolved.spec.media is not None)
            if counts:  # nothing is generated
                chat, server = for_counting(chat, server)
            parsed_request = parse.chat(chat, (*unknown, *left_out(body)), resolved, server, media=True)
        named = parsed_request.with_answer(client_names={**NAMES, "prompt": "messages"})
        return named, self._reader.check_model(body.model)
