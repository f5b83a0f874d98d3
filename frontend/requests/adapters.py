"""The names that a frontend's clients may use for a model: those of the base, and of its adapters (LoRA). Owned by io.py.

A request that names an adapter is one for the base model with an extra, from here on: no other process knows the name. The list is the
coordinator's; a frontend that changes it sends the next version, and is done once that is everybody's (protocol/adapters.py).
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.protocol.adapters import Adapter, AdapterList
from meshlm.protocol.config import Resolved
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import LinkDown

CHANGED_S = 20.0  # a coordinator is back in a few
AGAIN_S = 2.0  # until the list is sent again ...
RETRY_S = 0.1  # ... and until a coordinator is there
Known = Mapping[str, Adapter]


class UnknownModel(HttpError):
    """A client names a model that is not there; `name`: as the client wrote it."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(404, text, "model")
        self.name = name


class Adapters:
    def __init__(self) -> None:
        self._base: tuple[str, ...] = ()
        self._list = AdapterList()
        self._known: Known = {}
        self._heard = asyncio.Event()
        self._changing = asyncio.Lock()

    def begin(self, resolved: Resolved) -> None:
        self._base = resolved.served_names
        self._take(AdapterList(0, resolved.adapters))

    def _take(self, adapters: AdapterList) -> None:
        self._list, self._known = adapters, {adapter.name: adapter for adapter in adapters.adapters}

    @property
    def names(self) -> tuple[str, ...]:
        """The base's first."""
        return (*self._base, *self._known)

    def find(self, name: str) -> Adapter | None:
        return self._known.get(name)

    def check(self, model: str | None) -> str:
        """The name that is meant; without one the base's. HttpError."""
        if model and model not in self._known and model not in self._base:  # an empty name is none, as for vLLM
            text = f"The model `{model}` does not exist; this server has: {', '.join(self.names)}"
            raise UnknownModel(model, text)
        return model or self._base[0]

    def attached(self, parsed_request: ParsedRequest, model: str) -> ParsedRequest:
        """The request as it is for this name. HttpError where that is gone since it was checked."""
        adapter = self.find(self.check(model))
        if adapter is None:
            return parsed_request
        return parsed_request.with_mesh(extras=(*parsed_request.mesh.extras, adapter))

    # --- changes ---

    def heard(self, adapters: AdapterList) -> None:
        """The coordinator has this list."""
        if adapters.version > self._list.version:
            self._take(adapters)
        self._heard.set()

    def coordinator_up(self, send: Callable[[AdapterList], None]) -> None:
        """It may be another one, which knows the settings alone."""
        if self._list.version:
            send(self._list)

    async def load(self, adapter: Adapter, send: Callable[[AdapterList], None], *, in_place: bool) -> Adapter | None:
        """Clients may name it from now on, at every frontend; what had its name before. HttpError where that is taken, or where the
        coordinator does not answer."""
        before: list[Adapter | None] = [None]

        def wanted(known: Known, again: bool) -> Known:
            if again and known.get(adapter.name) == adapter:
                return known
            if adapter.name in self._base or (adapter.name in known and not in_place):
                text = f"The lora adapter '{adapter.name}' has already been loaded. Set 'load_inplace' to true to take its place."
                raise HttpError(
                    400, text if adapter.name in known else f"{adapter.name} is the base model's name", "lora_name"
                )
            before[0] = known.get(adapter.name)
            return {**known, adapter.name: adapter}

        async with self._changing:
            await self._change(wanted, send)
        return before[0]

    async def unload(self, name: str, send: Callable[[AdapterList], None]) -> Adapter:
        """Clients may not name it any more; which one it was. HttpError."""
        found: list[Adapter] = []

        def wanted(known: Known, again: bool) -> Known:
            if again and name not in known:
                return known
            if name not in known:
                raise HttpError(404, f"The lora adapter '{name}' cannot be found.", "lora_name")
            found.append(known[name])
            return {other: adapter for other, adapter in known.items() if other != name}

        async with self._changing:
            await self._change(wanted, send)
        return found[-1]

    def has_digest(self, digest: bytes) -> bool:
        """Whether a name stands for it."""
        return any(adapter.digest == digest for adapter in self._known.values())

    async def _change(self, wanted: Callable[[Known, bool], Known], send: Callable[[AdapterList], None]) -> None:
        """Sends the list as it is to be until the coordinator has it; made anew where another frontend was first. wanted: of what is
        known, and whether it was sent before and may be among that."""
        mine = AdapterList()
        try:
            async with asyncio.timeout(CHANGED_S):
                while self._list != mine or not mine.version:
                    mine = AdapterList(self._list.version + 1, tuple(wanted(self._known, mine.version > 0).values()))
                    self._heard.clear()
                    await self._answered(mine, send)
        except TimeoutError:
            raise HttpError.of_kind(
                ErrorKind.OVERLOADED, "the coordinator does not take the list of adapters"
            ) from None

    async def _answered(self, mine: AdapterList, send: Callable[[AdapterList], None]) -> None:
        """Until something was heard, or it is time to send again."""
        with contextlib.suppress(LinkDown, TimeoutError):
            send(mine)
            await asyncio.wait_for(self._heard.wait(), AGAIN_S)
            return
        await asyncio.sleep(0 if self._heard.is_set() else RETRY_S)
