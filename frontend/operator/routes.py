"""Routes for operators: profiles, pauses, settings and what changes the workers between two steps. Called by routes.py."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import bodies
from meshlm.frontend.http.endpoint import json_response
from meshlm.frontend.observe import information
from meshlm.frontend.openai.schema import AbortRequest, CollectiveRpcRequest, ScaleRequest, Settings
from meshlm.frontend.operator import operating
from meshlm.frontend.requests.generation import Backend

Read = Callable[[Request, Callable[[Request, bytes], Any]], Awaitable[Any]]


class OperatorRoutes:
    """`read` gives a request's body to a function, as routes.py does for all routes."""

    def __init__(self, backend: Backend, read: Read) -> None:
        self._backend, self._read = backend, read

    async def start_profile(self, request: Request) -> HttpResponse:
        return await self._profile(start=True)

    async def stop_profile(self, request: Request) -> HttpResponse:
        return await self._profile(start=False)

    async def _profile(self, *, start: bool) -> HttpResponse:
        return json_response(await operating.profile(self._backend.operations, start=start))

    async def reset_prefix_cache(self, request: Request) -> HttpResponse:
        return json_response(await operating.reset_prefix_cache(self._backend.operations, request.query_params))

    async def pause(self, request: Request) -> HttpResponse:
        return json_response(await operating.pause(self._backend.operations, request.query_params))

    async def resume(self, request: Request) -> HttpResponse:
        return json_response(await operating.resume(self._backend.operations))

    async def sleep(self, request: Request) -> HttpResponse:
        await operating.sleep(self._backend.operations, request.query_params)
        return HttpResponse()

    async def wake_up(self, request: Request) -> HttpResponse:
        await operating.wake_up(self._backend.operations, request.query_params.getlist("tags"))
        return HttpResponse()

    async def is_sleeping(self, request: Request) -> HttpResponse:
        return json_response(await operating.is_sleeping(self._backend.operations))

    async def get_world_size(self, request: Request) -> HttpResponse:
        return json_response(operating.world_size(self._backend.config, request.query_params))

    async def is_paused(self, request: Request) -> HttpResponse:
        return json_response({"is_paused": (await self._backend.operations.fresh_stats()).paused})

    async def settings(self, request: Request) -> HttpResponse:
        return json_response(operating.settings(self._backend.config))

    async def change_settings(self, request: Request) -> HttpResponse:
        body, unknown = await self._read(request, lambda request, raw: bodies.decode(raw, Settings))
        self._backend.observer.ignored(unknown, request.url.path)
        return json_response(operating.change_settings(self._backend.operations, body))

    async def abort_requests(self, request: Request) -> HttpResponse:
        body, unknown = await self._read(request, lambda request, raw: bodies.decode(raw, AbortRequest))
        self._backend.observer.ignored(unknown, request.url.path)
        return json_response(await operating.abort_requests(self._backend.operations, tuple(body.request_ids or ())))

    async def collective_rpc(self, request: Request) -> HttpResponse:
        body, unknown = await self._read(request, lambda request, raw: bodies.decode(raw, CollectiveRpcRequest))
        self._backend.observer.ignored(unknown, request.url.path)
        return json_response(await operating.collective_rpc(self._backend.operations, body))

    async def scale_elastic_ep(self, request: Request) -> HttpResponse:
        body, unknown = await self._read(request, lambda request, raw: bodies.decode(raw, ScaleRequest))
        self._backend.observer.ignored(unknown, request.url.path)
        return json_response(await operating.scale(self._backend.operations, body))

    async def is_scaling_elastic_ep(self, request: Request) -> HttpResponse:
        return json_response(await operating.is_scaling(self._backend.operations))

    async def rebalance_experts(self, request: Request) -> HttpResponse:
        return json_response(await operating.rebalance_experts(self._backend.operations))

    async def server_info(self, request: Request) -> HttpResponse:
        return json_response(await asyncio.to_thread(information.server, self._backend, request.query_params))
