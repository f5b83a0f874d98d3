"""The routes of /v1/responses: a body to a chat's request, and from there on the path of every chat. Called by server.py."""

from collections.abc import Callable, Mapping

from msgspec import Raw

from meshlm.frontend import bodies, parse
from meshlm.frontend.errors import HttpError
from meshlm.frontend.generation import Form
from meshlm.frontend.parse import ParsedRequest
from meshlm.frontend.responses_api import translate
from meshlm.frontend.responses_api.format import ResponseFormat
from meshlm.frontend.responses_api.schema import ENCRYPTED, ResponsesRequest
from meshlm.frontend.retry import Progress
from meshlm.frontend.turn import TurnResponse
from meshlm.protocol.config import Resolved, ServerConfig

Check = Callable[[Mapping[str, Raw]], None]


def read(raw: bytes, check: Check, longest: int) -> tuple[ResponsesRequest, tuple[str, ...]]:
    """The body, and its fields that nobody knows."""
    body, unknown = bodies.decode(raw, ResponsesRequest, check, longest)
    translate.check(body)
    return body, unknown


def asked(
    body: ResponsesRequest,
    unknown: tuple[str, ...],
    before: list[translate.Json],
    resolved: Resolved,
    server: ServerConfig,
) -> ParsedRequest:
    """What the mesh is asked. `before`: the items of the conversation so far."""
    chat = translate.chat_request(body, before)
    try:
        return translate.parsed(parse.chat(chat, unknown, resolved, server), body)
    except HttpError as error:
        raise translate.renamed(error) from None


class Answering:
    """The form of one request's answer, kept until its end for who stores it."""

    def __init__(self, body: ResponsesRequest, ask: ParsedRequest, *, stores: bool) -> None:
        self._repeated = translate.repeated(body, ask, stores=stores)
        self._seals = ENCRYPTED in (body.include or ())
        self.turn: TurnResponse | None = None

    def form(self, streams: bool) -> ResponseFormat:
        return ResponseFormat(self._repeated, streams=streams, seals=self._seals)

    def whole(
        self, ask: ParsedRequest, request_id: str, created: int, model: str, on_end: Callable[[], None]
    ) -> TurnResponse:
        self.turn = TurnResponse(ask, request_id, created, model, on_end, None, self.form(streams=False))
        return self.turn

    def stream(
        self,
        ask: ParsedRequest,
        request_id: str,
        created: int,
        model: str,
        on_end: Callable[[], None],
        write: Callable[[bytes], None],
        progress: Progress | None,
    ) -> TurnResponse:
        self.turn = TurnResponse(ask, request_id, created, model, on_end, write, self.form(streams=True))
        return self.turn


def form_of(body: ResponsesRequest, ask: ParsedRequest) -> Form:
    answering = Answering(body, ask, stores=False)
    return Form(answering.whole, answering.stream, named_by_header=False)
