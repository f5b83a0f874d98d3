"""The routes of Anthropic's API: a body to a chat's request, and from there on the path of every chat. Called by routes.py."""

from collections.abc import Callable, Mapping

import msgspec
from msgspec import Raw

from meshlm.frontend.http import bodies
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.messages.format import MessageFormat
from meshlm.frontend.messages.schema import Conversation, CountTokensRequest, MessagesRequest
from meshlm.frontend.messages.translate import NAMES, chat_request, left_out, renamed
from meshlm.frontend.openai import parse
from meshlm.frontend.openai.parse import ParsedRequest
from meshlm.frontend.openai.turn import TurnResponse
from meshlm.frontend.requests.generation import Form
from meshlm.frontend.requests.retry import LAST_ID, Progress
from meshlm.protocol.config import Resolved, ServerConfig

Check = Callable[[Mapping[str, Raw]], None]


def read_messages(
    raw: bytes, check: Check, longest: int, resolved: Resolved, server: ServerConfig
) -> tuple[ParsedRequest, str]:
    """POST /v1/messages: what is asked, and the model's name."""
    body, unknown = bodies.decode(raw, MessagesRequest, check, longest)
    return _parsed(body, unknown, resolved, server), body.model


def read_count(
    raw: bytes, check: Check, longest: int, resolved: Resolved, server: ServerConfig
) -> tuple[ParsedRequest, str]:
    """POST /v1/messages/count_tokens: a request whose prompt is the same."""
    body, unknown = bodies.decode(raw, CountTokensRequest, check, longest)
    return _parsed(body, unknown, resolved, server, counts=True), body.model


def _parsed(
    body: Conversation, unknown: tuple[str, ...], resolved: Resolved, server: ServerConfig, *, counts: bool = False
) -> ParsedRequest:
    """counts: nothing is generated, so tools need no parser, and are shown as where they may be called."""
    try:
        chat = chat_request(body, server)
        if counts and chat.tools and chat.tool_choice != "none":
            chat = msgspec.structs.replace(chat, tool_choice="none")
            server = msgspec.structs.replace(server, exclude_tools_when_tool_choice_none=False)
        ask = parse.chat(chat, (*unknown, *left_out(body)), resolved, server)
    except HttpError as error:
        raise renamed(error) from None
    return ask._replace(client_names={**NAMES, "prompt": "messages"})


def check_last_id(last_id: str) -> None:
    """A stream of these begins anew when it is asked for again."""
    if last_id:
        raise HttpError(400, f"{LAST_ID}: not supported on this path, whose events have no ids", LAST_ID)


def _whole(ask: ParsedRequest, request_id: str, created: int, model: str, on_end: Callable[[], None]) -> TurnResponse:
    return TurnResponse(ask, request_id, created, model, on_end, None, MessageFormat(streams=False))


def _stream(
    ask: ParsedRequest,
    request_id: str,
    created: int,
    model: str,
    on_end: Callable[[], None],
    write: Callable[[bytes], None],
    progress: Progress | None,
) -> TurnResponse:
    return TurnResponse(ask, request_id, created, model, on_end, write, MessageFormat(streams=True))


MESSAGES = Form(_whole, _stream, ("X-Request-Id", "Request-Id"))
