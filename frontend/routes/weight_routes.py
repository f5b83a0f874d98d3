"""Routes for trainers, who change the weights of a mesh that serves. Called by application.py."""

from functools import partial
from typing import TypeVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import bodies
from meshlm.frontend.http.endpoint import json_response
from meshlm.frontend.http.operation import Group, OfClass, route
from meshlm.frontend.openai import weights_schema as schema
from meshlm.frontend.operator import weights
from meshlm.frontend.requests.generation import Backend
from meshlm.frontend.requests.request_reader import RequestReader
from meshlm.runtime.api_keys import ADMIN

Body = TypeVar("Body", bound=Struct)
step_route = partial(route, answers=schema.Updated, errors=(409, 504))


class WeightRoutes:
    routes = OfClass(Group.DEVELOPMENT, ADMIN)

    def __init__(self, backend: Backend, reader: RequestReader) -> None:
        self._backend, self._reader = backend, reader

    @step_route("/init_weight_transfer_engine", body=schema.InitRequest)
    async def init(self, request: Request) -> HttpResponse:
        """Say how weights will come. Where a trainer broadcasts them, all workers join its group."""
        body = await self._body(request, schema.InitRequest)
        return json_response(await weights.init(self._backend.operations, body))

    @step_route("/start_weight_update", body=schema.StartRequest)
    async def start(self, request: Request) -> HttpResponse:
        """Begin an update; 409 while another trainer does one."""
        body = await self._body(request, schema.StartRequest)
        return json_response(await weights.start(self._backend.operations, body))

    @step_route("/update_weights", body=schema.UpdateRequest)
    async def update(self, request: Request) -> HttpResponse:
        """Have all workers read the new weights and find out whether they can have them, or receive tensors; nothing changes yet."""
        body = await self._body(request, schema.UpdateRequest)
        return json_response(await weights.update(self._backend.operations, body))

    @step_route("/finish_weight_update", body=schema.FinishRequest)
    async def finish(self, request: Request) -> HttpResponse:
        """Have all workers take the weights that were checked."""
        body = await self._body(request, schema.FinishRequest)
        return json_response(await weights.finish(self._backend.operations, body))

    @route("/update_weights_from_disk", answers=schema.DiskUpdated, body=schema.DiskUpdate, errors=(409, 504))
    async def from_disk(self, request: Request) -> HttpResponse:
        """All of an update in one call."""
        body = await self._body(request, schema.DiskUpdate)
        return json_response(await weights.from_disk(self._backend.operations, body))

    @route("/update_weight_version", answers=schema.Named, body=schema.NameRequest, errors=(409, 504))
    async def rename(self, request: Request) -> HttpResponse:
        """Call the weights otherwise; they stay."""
        body = await self._body(request, schema.NameRequest)
        return json_response(await weights.rename(self._backend.operations, body.new_version))

    @route("/weight_info", answers=schema.WeightInfo, errors=(504,))
    async def info(self, request: Request) -> HttpResponse:
        """Which weights the mesh is to have, and which each rank has."""
        return json_response(await weights.info(self._backend.operations))

    @route("/weight_checker", answers=schema.Checked, body=schema.CheckRequest, errors=(409, 504))
    async def check(self, request: Request) -> HttpResponse:
        """A sum over the weights of each worker."""
        body = await self._body(request, schema.CheckRequest)
        return json_response(await weights.check(self._backend.operations, body.action))

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        """The body as this Struct, or its defaults where there is none; fields that nobody knows are noted."""
        body, unknown = await self._reader.read(request, lambda request, raw: bodies.decode(raw or b"{}", kind))
        self._backend.observer.ignored(unknown, request.url.path)
        return body
