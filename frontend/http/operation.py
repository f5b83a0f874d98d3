"""The record of one route, and what many routes have in common. The routes stand at their handlers."""

import re
from collections.abc import Awaitable, Callable
from enum import Enum
from types import GenericAlias
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace
from starlette.responses import Response

from meshlm.frontend.http.errors import STATUS, ErrorResponse
from meshlm.frontend.http.retry import KEY, LAST_ID, MAX_KEY_LENGTH
from meshlm.runtime.api_keys import ADMIN, INFERENCE

TEXT, METRICS, HTML = "text/plain", "text/plain; version=0.0.4; charset=utf-8", "text/html; charset=utf-8"
SRT, VTT = "application/x-subrip", "text/vtt"
EVENTS = "text/event-stream"
ANY_KEY = ""  # a route's key_scope
# What the parameters in paths are, and which of them may have slashes, where clients have made the names.
IN_PATHS = {
    "model": "One of the served names.",
    "response_id": "The id of a response.",
    "conversation_id": "The id of a conversation.",
    "item_id": "The id of an item.",
}
WITH_SLASHES = ("model", "item_id")
Json = dict[str, Any]


class Parameter(NamedTuple):
    """A parameter in the path, in the query or in a header."""

    name: str
    place: str
    schema: Json
    description: str


ASKS = (400, 404, 413, *STATUS.values())
_REFUSED = {"path": 404, "query": 400, "header": 400}  # with which status a parameter of that place is refused
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

    OF_CLASS = "of_class"  # those of the routes of its class
    ANY = "any"
    TEXT = "text"  # of servers whose model writes text
    GENERATION = "generation"  # of these, and they write some
    VECTORS = "vectors"
    SPEECH = "speech"
    TOKENIZER_INFO = "tokenizer_info"  # --enable-tokenizer-info-endpoint
    DASHBOARD = "dashboard"  # --max-dashboards
    ADAPTERS = "adapters"  # --enable-lora and --allow-runtime-lora-updating
    DEVELOPMENT = "development"  # --server-dev-mode
    DOCUMENTATION = "documentation"  # unless --disable-fastapi-docs


OF_CLASS = "of_class"


class OfClass(NamedTuple):
    """What the routes of a class have in common, where they say nothing else; the class has it as `routes`."""

    group: Group = Group.ANY
    key_scope: str = INFERENCE
    parameters: tuple[Parameter, ...] = ()
    api: str = ""  # the API that --api names; empty: one that every server has


Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])


class Operation(Struct, frozen=True):
    """One route, which decorates the method that answers requests for it. `answers` is a Struct, or a list of one, for JSON, else a
    content type, None for nothing; `errors` are statuses whose body is `error`, in the form of the route's API, beside those that
    follow from what the route takes. Parameters in the path are added."""

    path: str
    summary: str = ""  # the method's docstring, where it has none
    answers: type[Struct] | GenericAlias | str | None = None
    body: type[Struct] | None = None  # JSON, or with `is_form` multipart/form-data
    methods: tuple[str, ...] = ()  # POST for a route that takes a body, else GET
    errors: tuple[int, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    streams: bool = False
    plain_errors: tuple[int, ...] = ()  # statuses whose body is text
    is_open: bool = False  # needs no key
    is_probe: bool = False  # load balancers ask by names of their own; there is no data in it
    error: type[Struct] = ErrorResponse
    is_form: bool = False
    texts: tuple[str, ...] = ()  # content types that the answer has instead, where they are asked for
    group: Group = Group.OF_CLASS
    key_scope: str = OF_CLASS  # what a key must be for
    api: str = ""  # as in OfClass
    handler: str = ""  # the name of the method, of the object that has all routes of its kind

    def __call__(self, handler: Handler) -> Handler:
        methods = self.methods or (("POST",) if self.body is not None else ("GET",))
        declared: list[Operation] = handler.__dict__.setdefault("operations", [])
        summary = self.summary or handler.__doc__ or ""
        # the last is applied first
        declared.insert(0, replace(self, summary=summary, methods=methods, handler=handler.__name__))
        return handler

    def of_class(self, common: OfClass) -> "Operation":
        """Completed by what the routes of its class have in common, and by what follows from its path and its body."""
        named = re.findall(r"{(\w+)}", self.path)
        in_path = [Parameter(name, "path", {"type": "string", "minLength": 1}, IN_PATHS[name]) for name in named]
        parameters = (*in_path, *(self.parameters or common.parameters))
        # one that stops says so on every path
        errors = {503, *self.errors, *(_REFUSED[one.place] for one in parameters)}
        if self.body is not None:
            errors |= {400, 413} if self.errors else {*ASKS}
        return replace(
            self,
            group=common.group if self.group is Group.OF_CLASS else self.group,
            key_scope=common.key_scope if self.key_scope == OF_CLASS else self.key_scope,
            parameters=parameters,
            errors=tuple(errors),
            api=common.api,
        )

    @property
    def pattern(self) -> str:
        """The path as the router has it: a parameter at its end may have slashes."""
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


route = Operation


def operations_of(*kinds: type) -> tuple[Operation, ...]:
    return tuple(
        operation.of_class(getattr(kind, "routes", OfClass()))
        for kind in kinds
        for member in vars(kind).values()
        for operation in getattr(member, "operations", ())
    )


class Paths(NamedTuple):
    """Paths by what is asked of a request before its route has it: of all routes, also of those that this server has not."""

    submits: frozenset[str]  # the mesh computes for them
    counted: frozenset[str]  # they count for a key's limits
    open: frozenset[str]  # they need no key
    probes: frozenset[str]
    forms: frozenset[str]  # whose bodies are forms
    admin: frozenset[str]
    information: frozenset[str]

    @classmethod
    def of_operations(cls, every: tuple[Operation, ...]) -> "Paths":
        return cls(
            frozenset(one.path for one in every if one.submits),
            frozenset(one.path for one in every if one.counts),
            frozenset(one.path for one in every if one.is_open),
            frozenset(one.path for one in every if one.is_probe),
            frozenset(one.path for one in every if one.is_form),
            frozenset(one.path for one in every if one.key_scope == ADMIN),
            frozenset(one.path for one in every if one.key_scope == ANY_KEY),
        )

    def scope_of(self, path: str) -> str:
        """What a key must be for to ask for this path; ANY_KEY: any key will do."""
        if path in self.admin:
            return ADMIN
        return ANY_KEY if path in self.information or path.startswith("/v1/models/") else INFERENCE


REPLAY = "X-Meshlm-Replay"  # `meshlm replay` asks: its requests are those of a recording already
GENERATES = (
    *NAMED,
    Parameter(REPLAY, "header", {"type": "string"}, "With any value the request is not recorded (--record-requests)."),
    Parameter(LAST_ID, "header", {"type": "string"}, f"With {KEY}: the id of the last event that the client has."),
)


def switch(name: str, description: str, *, default: bool = False) -> Parameter:
    """The parameter in the query that is true or false."""
    return Parameter(name, "query", {"type": "boolean", "default": default}, description)
