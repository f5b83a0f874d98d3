"""The record of one route, and what many routes have in common. The routes are in operations.py and operator_operations.py."""

from types import GenericAlias
from typing import Any, NamedTuple

from msgspec import Struct

from meshlm.frontend.http.errors import STATUS
from meshlm.frontend.openai import response_schema as responses
from meshlm.frontend.requests.retry import KEY, MAX_KEY_LENGTH

TEXT, METRICS, HTML = "text/plain", "text/plain; version=0.0.4; charset=utf-8", "text/html; charset=utf-8"
SRT, VTT = "application/x-subrip", "text/vtt"
EVENTS = "text/event-stream"
WITH_SLASHES = ("model", "item_id")
Json = dict[str, Any]


class Parameter(NamedTuple):
    """A parameter in the path, in the query or in a header."""

    name: str
    place: str
    schema: Json
    description: str


class Operation(NamedTuple):
    """One route. `answers` is a Struct, or a list of one, for JSON, else a content type, "" for none; `errors` are statuses whose
    body is `error`, in the form of the route's API."""

    path: str
    handler: str
    answers: type[Struct] | GenericAlias | str | None
    summary: str
    body: type[Struct] | None = None  # JSON, or with `is_form` multipart/form-data
    methods: tuple[str, ...] = ("GET",)
    errors: tuple[int, ...] = (503,)  # a server that stops says so on every path
    parameters: tuple[Parameter, ...] = ()
    streams: bool = False
    plain_errors: tuple[int, ...] = ()  # statuses whose body is text
    is_open: bool = False  # needs no key
    error: type[Struct] = responses.ErrorResponse
    is_form: bool = False
    texts: tuple[str, ...] = ()  # content types that the answer has instead, where they are asked for

    @property
    def pattern(self) -> str:
        """The path as the router has it: a parameter at its end may have slashes, where clients have made the names."""
        name = next((name for name in WITH_SLASHES if self.path.endswith(f"{{{name}}}")), "")
        return self.path.replace(f"{{{name}}}", f"{{{name}:path}}") if name else self.path

    @property
    def generates(self) -> bool:
        """Whether it is of servers that give text."""
        return (
            self.streams or self.handler.startswith(("rendering.", "scoring.")) or self.path.startswith("/v1/responses")
        )


ASKS = (400, 404, 413, *STATUS.values())
NAMED = (
    Parameter("X-Request-Id", "header", {"type": "string"}, "Comes back with the answer, and names the request in the logs."),
    Parameter(
        "X-data-parallel-rank", "header", {"type": "string", "pattern": "^[0-9]{1,6}$"}, "The rank that is to serve the request."
    ),
    Parameter(
        KEY,
        "header",
        {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LENGTH, "pattern": "^[ -~]*$"},
        "Names the request, so that asked again it goes on instead of beginning anew.",
    ),
)  # fmt: skip


def switch(name: str, description: str) -> Parameter:
    """The parameter in the query that is true or false, and false if it is not given."""
    return Parameter(name, "query", {"type": "boolean", "default": False}, description)
