"""Every route: its path, its method of routes.py, what it takes and how it may answer. routes.py serves this table and openapi.py
describes it, so no route is without description."""

from types import GenericAlias

from meshlm.frontend.messages import schema as anthropic
from meshlm.frontend.openai import response_schema as responses
from meshlm.frontend.openai import schema
from meshlm.frontend.operator.operator_operations import DASHBOARD, DEVELOPMENT, DOCUMENTATION, TOKENIZER_INFO
from meshlm.frontend.rendering import schema as rendering
from meshlm.frontend.requests import generative_scoring
from meshlm.frontend.requests.retry import KEY, LAST_ID
from meshlm.frontend.responses_api import schema as responses_api
from meshlm.frontend.routes.operation import ASKS, METRICS, NAMED, TEXT, Operation, Parameter, switch
from meshlm.frontend.speech.operations import SPEECH
from meshlm.frontend.vectors.operations import VECTORS
from meshlm.runtime.api_keys import ADMIN, INFERENCE

_GENERATES = (
    *NAMED,
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
        ASKS,
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
        ASKS,
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
        ASKS,
        NAMED,
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
            switch("stream", "Its events, also those that are still to come."),
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
        ASKS,
        NAMED,
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
        ASKS,
        error=anthropic.MessagesErrorResponse,
    ),
    Operation(
        "/tokenize",
        "tokenize",
        responses.TokenizeResponse,
        "The token ids of a prompt or of a conversation.",
        schema.TokenizeRequest,
        ("POST",),
        ASKS,
    ),
    Operation(
        "/detokenize",
        "detokenize",
        responses.DetokenizeResponse,
        "The text of token ids.",
        schema.DetokenizeRequest,
        ("POST",),
        ASKS,
    ),
    Operation(
        "/v1/chat/completions/batch",
        "rendering.batch",
        responses.ChatCompletionResponse,
        "Answer several conversations; a choice is one's answer.",
        rendering.BatchChatRequest,
        ("POST",),
        ASKS,
        _GENERATES,
    ),
    Operation(
        "/inference/v1/generate",
        "rendering.generate",
        rendering.GenerateResponse,
        "Token ids in, token ids out.",
        rendering.GenerateRequest,
        ("POST",),
        ASKS,
        _GENERATES,
        streams=True,
    ),
    Operation(
        "/generative_scoring",
        "scoring.score",
        generative_scoring.GenerativeScoringResponse,
        "How likely each item goes on with a certain token.",
        generative_scoring.GenerativeScoringRequest,
        ("POST",),
        ASKS,
        NAMED,
    ),
    Operation(
        "/v1/chat/completions/render",
        "rendering.chat",
        rendering.RenderedRequest,
        "What a conversation asks of POST /inference/v1/generate.",
        schema.ChatRequest,
        ("POST",),
        ASKS,
    ),
    Operation(
        "/v1/completions/render",
        "rendering.completion",
        GenericAlias(list, (rendering.RenderedRequest,)),
        "What each prompt asks of POST /inference/v1/generate.",
        schema.CompletionRequest,
        ("POST",),
        ASKS,
    ),
    Operation(
        "/v1/chat/completions/derender",
        "rendering.derender_chat",
        responses.ChatCompletionResponse,
        "A conversation's answer, of its token ids.",
        rendering.DerenderChatRequest,
        ("POST",),
        ASKS,
    ),
    Operation(
        "/v1/completions/derender",
        "rendering.derender_completion",
        responses.CompletionResponse,
        "A completion's answer, of its token ids.",
        rendering.DerenderCompletionRequest,
        ("POST",),
        ASKS,
    ),
    Operation(
        "/invocations",
        "invocations",
        responses.ChatCompletionResponse,
        "For SageMaker: as the route that the body's fields name, which is /v1/chat/completions with messages.",
        schema.ChatRequest,
        ("POST",),
        ASKS,
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
    Operation("/start_profile", "operator.start_profile", responses.Traces, "Begin a trace in every worker.", None, ("POST",), _TRACES),
    Operation("/stop_profile", "operator.stop_profile", responses.Traces, "End the traces.", None, ("POST",), _TRACES),
    Operation("/settings", "operator.settings", schema.Settings, "The settings that may change while the server runs."),
    Operation(
        *("/settings", "operator.change_settings", schema.Settings, "Change some of them, in all processes.", schema.Settings),
        *(("POST",), (400, 413, 503)),
    ),
)  # fmt: skip

_TEXTS = ("/render", "/derender")  # ends of the paths that ask the tokenizer alone
# Requests for which the mesh computes: those that are refused while it is full.
SUBMITS = frozenset(
    op.path
    for op in (*OPERATIONS, *VECTORS, *SPEECH)
    if op in VECTORS or (op.generates and "{" not in op.path and not op.path.endswith(_TEXTS))
)
PROBES = frozenset(("/health", "/ready", "/ping"))  # load balancers ask by names of their own; there is no data in them
SETTINGS = "/settings"
ADMIN_PATHS = {"/start_profile", "/stop_profile", SETTINGS, *(op.path for op in (*DEVELOPMENT, *DASHBOARD))}
INFORMATION = {"/v1/models", "/version", "/load", "/metrics", *(op.path for op in DOCUMENTATION)}


def scope_of(path: str) -> str:
    """What a key must be for to ask for this path; "": any key will do."""
    if path in ADMIN_PATHS:
        return ADMIN
    return "" if path in INFORMATION or path.startswith("/v1/models/") else INFERENCE


# Requests that count for their key's limits: those that compute or read texts.
COUNTED = SUBMITS | {
    op.path
    for op in OPERATIONS
    if "POST" in op.methods and "{" not in op.path and not op.is_open and scope_of(op.path) == INFERENCE
}
OF_TEXT = ("/v1/conversations", "/v1/messages", "/v1/responses", "/invocations")


def served(
    *,
    documentation: bool,
    development: bool,
    pooling: bool = False,
    speech: bool = False,
    tokenizer_info: bool = False,
    renders_only: bool = False,
    dashboard: bool = False,
) -> tuple[Operation, ...]:
    """All routes of a server that gives vectors, gives text (--runner), transcribes audio, or renders texts alone; with or without its
    documentation (--disable-fastapi-docs), its dashboard (--max-dashboards), those for development (--server-dev-mode) and the
    tokenizer's (--enable-tokenizer-info-endpoint)."""
    of_both = (op for op in OPERATIONS if not op.generates and not op.path.startswith(OF_TEXT))
    own = (*of_both, *(VECTORS if pooling else SPEECH)) if pooling or speech else OPERATIONS
    if renders_only:
        own = tuple(op for op in OPERATIONS if not op.generates or op.path.endswith(("render", "derender")))
    own += (TOKENIZER_INFO if tokenizer_info else ()) + (DASHBOARD if dashboard else ())
    return own + (DEVELOPMENT if development else ()) + (DOCUMENTATION if documentation else ())
