"""Routes for operators: profiles, pauses, settings and what changes the workers between two steps. Called by routes.py."""

import asyncio
from functools import partial
from typing import TypeVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import bodies
from meshlm.frontend.http.endpoint import json_response
from meshlm.frontend.http.operation import Group, OfClass, Parameter, route, switch
from meshlm.frontend.observe import information
from meshlm.frontend.openai import response_schema as responses
from meshlm.frontend.openai import schema
from meshlm.frontend.operator import mesh_operations as operations
from meshlm.frontend.operator import weights
from meshlm.frontend.requests.generation import Backend
from meshlm.frontend.requests.request_reader import RequestReader
from meshlm.runtime.api_keys import ADMIN

_TRACES = (404, 409, 504)
_FORMAT = Parameter("config_format", "query", {"enum": ["text", "json"], "default": "text"}, "Of the configuration.")
_MODE = Parameter("mode", "query", {"enum": ["abort", "wait", "keep"], "default": "abort"}, "What becomes of requests.")
_LEVEL = Parameter(
    "level",
    "query",
    {"enum": [0, 1, 2], "default": 1},
    "0: pause alone; 1: the weights go to the host's memory; 2: they are dropped, and loaded again.",
)
_TAGS = Parameter(
    "tags",
    "query",
    {"type": "array", "items": {"enum": ["weights", "kv_cache", "scheduling"]}},
    "Of these alone; steps wait until both are there. scheduling: after level 0.",
)
_ALL_RANKS = switch("include_dp", "Of all data-parallel ranks.", default=True)
Body = TypeVar("Body", bound=Struct)
post_route = partial(route, methods=("POST",))
trace_route = partial(post_route, answers=responses.Traces, errors=_TRACES, group=Group.ANY)


class OperatorRoutes:
    routes = OfClass(Group.DEVELOPMENT, ADMIN)

    def __init__(self, backend: Backend, reader: RequestReader) -> None:
        self._backend, self._reader = backend, reader

    @trace_route("/start_profile", "Begin a trace in every worker.")
    async def start_profile(self, request: Request) -> HttpResponse:
        return json_response(await operations.profile(self._backend.operations, start=True))

    @trace_route("/stop_profile", "End the traces.")
    async def stop_profile(self, request: Request) -> HttpResponse:
        return json_response(await operations.profile(self._backend.operations, start=False))

    @post_route(
        "/reset_prefix_cache",
        answers=responses.Reset,
        errors=(504,),
        parameters=(
            switch("reset_running_requests", "Compute those that run anew; otherwise success is false while some do."),
            switch("reset_external", "Refused: there is no other prefix cache than the workers'."),
        ),
    )
    async def reset_prefix_cache(self, request: Request) -> HttpResponse:
        """Forget which prompts are computed."""
        return json_response(await operations.reset_prefix_cache(self._backend.operations, request.query_params))

    @post_route(
        "/pause",
        answers=responses.Paused,
        errors=(409, 504),
        parameters=(
            _MODE,
            switch("clear_cache", "With abort and wait: POST /reset_prefix_cache, too.", default=True),
            switch("wait_for_inflight_requests", "The older name of mode wait."),
        ),
    )
    async def pause(self, request: Request) -> HttpResponse:
        """Compute no step until POST /resume."""
        return json_response(await operations.pause(self._backend.operations, request.query_params))

    @post_route("/resume", "Compute steps again.", responses.Paused, errors=(409, 504))
    async def resume(self, request: Request) -> HttpResponse:
        return json_response(await operations.resume(self._backend.operations))

    @post_route("/sleep", errors=_TRACES, parameters=(_LEVEL, _MODE))
    async def sleep(self, request: Request) -> HttpResponse:
        """Give the memory of weights and KV cache back until POST /wake_up (--enable-sleep-mode)."""
        await operations.sleep(self._backend.operations, request.query_params)
        return HttpResponse()

    @post_route("/wake_up", "Take the memory again, and compute steps.", errors=_TRACES, parameters=(_TAGS,))
    async def wake_up(self, request: Request) -> HttpResponse:
        await operations.wake_up(self._backend.operations, request.query_params.getlist("tags"))
        return HttpResponse()

    @route("/is_sleeping", "Whether it sleeps, at whatever level.", responses.IsSleeping, errors=(404,))
    async def is_sleeping(self, request: Request) -> HttpResponse:
        return json_response(await operations.is_sleeping(self._backend.operations))

    @route("/get_world_size", answers=responses.WorldSize, parameters=(_ALL_RANKS,))
    async def get_world_size(self, request: Request) -> HttpResponse:
        """The number of workers."""
        return json_response(operations.world_size(self._backend.config, request.query_params))

    @route("/is_paused", "Whether the mesh is paused.", answers=responses.IsPaused)
    async def is_paused(self, request: Request) -> HttpResponse:
        return json_response({"is_paused": (await self._backend.operations.fresh_stats()).paused})

    @route("/settings", "The settings that may change while the server runs.", schema.Settings, group=Group.ANY)
    async def settings(self, request: Request) -> HttpResponse:
        return json_response(operations.settings(self._backend.config))

    @route("/settings", answers=schema.Settings, body=schema.Settings, errors=(400,), group=Group.ANY)
    async def change_settings(self, request: Request) -> HttpResponse:
        """Change some of them, in all processes."""
        body = await self._body(request, schema.Settings)
        return json_response(operations.change_settings(self._backend.operations, body))

    @route("/abort_requests", answers=responses.Aborted, body=schema.AbortRequest, errors=(409, 504))
    async def abort_requests(self, request: Request) -> HttpResponse:
        """End requests, whose answers have the finish_reason abort."""
        body = await self._body(request, schema.AbortRequest)
        return json_response(await operations.abort_requests(self._backend.operations, tuple(body.request_ids or ())))

    @route("/collective_rpc", answers=responses.RpcResults, body=schema.CollectiveRpcRequest, errors=(404, 504))
    async def collective_rpc(self, request: Request) -> HttpResponse:
        """Call a method of --worker-extension-cls in every worker; or reload_weights, which reads the weights again."""
        body = await self._body(request, schema.CollectiveRpcRequest)
        if body.method == "reload_weights":
            return json_response(await weights.reload(self._backend.operations, body))
        return json_response(await operations.collective_rpc(self._backend.operations, body))

    @route(
        "/scale_elastic_ep",
        "Have another number of data-parallel ranks, while the mesh serves; answers when that is done. 409 where they share experts.",
        responses.Scaled,
        schema.ScaleRequest,
        errors=(409, 500, 504),
    )
    async def scale_elastic_ep(self, request: Request) -> HttpResponse:
        body = await self._body(request, schema.ScaleRequest)
        return json_response(await operations.scale(self._backend.operations, body))

    @post_route("/is_scaling_elastic_ep", answers=responses.IsScaling, errors=(504,))
    async def is_scaling_elastic_ep(self, request: Request) -> HttpResponse:
        """Whether ranks are being added or removed."""
        return json_response(await operations.is_scaling(self._backend.operations))

    @post_route("/rebalance_experts", answers=responses.Reset, errors=(504,))
    async def rebalance_experts(self, request: Request) -> HttpResponse:
        """Move experts before the next step of all ranks (--enable-eplb), by what was counted of late."""
        return json_response(await operations.rebalance_experts(self._backend.operations))

    @route("/server_info", answers=responses.ServerInfo, parameters=(_FORMAT,))
    async def server_info(self, request: Request) -> HttpResponse:
        """The configuration, the environment and the versions."""
        backend = self._backend
        version = backend.figures.now.weights
        return json_response(await asyncio.to_thread(information.server, backend.config, request.query_params, version))

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        """The body as this Struct; fields that nobody knows are noted."""
        body, unknown = await self._reader.read(request, lambda request, raw: bodies.decode(raw, kind))
        self._backend.observer.ignored(unknown, request.url.path)
        return body
