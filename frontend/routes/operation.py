"""The record of one route, and what many routes have in common. The routes stand at their handlers."""

from collections.abc import Awaitable, Callable
from enum import Enum
from types import GenericAlias
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct
from starlette.responses import Response

from meshlm.frontend.http.errors import STATUS
from meshlm.frontend.openai import response_schema as responses
from meshlm.frontend.requests.retry import KEY, LAST_ID, MAX_KEY_LENGTH
from meshlm.runtime.api_keys import INFERENCE

TEXT, METRICS, HTML = "text/plain", "text/plain; version=0.0.4; charset=utf-8", "text/html; charset=utf-8"
SRT, VTT = "application/x-subrip", "text/vtt"
EVENTS = "text/event-stream"
ANY_KEY = ""  # a route's key_scope
WITH_SLASHES = ("model", "item_id")
Json = dict[str, Any]


class Parameter(NamedTuple):
    """A parameter in the path, in the query or in a header."""

    name: str
    place: str
    schema: Json
    description: str


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


class Group(Enum):
    """The servers that have a route."""

    ANY = "any"
    TEXT = "text"  # of servers whose model writes text
    GENERATION = "generation"  # of these, and they write some
    VECTORS = "vectors"
    SPEECH = "speech"
    TOKENIZER_INFO = "tokenizer_info"  # --enable-tokenizer-info-endpoint
    DASHBOARD = "dashboard"  # --max-dashboards
    DEVELOPMENT = "development"  # --server-dev-mode
    DOCUMENTATION = "documentation"  # unless --disable-fastapi-docs


class OfClass(NamedTuple):
    """What the routes of a class have in common; the class has it as `routes`."""

    group: Group = Group.ANY
    key_scope: str = INFERENCE


class Operation(NamedTuple):
    """One route. `answers` is a Struct, or a list of one, for JSON, else a content type, None for nothing; `errors` are statuses whose
    body is `error`, in the form of the route's API."""

    path: str
    summary: str
    handler: Callable[..., Awaitable[Response | None]]  # a method, of the object that has all routes of its kind
    answers: type[Struct] | GenericAlias | str | None
    body: type[Struct] | None  # JSON, or with `is_form` multipart/form-data
    methods: tuple[str, ...]
    errors: tuple[int, ...]
    parameters: tuple[Parameter, ...]
    streams: bool
    plain_errors: tuple[int, ...]  # statuses whose body is text
    is_open: bool  # needs no key
    is_probe: bool  # load balancers ask by names of their own; there is no data in it
    error: type[Struct]
    is_form: bool
    texts: tuple[str, ...]  # content types that the answer has instead, where they are asked for
    own_group: Group | None
    own_key_scope: str | None
    of_class: OfClass = OfClass()

    @property
    def group(self) -> Group:
        return self.own_group or self.of_class.group

    @property
    def key_scope(self) -> str:
        """What a key must be for."""
        return self.of_class.key_scope if self.own_key_scope is None else self.own_key_scope

    @property
    def pattern(self) -> str:
        """The path as the router has it: a parameter at its end may have slashes, where clients have made the names."""
        name = next((name for name in WITH_SLASHES if self.path.endswith(f"{{{name}}}")), "")
        return self.path.replace(f"{{{name}}}", f"{{{name}:path}}") if name else self.path

    @property
    def generates(self) -> bool:
        """Whether it is of servers that give text, and gives some."""
        return self.group in (Group.GENERATION, Group.SPEECH)

    @property
    def submits(self) -> bool:
        """Whether the mesh computes for it: it is refused while the mesh is full."""
        asks_tokenizer = self.path.endswith(("/render", "/derender"))
        return self.group is Group.VECTORS or (self.generates and "{" not in self.path and not asks_tokenizer)

    @property
    def counts(self) -> bool:
        """Whether it counts for its key's limits: it computes, or reads texts."""
        reads_texts = "POST" in self.methods and "{" not in self.path and not self.is_open
        return self.submits or (reads_texts and self.key_scope == INFERENCE)


Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response | None]])


def route(
    path: str,
    summary: str,
    *,
    answers: type[Struct] | GenericAlias | str | None = None,
    body: type[Struct] | None = None,
    methods: tuple[str, ...] = (),
    errors: tuple[int, ...] = (),
    parameters: tuple[Parameter, ...] = (),
    streams: bool = False,
    plain_errors: tuple[int, ...] = (),
    is_open: bool = False,
    is_probe: bool = False,
    error: type[Struct] = responses.ErrorResponse,
    is_form: bool = False,
    texts: tuple[str, ...] = (),
    group: Group | None = None,
    key_scope: str | None = None,
) -> Callable[[Handler], Handler]:
    """The decorated method answers requests for this path: those of `methods`, which is POST for a route that takes a body. `group` and
    `key_scope` are those of its class where it has none (`OfClass`)."""
    methods = methods or (("POST",) if body is not None else ("GET",))
    # A server that stops says so on every path.
    errors = errors or (ASKS if body is not None else (503,))

    def declare(handler: Handler) -> Handler:
        operation = Operation(
            path, summary, handler, answers, body, methods, errors, parameters, streams, plain_errors, is_open, is_probe,
            error, is_form, texts, group, key_scope,
        )  # fmt: skip
        declared: list[Operation] = handler.__dict__.setdefault("operations", [])
        declared.insert(0, operation)  # the last decorator is applied first
        return handler

    return declare


def operations_of(*kinds: type) -> tuple[Operation, ...]:
    """All routes that these classes declare."""
    return tuple(
        operation._replace(of_class=getattr(kind, "routes", OfClass()))
        for kind in kinds
        for member in vars(kind).values()
        for operation in getattr(member, "operations", ())
    )


GENERATES = (
    *NAMED,
    Parameter(LAST_ID, "header", {"type": "string"}, f"With {KEY}: the id of the last event that the client has."),
)
STORED = (400, 404, 500, 503)


def switch(name: str, description: str) -> Parameter:
    """The parameter in the query that is true or false, and false if it is not given."""
    return Parameter(name, "query", {"type": "boolean", "default": False}, description)
