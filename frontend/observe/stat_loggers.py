"""Plug-ins that are told of figures (`meshlm.stat_loggers`): the mesh's once a second, and of each request that ended.

They stand beside the service: one that cannot be loaded, or raises, is named once in the log and left out from then on.
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.control import MeshStats
from meshlm.runtime import plugins


class EndedRequest(Struct, frozen=True):
    """One request of this frontend that is over."""

    request_id: str
    path: str
    status: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class StatLogger:
    """What an entry point names: a class. Its methods run in the frontend's event loop and must not wait."""

    def __init__(self, config: MeshConfig, index: int) -> None:
        """`index`: the number of the frontend. Figures of the mesh are the same in all of them."""

    def record(self, stats: MeshStats) -> None:
        """The mesh as of now: what each rank runs, what waits, how full its KV cache is."""

    def ended(self, request: EndedRequest) -> None:
        """A request is over."""


class StatLoggers:
    """Those of the installed packages. `log` is the process's."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._each: dict[str, StatLogger] = {}

    def __bool__(self) -> bool:
        return bool(self._each)

    def load(self, config: MeshConfig, index: int, environment: Mapping[str, str]) -> None:
        def register(name: str, found: Any) -> None:
            if not (isinstance(found, type) and issubclass(found, StatLogger)):
                raise TypeError("a class of StatLogger is expected")
            self._each[name] = found(config, index)

        for text in plugins.load_those_that_can(plugins.STAT_LOGGERS, environment, register):
            self._log.warning("stat logger left out", reason=text)

    def record(self, stats: MeshStats) -> None:
        self._tell(lambda logger: logger.record(stats))

    def ended(self, request: EndedRequest) -> None:
        self._tell(lambda logger: logger.ended(request))

    def _tell(self, tell: Callable[[StatLogger], None]) -> None:
        for name, logger in list(self._each.items()):
            try:
                tell(logger)
            except Exception as error:  # a plug-in may raise anything, and the frontend goes on
                del self._each[name]
                self._log.warning("stat logger left out", reason=f"plug-in {name}: {type(error).__name__}: {error}")
