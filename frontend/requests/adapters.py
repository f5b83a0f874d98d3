"""The names that a frontend's clients may use for a model: those of the base, and of its adapters (LoRA). Owned by io.py.

A request that names an adapter is one for the base model with an extra, from here on: no other process knows the name.
"""

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.protocol.adapters import Adapter
from meshlm.protocol.config import Resolved


class Adapters:
    def __init__(self) -> None:
        self._base: tuple[str, ...] = ()
        self._known: dict[str, Adapter] = {}

    def begin(self, resolved: Resolved) -> None:
        self._base = resolved.served_names
        self._known = {adapter.name: adapter for adapter in resolved.adapters}

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
            raise HttpError(404, text, "model")
        return model or self._base[0]

    def attached(self, parsed_request: ParsedRequest, model: str) -> ParsedRequest:
        """The request as it is for this name. HttpError where that is gone since it was checked."""
        adapter = self.find(self.check(model))
        if adapter is None:
            return parsed_request
        return parsed_request.with_mesh(extras=(*parsed_request.mesh.extras, adapter))
