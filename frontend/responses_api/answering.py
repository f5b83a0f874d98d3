"""A body of POST /v1/responses to what the mesh is asked, and the form of its answer. Called by routes.py."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Raw

from meshlm.frontend.http import bodies
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai import parse
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.responses import AnswerHead
from meshlm.frontend.openai.turn import TurnResponse
from meshlm.frontend.requests.retry import Progress
from meshlm.frontend.responses_api import tools, translate
from meshlm.frontend.responses_api.format import ResponseFormat
from meshlm.frontend.responses_api.schema import ENCRYPTED, ResponsesRequest

Json = dict[str, Any]


class Answering:
    """The form of one request's answer, kept until its end for who stores it."""

    def __init__(self, fields: ResponsesRequest, parsed_request: ParsedRequest, *, stores: bool) -> None:
        self._repeated = translate.repeated(fields, parsed_request, stores=stores)
        self._namespaces = tools.namespaces(fields)
        self._seals = ENCRYPTED in (fields.include or ())
        self.turn: TurnResponse | None = None
        self.format: ResponseFormat

    def form(self, streams: bool) -> ResponseFormat:
        self.format = ResponseFormat(self._repeated, self._namespaces, streams=streams, seals=self._seals)
        return self.format

    def whole(self, head: AnswerHead) -> TurnResponse:
        self.turn = TurnResponse(head, None, self.form(streams=False))
        return self.turn

    def stream(self, head: AnswerHead, write: Callable[[bytes], None], progress: Progress | None) -> TurnResponse:
        self.turn = TurnResponse(head, write, self.form(streams=True))
        return self.turn


def read(
    raw: bytes, check: Callable[[Mapping[str, Raw]], None], longest: int
) -> tuple[ResponsesRequest, tuple[str, ...]]:
    """The body, and its fields that nobody knows."""
    fields, unknown = bodies.decode(raw, ResponsesRequest, check, longest)
    translate.check(fields)
    return fields, unknown


def asked(
    fields: ResponsesRequest, unknown: tuple[str, ...], before: list[Json], resolved: Any, server: Any
) -> ParsedRequest:
    """The request as the mesh is asked it. `before`: the items of the conversation so far."""
    chat, unknown = translate.chat_request(fields, before), (*unknown, *tools.left_out(fields))
    try:
        return translate.parsed(parse.chat(chat, unknown, resolved, server), fields)
    except HttpError as error:
        raise translate.renamed(error) from None
