"""Adapters that come and go while the mesh serves, as in vLLM: two routes for operators (--allow-runtime-lora-updating)."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import bodies
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.http.operation import TEXT, Group, OfClass, route
from meshlm.frontend.openai import schema
from meshlm.frontend.requests.generation import Backend
from meshlm.frontend.requests.request_reader import RequestReader
from meshlm.frontend.requests.resolving import read_adapter
from meshlm.protocol.adapters import Adapter
from meshlm.protocol.operations import DropAdapter
from meshlm.runtime.api_keys import ADMIN
from meshlm.runtime.errors import ModelFilesError


class AdapterRoutes:
    routes = OfClass(Group.ADAPTERS, ADMIN)

    def __init__(self, backend: Backend, reader: RequestReader) -> None:
        self._backend, self._reader = backend, reader

    @route("/v1/load_lora_adapter", answers=TEXT, body=schema.LoadAdapterRequest, errors=(400, 503))
    async def load(self, request: Request) -> HttpResponse:
        """Serve an adapter under a name, from a folder that is held against the model now; with load_inplace, in the place of the one
        that has the name."""
        body, unknown = await self._reader.read(request, lambda _, raw: bodies.decode(raw, schema.LoadAdapterRequest))
        self._backend.observer.ignored(unknown, request.url.path)
        try:
            adapter = await read_adapter(body.lora_name, Path(body.lora_path), self._backend)
        except ModelFilesError as error:
            raise HttpError(400, str(error), "lora_path") from None
        adapters, send = self._backend.adapters, self._backend.operations.tell_coordinator
        before = await adapters.load(adapter, send, in_place=body.load_inplace)
        await self._drop(before)
        return _said(f"Success: LoRA adapter '{adapter.name}' added successfully.")

    @route("/v1/unload_lora_adapter", answers=TEXT, body=schema.UnloadAdapterRequest, errors=(404, 503))
    async def unload(self, request: Request) -> HttpResponse:
        """Take an adapter's name away, and its memory once the requests that have it have ended."""
        body, unknown = await self._reader.read(request, lambda _, raw: bodies.decode(raw, schema.UnloadAdapterRequest))
        self._backend.observer.ignored(unknown, request.url.path)
        gone = await self._backend.adapters.unload(body.lora_name, self._backend.operations.tell_coordinator)
        await self._drop(gone)
        return _said(f"Success: LoRA adapter '{gone.name}' removed successfully.")

    async def _drop(self, adapter: Adapter | None) -> None:
        """Workers give its memory back, unless another name stands for the same. Where they cannot, they do so for others that come."""
        if adapter is not None and not self._backend.adapters.has_digest(adapter.digest):
            await self._backend.operations.operate(DropAdapter(adapter.digest))


def _said(text: str) -> HttpResponse:
    return HttpResponse(text, media_type="text/plain")
