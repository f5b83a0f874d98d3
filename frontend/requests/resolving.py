"""Finds an adapter that nobody has loaded yet, when a request names it (runtime/adapter_resolvers.py). Owned by io.py.

One name is looked for once at a time. What is found is held against the model and loaded at every frontend, as the route for it does.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from meshlm.frontend.http.errors import HttpError
from meshlm.protocol.adapters import Adapter
from meshlm.runtime.adapter_resolvers import AdapterResolver
from meshlm.runtime.errors import ModelFilesError

if TYPE_CHECKING:
    from meshlm.frontend.requests.generation import Backend

RESOLVE_S = 30.0  # of one resolver
_log = structlog.get_logger()


class Resolving:
    def __init__(self, resolvers: tuple[AdapterResolver, ...]) -> None:
        self._resolvers = resolvers
        self._turns: dict[str, asyncio.Lock] = {}  # of names that are looked for

    async def found(self, name: str, backend: "Backend") -> bool:
        """Whether clients may name it now. HttpError where it was found and cannot be served."""
        if not self._resolvers:
            return False
        turn = self._turns.setdefault(name, asyncio.Lock())
        try:
            async with turn:
                return backend.adapters.find(name) is not None or await self._load(name, backend)
        finally:
            if not turn.locked():
                self._turns.pop(name, None)

    async def _load(self, name: str, backend: "Backend") -> bool:
        for resolver in self._resolvers:
            if (folder := await self._asked(resolver, name)) is not None:
                try:
                    adapter = await read_adapter(name, folder, backend)
                except ModelFilesError as error:
                    raise HttpError(400, str(error), "model") from None
                await self._loaded(adapter, backend)
                return True
        return False

    async def _loaded(self, adapter: Adapter, backend: "Backend") -> None:
        try:
            await backend.adapters.load(adapter, backend.operations.tell_coordinator, in_place=False)
        except HttpError:
            if backend.adapters.find(adapter.name) is None:  # else another frontend was first
                raise

    async def _asked(self, resolver: AdapterResolver, name: str) -> Path | None:
        """A plug-in that raises, or takes too long, knows nothing."""
        kind = type(resolver).__name__
        try:
            return await asyncio.wait_for(asyncio.to_thread(resolver.resolve, name), RESOLVE_S)
        except TimeoutError:
            _log.warning("resolver of adapters left out", resolver=kind, reason=f"no answer within {RESOLVE_S:g} s")
        except Exception:  # the user's code may raise anything
            _log.exception("resolver of adapters failed", resolver=kind)
        return None


async def read_adapter(name: str, folder: Path, backend: "Backend") -> Adapter:
    """The adapter of a folder, held against the model. ModelFilesError."""
    from meshlm.runtime.model_files import adapter_files  # with all model families, which no other request needs

    limits = adapter_files.Limits.of(backend.config, backend.resolved.device)
    return await asyncio.to_thread(partial(adapter_files.adapter_of, name, folder, backend.resolved.spec, limits))
