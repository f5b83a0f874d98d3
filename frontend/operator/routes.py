"""Routes for operators: profiles, pauses, settings and what changes the workers between two steps. Called by routes.py."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import bodies
from meshlm.frontend.http.endpoint import json_response
from meshlm.frontend.observe import information
from meshlm.frontend.openai import response_schema as responses
from meshlm.frontend.openai import schema
from meshlm.frontend.openai.schema import AbortRequest, CollectiveRpcRequest, ScaleRequest, Settings
from meshlm.frontend.operator import operating
from meshlm.frontend.requests.generation import Backend
from meshlm.frontend.routes.operation import Group, OfClass, Parameter, route, switch
from meshlm.runtime.api_keys import ADMIN

_TRACES = (404, 409, 503, 504)
_FORMAT = Parameter("config_format", "query", {"enum": ["text", "json"], "default": "text"}, "Of the configuration.")
Read = Callable[[Request, Callable[[Request, bytes], Any]], Awaitable[Any]]


class OperatorRoutes:
    """`read` gives a request's body to a function, as routes.py does for all routes."""

    routes = OfClass(Group.DEVELOPMENT, ADMIN)

    def __init__(self, backend: Backend, read: Read) -> None:
        self._backend, self._read = backend, read

    @route(
        "/start_profile",
        "Begin a trace in every worker.",
        answers=responses.Traces,
        methods=("POST",),
        errors=_TRACES,
        group=Group.ANY,
    )
    async def start_profile(self, request: Request) -> HttpResponse:
        return await self._profile(start=True)

    @route(
        "/stop_profile", "End the traces.", answers=responses.Traces, methods=("POST",), errors=_TRACES, group=Group.ANY
    )
    async def stop_profile(self, request: Request) -> HttpResponse:
        return await self._profile(start=False)

    async def _profile(self, *, start: bool) -> HttpResponse:
        return json_response(await operating.profile(self._backend.operations, start=start))

    @route(
        "/reset_prefix_cache",
        "Forget which prompts are computed.",
        answers=responses.Reset,
        methods=("POST",),
        errors=(400, 503, 504),
        parameters=(
            switch("reset_running_requests", "Compute those that run anew; otherwise success is false while some do."),
            switch("reset_external", "Refused: there is no other prefix cache than the workers'."),
        ),
    )
    async def reset_prefix_cache(self, request: Request) -> HttpResponse:
        return json_response(await operating.reset_prefix_cache(self._backend.operations, request.query_params))

    @route(
        "/pause",
        "Compute no step until POST /resume.",
        answers=responses.Paused,
        methods=("POST",),
        errors=(400, 409, 503, 504),
        parameters=(
            Parameter(
                "mode", "query", {"enum": ["abort", "wait", "keep"], "default": "abort"}, "What becomes of requests."
            ),
            Parameter(
                "clear_cache",
                "query",
                {"type": "boolean", "default": True},
                "With abort and wait: POST /reset_prefix_cache, too.",
            ),
            switch("wait_for_inflight_requests", "The older name of mode wait."),
        ),
    )
    async def pause(self, request: Request) -> HttpResponse:
        return json_response(await operating.pause(self._backend.operations, request.query_params))

    @route("/resume", "Compute steps again.", answers=responses.Paused, methods=("POST",), errors=(409, 503, 504))
    async def resume(self, request: Request) -> HttpResponse:
        return json_response(await operating.resume(self._backend.operations))

    @route(
        "/sleep",
        "Give the memory of weights and KV cache back until POST /wake_up (--enable-sleep-mode).",
        methods=("POST",),
        errors=(400, 404, 409, 503, 504),
        parameters=(
            Parameter(
                "level",
                "query",
                {"enum": [0, 1, 2], "default": 1},
                "0: pause alone; 1: the weights go to the host's memory; 2: they are dropped, and loaded again.",
            ),
            Parameter(
                "mode", "query", {"enum": ["abort", "wait", "keep"], "default": "abort"}, "What becomes of requests."
            ),
        ),
    )
    async def sleep(self, request: Request) -> HttpResponse:
        await operating.sleep(self._backend.operations, request.query_params)
        return HttpResponse()

    @route(
        "/wake_up",
        "Take the memory again, and compute steps.",
        methods=("POST",),
        errors=(400, 404, 409, 503, 504),
        parameters=(
            Parameter(
                "tags",
                "query",
                {"type": "array", "items": {"enum": ["weights", "kv_cache", "scheduling"]}},
                "Of these alone; steps wait until both are there. scheduling: after level 0.",
            ),
        ),
    )
    async def wake_up(self, request: Request) -> HttpResponse:
        await operating.wake_up(self._backend.operations, request.query_params.getlist("tags"))
        return HttpResponse()

    @route("/is_sleeping", "Whether it sleeps, at whatever level.", answers=responses.IsSleeping, errors=(404, 503))
    async def is_sleeping(self, request: Request) -> HttpResponse:
        return json_response(await operating.is_sleeping(self._backend.operations))

    @route(
        "/get_world_size",
        "The number of workers.",
        answers=responses.WorldSize,
        errors=(400, 503),
        parameters=(
            Parameter("include_dp", "query", {"type": "boolean", "default": True}, "Of all data-parallel ranks."),
        ),
    )
    async def get_world_size(self, request: Request) -> HttpResponse:
        return json_response(operating.world_size(self._backend.config, request.query_params))

    @route("/is_paused", "Whether the mesh is paused.", answers=responses.IsPaused)
    async def is_paused(self, request: Request) -> HttpResponse:
        return json_response({"is_paused": (await self._backend.operations.fresh_stats()).paused})

    @route("/settings", "The settings that may change while the server runs.", answers=schema.Settings, group=Group.ANY)
    async def settings(self, request: Request) -> HttpResponse:
        return json_response(operating.settings(self._backend.config))

    @route(
        "/settings",
        "Change some of them, in all processes.",
        answers=schema.Settings,
        body=schema.Settings,
        errors=(400, 413, 503),
        group=Group.ANY,
    )
    async def change_settings(self, request: Request) -> HttpResponse:
        body, unknown = await self._read(request, lambda request, raw: bodies.decode(raw, Settings))
        self._backend.observer.ignored(unknown, request.url.path)
        return json_response(operating.change_settings(self._backend.operations, body))

    @route(
        "/abort_requests",
        "End requests, whose answers have the finish_reason abort.",
        answers=responses.Aborted,
        body=schema.AbortRequest,
        errors=(400, 409, 413, 503, 504),
    )
    async def abort_requests(self, request: Request) -> HttpResponse:
        body, unknown = await self._read(request, lambda request, raw: bodies.decode(raw, AbortRequest))
        self._backend.observer.ignored(unknown, request.url.path)
        return json_response(await operating.abort_requests(self._backend.operations, tuple(body.request_ids or ())))

    @route(
        "/collective_rpc",
        "Call a method of --worker-extension-cls in every worker.",
        answers=responses.RpcResults,
        body=schema.CollectiveRpcRequest,
        errors=(400, 404, 413, 503, 504),
    )
    async def collective_rpc(self, request: Request) -> HttpResponse:
        body, unknown = await self._read(request, lambda request, raw: bodies.decode(raw, CollectiveRpcRequest))
        self._backend.observer.ignored(unknown, request.url.path)
        return json_response(await operating.collective_rpc(self._backend.operations, body))

    @route(
        "/scale_elastic_ep",
        "Have another number of data-parallel ranks, while the mesh serves; answers when that is done. 409 where they share experts.",
        answers=responses.Scaled,
        body=schema.ScaleRequest,
        errors=(400, 409, 413, 500, 503, 504),
    )
    async def scale_elastic_ep(self, request: Request) -> HttpResponse:
        body, unknown = await self._read(request, lambda request, raw: bodies.decode(raw, ScaleRequest))
        self._backend.observer.ignored(unknown, request.url.path)
        return json_response(await operating.scale(self._backend.operations, body))

    @route(
        "/is_scaling_elastic_ep",
        "Whether ranks are being added or removed.",
        answers=responses.IsScaling,
        methods=("POST",),
        errors=(503, 504),
    )
    async def is_scaling_elastic_ep(self, request: Request) -> HttpResponse:
        return json_response(await operating.is_scaling(self._backend.operations))

    @route(
        "/rebalance_experts",
        "Move experts before the next step of all ranks (--enable-eplb), by what was counted of late.",
        answers=responses.Reset,
        methods=("POST",),
        errors=(503, 504),
    )
    async def rebalance_experts(self, request: Request) -> HttpResponse:
        return json_response(await operating.rebalance_experts(self._backend.operations))

    @route(
        "/server_info",
        "The configuration, the environment and the versions.",
        answers=responses.ServerInfo,
        errors=(400, 503),
        parameters=(_FORMAT,),
    )
    async def server_info(self, request: Request) -> HttpResponse:
        return json_response(await asyncio.to_thread(information.server, self._backend, request.query_params))
