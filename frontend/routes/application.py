"""All routes of one frontend, and the ASGI application around them. Made by frontend/listener.py.

What a route has belongs to one request; state across requests is the process's (io.py). requests/generation.py answers completions.
"""

from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from meshlm.frontend.dashboard.routes import DashboardRoutes
from meshlm.frontend.endpoints import PluginRoute
from meshlm.frontend.http import bodies, endpoint
from meshlm.frontend.http.errors import NOT_SERVED, HttpError
from meshlm.frontend.http.operation import ANY_KEY, HTML, NAMED, Group, Operation, Paths, operations_of, route
from meshlm.frontend.http.web_pages import WebPages
from meshlm.frontend.messages.routes import MessageRoutes
from meshlm.frontend.ollama.routes import OllamaGeneration, OllamaInformation, OllamaVectors
from meshlm.frontend.openai import response_schema as responses
from meshlm.frontend.openai import schema
from meshlm.frontend.rendering.routes import Rendering
from meshlm.frontend.requests.generation import Backend, Generation
from meshlm.frontend.requests.generative_scoring import Scoring
from meshlm.frontend.requests.request_reader import RequestReader
from meshlm.frontend.responses_api.conversations import ConversationRoutes
from meshlm.frontend.responses_api.input_routes import InputRoutes
from meshlm.frontend.responses_api.routes import ResponseRoutes
from meshlm.frontend.routes import openapi
from meshlm.frontend.routes.adapter_routes import AdapterRoutes
from meshlm.frontend.routes.operator_routes import OperatorRoutes
from meshlm.frontend.routes.request_schema import Served
from meshlm.frontend.routes.text_routes import InformationRoutes, TextRoutes, text_route
from meshlm.frontend.routes.weight_routes import WeightRoutes
from meshlm.frontend.speech.routes import SpeechRoutes
from meshlm.frontend.vectors import schema as vectors
from meshlm.frontend.vectors.routes import VectorRoutes
from meshlm.runtime.api_keys import ApiKeys

# Of POST /invocations: the field that says which route a body is for; the first that is there counts.
INVOCATIONS = (
    ("messages", "/v1/chat/completions"),
    ("prompt", "/v1/completions"),
    ("query", "/rerank"),
    ("text_1", "/score"),
    ("queries", "/score"),
    ("data_1", "/score"),
    ("task", "/pooling"),
    ("data", "/pooling"),
)
# Where the fields are input or messages: by what the model does unasked.
PATH_OF_TASK = {"embed": "/v1/embeddings", "classify": "/classify"}
KEPT = (b"authorization", b"x-request-id", b"x-data-parallel-rank")  # of a request, where a plug-in asks on its behalf
Handler = Callable[[Request], Awaitable[HttpResponse]]


class Application:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        generation = Generation(backend)
        self.unsent = generation.unsent
        self.reader = reader = RequestReader(backend, PATHS.submits.__contains__)
        self.responses = ResponseRoutes(backend, generation, reader)
        self.keys = ApiKeys.of_server(backend.config.server)
        rooms = (
            self,
            TextRoutes(backend, generation, reader),
            self.responses,
            self.responses.conversations,
            InputRoutes(backend, generation, reader, self.responses.history),
            MessageRoutes(backend, generation, reader),
            OllamaGeneration(backend, generation, reader),
            OllamaVectors(backend, generation, reader),
            OllamaInformation(backend, reader),
            Rendering(backend, generation, reader),
            Scoring(backend.resolved, generation, reader),
            VectorRoutes(backend, generation, reader),
            SpeechRoutes(backend, generation, reader),
            InformationRoutes(backend, reader),
            AdapterRoutes(backend, reader),
            OperatorRoutes(backend, reader),
            WeightRoutes(backend, reader),
            DashboardRoutes(backend.observer),
        )
        wanted = self.operations()
        self._handlers: list[tuple[Operation, Handler]] = [
            (operation, getattr(room, operation.handler))
            for room in rooms
            for operation in operations_of(type(room))
            if operation in wanted
        ]
        self._handlers += [(one.operation, partial(self._plugin, one)) for one in backend.endpoints]
        self._paths = Paths.of_operations((*OPERATIONS, *(one.operation for one in backend.endpoints)))

    async def _plugin(self, plugin: PluginRoute, request: Request) -> HttpResponse:
        """The answer of a plug-in's route."""
        async with self.reader.body(request, is_json=False) as raw:
            return await plugin.answer(request, raw, self._ask)

    async def _ask(self, request: Request, method: str, path: str, raw: bytes) -> HttpResponse:
        """The answer of another route to what a plug-in asks. HttpError."""
        path_of, _, query = path.partition("?")
        handlers = {operation.path: handler for operation, handler in self._handlers if method in operation.methods}
        if (handler := handlers.get(path_of)) is None:
            raise HttpError(404, NOT_SERVED.get(path_of, f"{method} {path} is not served here"))
        headers = [(b"content-type", b"application/json"), *(one for one in request.scope["headers"] if one[0] in KEPT)]
        scope = {**request.scope, "path": path_of, "method": method, "headers": headers, "query_string": query.encode()}
        named = Request(scope, request.receive)
        named._body = raw
        return await handler(named)

    def operations(self) -> tuple[Operation, ...]:
        server, resolved = self._backend.config.server, self._backend.resolved
        return served(
            documentation=not server.disable_fastapi_docs,
            development=server.server_dev_mode,
            pooling=resolved.pooling is not None,
            speech=resolved.speech is not None,
            tokenizer_info=server.enable_tokenizer_info_endpoint,
            renders_only=resolved.renders_only,
            dashboard=server.max_dashboards > 0,
            adapters=self._backend.config.adapters.enable_lora
            and self._backend.config.adapters.allow_runtime_lora_updating,
            apis=server.api,
        )

    def app(self) -> Any:
        """The ASGI application: answers' headers, a proxy's path, what web pages may, CORS, keys, the load, then the routes."""
        backend, server = self._backend, self._backend.config.server
        refused = backend.observer.refused
        shed = endpoint.load_shedder(backend.readiness.refusal, PATHS.submits)
        keys = endpoint.KeyCheck(self.keys, backend.observer.rates, self._paths)
        by_path: dict[str, dict[str, endpoint.Endpoint]] = {}
        for operation, handler in self._handlers:
            route_endpoint = endpoint.Endpoint(handler, refused if operation.submits else None)
            by_path.setdefault(operation.pattern, {}).update(dict.fromkeys(operation.methods, route_endpoint))
        cors = Middleware(
            CORSMiddleware,
            allow_origins=server.cors_origins,
            allow_methods=server.allowed_methods,
            allow_headers=server.allowed_headers,
            allow_credentials=server.allow_credentials,
            allow_private_network=True,
        )
        app = Starlette(
            routes=[
                Route(path, endpoint.ByMethod(by_path[path]), methods=list(by_path[path]))
                for path in sorted(by_path, key=lambda path: "{" in path)  # so that no name takes another route's path
            ],
            middleware=[
                Middleware(endpoint.RootPath, root=server.root_path),
                Middleware(endpoint.Gate, WebPages(server, PATHS).check, refused, PATHS.submits),
                cors,
                Middleware(endpoint.Gate, keys.check, refused, PATHS.submits),
                Middleware(endpoint.Gate, shed, refused, PATHS.submits),
            ],
            exception_handlers={HTTPException: endpoint.plain_error},
        )
        return endpoint.AnswerHeaders(app, lambda: backend.figures.now, PATHS.submits)

    @text_route(
        "/invocations",
        "For SageMaker: as the route that the body's fields name, which is /v1/chat/completions with messages.",
        responses.ChatCompletionResponse,
        schema.ChatRequest,
    )
    @route(
        "/invocations",
        "For SageMaker: as the route that the body's fields name: with input or messages /v1/embeddings, /classify or /pooling, "
        "by what the model does first.",
        answers=vectors.PoolingResponse,
        body=vectors.PoolingRequest,
        parameters=NAMED[:2],
        group=Group.VECTORS,
    )
    async def invocations(self, request: Request) -> HttpResponse:
        async with self.reader.body(request) as raw:
            fields = bodies.fields_of(raw)
        handlers = {operation.path: handler for operation, handler in self._handlers}
        pooling = self._backend.resolved.pooling
        inputs = "" if pooling is None else PATH_OF_TASK.get(pooling.tasks[0], "/pooling")
        forms = [one for one in (*INVOCATIONS, ("input", inputs), ("messages", inputs)) if one[1] in handlers]
        path = next((path for field, path in forms if field in fields), "")
        if not path:
            wanted = ", ".join(f"{field} ({path})" for field, path in forms)
            raise HttpError(400, f"the body is for no route that is served; it needs one of {wanted}")
        named = Request({**request.scope, "path": path}, request.receive)
        named._body = raw
        return await handlers[path](named)

    @route("/openapi.json", answers="application/json", group=Group.DOCUMENTATION, key_scope=ANY_KEY)
    async def openapi(self, request: Request) -> HttpResponse:
        """This description (OpenAPI 3.1)."""
        return endpoint.json_response(self._document())

    @route("/docs", "This description, to be read.", HTML, group=Group.DOCUMENTATION, key_scope=ANY_KEY)
    @route("/redoc", "The same page as /docs.", HTML, group=Group.DOCUMENTATION, key_scope=ANY_KEY)
    async def docs(self, request: Request) -> HttpResponse:
        return HttpResponse(openapi.page(self._document()), media_type=HTML, headers=openapi.PAGE_HEADERS)

    def _document(self) -> dict[str, Any]:
        server, resolved = self._backend.config.server, self._backend.resolved
        facts = Served(
            resolved.served_names,
            resolved.spec.vocab_size,
            server.max_logprobs,
            server.enable_auto_tool_choice,
            server.trust_request_chat_template,
            self._backend.config.scheduler.scheduling_policy == "priority",
            bool(server.reasoning_parser),
            server.enable_prompt_embeds,
            resolved.num_speculative_tokens,
            self._backend.config.worker.deterministic,
            resolved.pooling,
            resolved.max_model_len,
            resolved.spec.media is not None,
        )
        return openapi.document(self.operations(), self._backend.version, bool(self.keys), facts, server.root_path)


OPERATIONS = operations_of(
    TextRoutes,
    ResponseRoutes,
    ConversationRoutes,
    InputRoutes,
    MessageRoutes,
    OllamaGeneration,
    OllamaVectors,
    OllamaInformation,
    Rendering,
    Scoring,
    VectorRoutes,
    SpeechRoutes,
    Application,
    InformationRoutes,
    AdapterRoutes,
    OperatorRoutes,
    WeightRoutes,
    DashboardRoutes,
)
PATHS = Paths.of_operations(OPERATIONS)


def served(
    *,
    documentation: bool,
    development: bool,
    pooling: bool = False,
    speech: bool = False,
    tokenizer_info: bool = False,
    renders_only: bool = False,
    dashboard: bool = False,
    adapters: bool = False,
    apis: Collection[str] = (),
) -> tuple[Operation, ...]:
    """All routes of a server that gives vectors, gives text (--runner), transcribes audio, or renders texts alone. apis: of --api."""
    groups = {
        Group.ANY: True,
        Group.TEXT: not (pooling or speech),
        Group.GENERATION: not (pooling or speech or renders_only),
        Group.VECTORS: pooling,
        Group.SPEECH: speech,
        Group.TOKENIZER_INFO: tokenizer_info,
        Group.DASHBOARD: dashboard,
        Group.ADAPTERS: adapters,
        Group.DEVELOPMENT: development,
        Group.DOCUMENTATION: documentation,
    }
    ends = ("/render", "/derender") if renders_only else ()
    has_api = [one for one in OPERATIONS if one.api in ("", *apis)]
    return tuple(one for one in has_api if groups[one.group] or one.path.endswith(ends))
