"""Every route: its path, its method of server.py, what it takes and how it may answer. server.py serves this table and openapi.py
describes it, so no route is without description."""

from types import GenericAlias
from typing import Any, NamedTuple

from msgspec import Struct

from meshlm.frontend import response_schema as responses
from meshlm.frontend import schema
from meshlm.frontend.errors import STATUS
from meshlm.frontend.messages import schema as anthropic
from meshlm.frontend.rendering import schema as rendering
from meshlm.frontend.responses_api import schema as responses_api
from meshlm.frontend.retry import KEY, LAST_ID, MAX_KEY_LENGTH
from meshlm.frontend.vectors import schema as vectors
from meshlm.runtime.api_keys import ADMIN, INFERENCE

TEXT, METRICS, HTML = "text/plain", "text/plain; version=0.0.4; charset=utf-8", "text/html; charset=utf-8"
EVENTS = "text/event-stream"
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
    body: type[Struct] | None = None
    methods: tuple[str, ...] = ("GET",)
    errors: tuple[int, ...] = (503,)  # a server that stops says so on every path
    parameters: tuple[Parameter, ...] = ()
    streams: bool = False
    plain_errors: tuple[int, ...] = ()  # statuses whose body is text
    is_open: bool = False  # needs no key
    error: type[Struct] = responses.ErrorResponse

    @property
    def generates(self) -> bool:
        """Whether it is of servers that give text."""
        return self.streams or self.handler.startswith("rendering.") or self.path.startswith("/v1/responses")


def _switch(name: str, description: str) -> Parameter:
    return Parameter(name, "query", {"type": "boolean", "default": False}, description)


_ASKS = (400, 404, 413, *STATUS.values())
_NAMED = (
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
_GENERATES = (
    *_NAMED,
    Parameter(LAST_ID, "header", {"type": "string"}, f"With {KEY}: the id of the last event that the client has."),
)
_MODEL = Parameter("model", "path", {"type": "string", "minLength": 1}, "One of the served names.")
_TRACES = (404, 409, 503, 504)
_STORED = (400, 404, 500, 503)
_RESPONSE = Parameter("response_id", "path", {"type": "string", "minLength": 1}, "The id of a response.")
_CONVERSATION = Parameter("conversation_id", "path", {"type": "string", "minLength": 1}, "The id of a conversation.")
_ITEM = Parameter("item_id", "path", {"type": "string", "minLength": 1}, "The id of an item.")
_PAGE = (
    Parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}, "How many."),
    Parameter("order", "query", {"enum": ["asc", "desc"], "default": "desc"}, "The oldest first, or the newest."),
    Parameter("after", "query", {"type": "string"}, "The id of the item before."),
)  # fmt: skip
_PROBE = "For load balancers; needs no key."

OPERATIONS = (
    Operation(
        "/v1/chat/completions",
        "chat",
        responses.ChatCompletionResponse,
        "Answer a conversation.",
        schema.ChatRequest,
        ("POST",),
        _ASKS,
        _GENERATES,
        streams=True,
    ),
    Operation(
        "/v1/completions",
        "completions",
        responses.CompletionResponse,
        "Complete one prompt or several.",
        schema.CompletionRequest,
        ("POST",),
        _ASKS,
        _GENERATES,
        streams=True,
    ),
    Operation(
        "/v1/responses",
        "create_response",
        responses_api.ResponsesResponse,
        "Answer a conversation, by OpenAI's newer API.",
        responses_api.ResponsesRequest,
        ("POST",),
        _ASKS,
        _NAMED,
        streams=True,
    ),
    Operation(
        "/v1/responses/{response_id}",
        "responses.retrieve",
        responses_api.ResponsesResponse,
        "A response that is stored; of one in the background also its events.",
        errors=_STORED,
        parameters=(
            _RESPONSE,
            _switch("stream", "Its events, also those that are still to come."),
            Parameter("starting_after", "query", {"type": "integer", "minimum": 0}, "With stream: the number of the event before."),
        ),
        streams=True,
    ),
    Operation(
        "/v1/responses/{response_id}",
        "responses.delete",
        responses_api.DeletedResponse,
        "Forget a response.",
        None,
        ("DELETE",),
        _STORED,
        (_RESPONSE,),
    ),
    Operation(
        "/v1/responses/{response_id}/cancel",
        "responses.cancel",
        responses_api.ResponsesResponse,
        "End a response in the background.",
        None,
        ("POST",),
        _STORED,
        (_RESPONSE,),
    ),
    Operation(
        "/v1/responses/{response_id}/input_items",
        "responses.input_items",
        responses_api.InputItems,
        "The input of a response, the newest item first.",
        errors=_STORED,
        parameters=(
            _RESPONSE,
            *_PAGE,
        ),
    ),
    Operation(
        "/v1/conversations",
        "responses.conversations.create",
        responses_api.ConversationResponse,
        "Begin a conversation to which responses add their items.",
        responses_api.ConversationRequest,
        ("POST",),
        (*_STORED, 413),
    ),
    Operation(
        "/v1/conversations/{conversation_id}",
        "responses.conversations.retrieve",
        responses_api.ConversationResponse,
        "A conversation.",
        errors=_STORED,
        parameters=(_CONVERSATION,),
    ),
    Operation(
        "/v1/conversations/{conversation_id}",
        "responses.conversations.update",
        responses_api.ConversationResponse,
        "Give a conversation other metadata.",
        responses_api.MetadataRequest,
        ("POST",),
        (*_STORED, 413),
        (_CONVERSATION,),
    ),
    Operation(
        "/v1/conversations/{conversation_id}",
        "responses.conversations.delete",
        responses_api.DeletedConversation,
        "Forget a conversation and its items.",
        None,
        ("DELETE",),
        _STORED,
        (_CONVERSATION,),
    ),
    Operation(
        "/v1/conversations/{conversation_id}/items",
        "responses.conversations.list_items",
        responses_api.InputItems,
        "Its items, the newest first.",
        errors=_STORED,
        parameters=(_CONVERSATION, *_PAGE),
    ),
    Operation(
        "/v1/conversations/{conversation_id}/items",
        "responses.conversations.add_items",
        responses_api.InputItems,
        "Add items at its end.",
        responses_api.ItemsRequest,
        ("POST",),
        (*_STORED, 413),
        (_CONVERSATION,),
    ),
    Operation(
        "/v1/conversations/{conversation_id}/items/{item_id}",
        "responses.conversations.item",
        "application/json",
        "One of its items.",
        errors=_STORED,
        parameters=(_CONVERSATION, _ITEM),
    ),
    Operation(
        "/v1/conversations/{conversation_id}/items/{item_id}",
        "responses.conversations.delete_item",
        responses_api.ConversationResponse,
        "Take an item out of it.",
        None,
        ("DELETE",),
        _STORED,
        (_CONVERSATION, _ITEM),
    ),
    Operation(
        "/v1/messages",
        "messages",
        anthropic.MessagesResponse,
        "Answer a conversation, by Anthropic's API.",
        anthropic.MessagesRequest,
        ("POST",),
        _ASKS,
        _NAMED,
        streams=True,
        error=anthropic.MessagesErrorResponse,
    ),
    Operation(
        "/v1/messages/count_tokens",
        "count_tokens",
        anthropic.CountTokensResponse,
        "The tokens that a conversation has, by Anthropic's API.",
        anthropic.CountTokensRequest,
        ("POST",),
        _ASKS,
        error=anthropic.MessagesErrorResponse,
    ),
    Operation(
        "/tokenize",
        "tokenize",
        responses.TokenizeResponse,
        "The token ids of a prompt or of a conversation.",
        schema.TokenizeRequest,
        ("POST",),
        _ASKS,
    ),
    Operation(
        "/detokenize",
        "detokenize",
        responses.DetokenizeResponse,
        "The text of token ids.",
        schema.DetokenizeRequest,
        ("POST",),
        _ASKS,
    ),
    Operation(
        "/v1/chat/completions/batch",
        "rendering.batch",
        responses.ChatCompletionResponse,
        "Answer several conversations; a choice is one's answer.",
        rendering.BatchChatRequest,
        ("POST",),
        _ASKS,
        _GENERATES,
    ),
    Operation(
        "/inference/v1/generate",
        "rendering.generate",
        rendering.GenerateResponse,
        "Token ids in, token ids out.",
        rendering.GenerateRequest,
        ("POST",),
        _ASKS,
        _GENERATES,
        streams=True,
    ),
    Operation(
        "/v1/chat/completions/render",
        "rendering.chat",
        rendering.RenderedRequest,
        "What a conversation asks of POST /inference/v1/generate.",
        schema.ChatRequest,
        ("POST",),
        _ASKS,
    ),
    Operation(
        "/v1/completions/render",
        "rendering.completion",
        GenericAlias(list, (rendering.RenderedRequest,)),
        "What each prompt asks of POST /inference/v1/generate.",
        schema.CompletionRequest,
        ("POST",),
        _ASKS,
    ),
    Operation(
        "/v1/chat/completions/derender",
        "rendering.derender_chat",
        responses.ChatCompletionResponse,
        "A conversation's answer, of its token ids.",
        rendering.DerenderChatRequest,
        ("POST",),
        _ASKS,
    ),
    Operation(
        "/v1/completions/derender",
        "rendering.derender_completion",
        responses.CompletionResponse,
        "A completion's answer, of its token ids.",
        rendering.DerenderCompletionRequest,
        ("POST",),
        _ASKS,
    ),
    Operation(
        "/invocations",
        "invocations",
        responses.ChatCompletionResponse,
        "For SageMaker: as the route that the body's fields name, which is /v1/chat/completions with messages.",
        schema.ChatRequest,
        ("POST",),
        _ASKS,
        _GENERATES,
        streams=True,
    ),
    Operation("/v1/models", "models", responses.ModelList, "The served names."),
    Operation("/v1/models/{model}", "model", responses.ModelCard, "One of them.", errors=(404, 503), parameters=(_MODEL,)),
    Operation("/version", "version", responses.Version, "The server's version."),
    Operation("/load", "load", responses.ServerLoad, "How many requests are answered now."),
    Operation("/metrics", "metrics", METRICS, "Metrics for Prometheus."),
    Operation("/health", "health", None, f"200 while the process lives. {_PROBE}", is_open=True),
    Operation("/ping", "health", None, "As /health, for SageMaker.", methods=("GET", "POST"), is_open=True),
    Operation(
        "/ready", "ready", TEXT, f"503 with the reason while requests cannot be served. {_PROBE}", plain_errors=(503,), is_open=True
    ),
    Operation("/start_profile", "start_profile", responses.Traces, "Begin a trace in every worker.", None, ("POST",), _TRACES),
    Operation("/stop_profile", "stop_profile", responses.Traces, "End the traces.", None, ("POST",), _TRACES),
)  # fmt: skip


def _vectors(paths: tuple[str, ...], answers: type[Struct], summary: str, body: type[Struct]) -> tuple[Operation, ...]:
    return tuple(Operation(path, "vectors", answers, summary, body, ("POST",), _ASKS, _NAMED[:2]) for path in paths)


VECTORS = (
    *_vectors(("/v1/embeddings",), vectors.EmbeddingResponse, "Vectors of texts.", vectors.EmbeddingRequest),
    *_vectors(("/v2/embed",), vectors.CohereEmbedResponse, "Vectors of texts, by Cohere's API.", vectors.CohereEmbedRequest),
    *_vectors(
        ("/pooling",), vectors.PoolingResponse, "Vectors of texts, of their tokens, or a classifier's scores.", vectors.PoolingRequest
    ),
    *_vectors(("/classify",), vectors.ClassificationResponse, "The classes of texts.", vectors.ClassificationRequest),
    *_vectors(("/score", "/v1/score"), vectors.ScoreResponse, "How well texts go with others.", vectors.ScoreRequest),
    *_vectors(
        ("/rerank", "/v1/rerank", "/v2/rerank"), vectors.RerankResponse, "Documents, the best for a query first.", vectors.RerankRequest
    ),
    Operation(
        "/invocations",
        "invocations",
        vectors.EmbeddingResponse,
        "For SageMaker: as the route that the body's fields name, which is /v1/embeddings with input.",
        vectors.EmbeddingRequest,
        ("POST",),
        _ASKS,
        _NAMED[:2],
    ),
)  # fmt: skip
TOKENIZER_INFO = (
    Operation(
        "/tokenizer_info", "tokenizer_info", rendering.TokenizerInfo, "The tokenizer's configuration and template."
    ),
)
_FORMAT = Parameter("config_format", "query", {"enum": ["text", "json"], "default": "text"}, "Of the configuration.")
DEVELOPMENT = (
    Operation(
        "/server_info",
        "server_info",
        responses.ServerInfo,
        "The configuration, the environment and the versions.",
        errors=(400, 503),
        parameters=(_FORMAT,),
    ),
    Operation(
        "/reset_prefix_cache",
        "reset_prefix_cache",
        responses.Reset,
        "Forget which prompts are computed.",
        None,
        ("POST",),
        (400, 503, 504),
        (
            _switch("reset_running_requests", "Compute those that run anew; otherwise success is false while some do."),
            _switch("reset_external", "Refused: there is no other prefix cache than the workers'."),
        ),
    ),
    Operation(
        "/pause",
        "pause",
        responses.Paused,
        "Compute no step until POST /resume.",
        None,
        ("POST",),
        (400, 409, 503, 504),
        (
            Parameter(
                "mode",
                "query",
                {"enum": ["abort", "keep"], "default": "abort"},
                "What becomes of requests.",
            ),
            Parameter(
                "clear_cache",
                "query",
                {"type": "boolean", "default": True},
                "With abort: POST /reset_prefix_cache, too.",
            ),
        ),
    ),
    Operation("/resume", "resume", responses.Paused, "Compute steps again.", None, ("POST",), (409, 503, 504)),
    Operation("/is_paused", "is_paused", responses.IsPaused, "Whether the mesh is paused."),
    Operation(
        "/abort_requests",
        "abort_requests",
        responses.Aborted,
        "End requests, whose answers have the finish_reason abort.",
        schema.AbortRequest,
        ("POST",),
        (400, 409, 413, 503, 504),
    ),
    Operation(
        "/rebalance_experts",
        "rebalance_experts",
        responses.Reset,
        "Move experts before the next step of all ranks (--enable-eplb), by what was counted of late.",
        None,
        ("POST",),
        (503, 504),
    ),
)
DOCUMENTATION = (
    Operation("/openapi.json", "openapi", "application/json", "This description (OpenAPI 3.1)."),
    Operation("/docs", "docs", HTML, "This description, to be read."),
    Operation("/redoc", "docs", HTML, "The same page as /docs."),
)


_TEXTS = ("/render", "/derender")  # ends of the paths that ask the tokenizer alone
# Requests for which the mesh computes: those that are refused while it is full.
SUBMITS = frozenset(
    op.path
    for op in (*OPERATIONS, *VECTORS)
    if op in VECTORS or (op.generates and "{" not in op.path and not op.path.endswith(_TEXTS))
)
ADMIN_PATHS = {"/start_profile", "/stop_profile", *(op.path for op in DEVELOPMENT)}
INFORMATION = {"/v1/models", "/version", "/load", "/metrics", *(op.path for op in DOCUMENTATION)}


def scope_of(path: str) -> str:
    """What a key must be for to ask for this path; "": any key will do."""
    if path in ADMIN_PATHS:
        return ADMIN
    return "" if path in INFORMATION or path.startswith("/v1/models/") else INFERENCE


OF_TEXT = ("/v1/conversations", "/v1/messages", "/v1/responses", "/invocations")


def served(
    *,
    documentation: bool,
    development: bool,
    pooling: bool = False,
    tokenizer_info: bool = False,
    renders_only: bool = False,
) -> tuple[Operation, ...]:
    """All routes of a server that gives vectors, gives text (--runner), or renders it alone; with or without its documentation
    (--disable-fastapi-docs), those for development (--server-dev-mode) and the tokenizer's (--enable-tokenizer-info-endpoint)."""
    of_both = (op for op in OPERATIONS if not op.generates and not op.path.startswith(OF_TEXT))
    own = (*of_both, *VECTORS) if pooling else OPERATIONS
    if renders_only:
        own = tuple(op for op in OPERATIONS if not op.generates or op.path.endswith(("render", "derender")))
    own += TOKENIZER_INFO if tokenizer_info else ()
    return own + (DEVELOPMENT if development else ()) + (DOCUMENTATION if documentation else ())
