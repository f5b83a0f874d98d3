"""Plug-ins that add HTTP routes to a frontend: their interface, and how they are loaded. Called by io.py and routes/application.py.

A plug-in's route takes and gives JSON. It works by asking other routes of the same server, under the client's own key and limits. What
it raises is a 500 that names the plug-in, and ends nothing else.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import endpoint
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.http.operation import Group, Operation
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime import plugins
from meshlm.runtime.api_keys import ADMIN, INFERENCE

Ask = Callable[[Request, str, str, bytes], Awaitable[HttpResponse]]  # method, path, body


class EndpointRequest:
    """A client's request: `body` as JSON has it (None without one), `query` as it stands in the URL."""

    def __init__(self, request: Request, body: Any, ask: Ask) -> None:
        self.body, self.query = body, dict(request.query_params)
        self._request, self._ask = request, ask

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON that another route of this server answers. HttpError where that refuses, which is the client's answer."""
        raw = b"" if body is None else msgspec.json.encode(body)
        answer = bytes((await self._ask(self._request, method, path, raw)).body)
        return msgspec.json.decode(answer) if answer else None


class Route(Struct, frozen=True):
    """One route. handler: its answer is JSON; a ValueError is the client's 400. is_admin: only admin keys may ask, where keys have
    scopes."""

    method: str
    path: str
    summary: str
    handler: Callable[[EndpointRequest], Awaitable[Any]]
    is_admin: bool = False


class Endpoints(ABC):
    """What an entry point of `meshlm.endpoints` names: a class, made once in each frontend."""

    def __init__(self, config: MeshConfig) -> None:
        self.config = config

    @abstractmethod
    def routes(self) -> Sequence[Route]: ...


class PluginRoute(Struct, frozen=True):
    """A route with the name of its plug-in."""

    plugin: str
    route: Route

    @property
    def operation(self) -> Operation:
        scope = ADMIN if self.route.is_admin else INFERENCE
        given = self.route.summary, "application/json", None, (self.route.method,)
        return Operation(self.route.path, *given, errors=(400, 500, 503), group=Group.ANY, key_scope=scope)

    async def answer(self, request: Request, raw: bytes, ask: Ask) -> HttpResponse:
        try:
            body = msgspec.json.decode(raw) if raw else None
        except msgspec.DecodeError as error:
            raise HttpError(400, f"the body is no JSON: {error}") from None
        try:
            return endpoint.json_response(await self.route.handler(EndpointRequest(request, body, ask)))
        except HttpError:
            raise
        except ValueError as error:
            raise HttpError(400, str(error)) from error
        except Exception as error:  # a plug-in may raise anything, and the client must read whose it is
            text = f"plug-in {self.plugin} (group {plugins.ENDPOINTS}): {type(error).__name__}: {error}"
            raise HttpError.of_kind(ErrorKind.INTERNAL, text.splitlines()[0]) from error


def load(config: MeshConfig, taken: Mapping[str, object], environment: Mapping[str, str]) -> tuple[PluginRoute, ...]:
    """The routes of all such plug-ins. PluginError for what one raises, and for paths that are taken."""
    found: dict[tuple[str, str], PluginRoute] = {}

    def register(name: str, kind: Any) -> None:
        if not (isinstance(kind, type) and issubclass(kind, Endpoints)):
            raise TypeError("a class of Endpoints is expected")
        for route in kind(config).routes():
            key = route.method, route.path
            if not isinstance(route, Route) or route.method not in ("GET", "POST") or not route.path.startswith("/"):
                raise TypeError("a route has the method GET or POST and a path that begins with /")
            if "{" in route.path or route.path in taken or key in found:
                raise ValueError(f"the path {route.path} is taken, or has a parameter")
            found[key] = PluginRoute(name, route)

    plugins.load(plugins.ENDPOINTS, environment, register)
    return tuple(found.values())
