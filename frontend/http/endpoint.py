"""Around every route: errors in the form of its API, the API key, and what the router refuses. Installed by routes.py."""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from meshlm.frontend.http.errors import HttpError, why_not_served
from meshlm.frontend.http.rate_limits import RateLimits
from meshlm.frontend.routes.paths import Paths
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.api_keys import ApiKey, ApiKeys

UNKNOWN_KEY = "Unauthorized: send a valid key ('Authorization: Bearer KEY', 'X-Api-Key: KEY')"
NO_SCOPE = "Forbidden: this key is not for %s (--api-key-file, --admin-api-key)"
NO_ADMIN = (
    "Forbidden: this server has no key for admin, and others than this host reach it; start it with --admin-api-key"
)
NO_KEY_FOR_SETTINGS = (
    "Forbidden: settings change with a key alone; start the server with --admin-api-key, or use `meshlm set` on its "
    "host"
)
SETTINGS = "/settings"
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Sender = Callable[[dict[str, Any]], Awaitable[None]]
Refused = Callable[[HttpError], None]  # hears of each request for an answer that got an error instead


def plain_error(request: Request, error: Exception) -> Response:
    """The answer to a request that the router refuses (404, 405), in OpenAI's form."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: " + (
        "this path takes " + error.headers["Allow"]
        if error.headers and "Allow" in error.headers
        else "there is no such path"
    )
    kind = ErrorKind.NOT_FOUND.value if error.status_code == 404 else ErrorKind.INVALID.value
    if error.status_code == 404 and (why := why_not_served(request.url.path)):
        text += f": {why}"
    body = HttpError(error.status_code, text, kind=kind).body(request.url.path)
    return Response(body, error.status_code, dict(error.headers or {}), "application/json")


class Endpoint:
    """An ASGI endpoint around a method: errors become OpenAI's form, `send` is within reach of the writer."""

    def __init__(self, method: Callable[[Request], Awaitable[Response | None]], refused: Refused | None) -> None:
        self._method, self._refused = method, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Sender) -> None:
        scope["meshlm.send"] = send
        request = Request(scope, receive)
        try:
            response = await self._method(request)
        except HttpError as error:
            if self._refused is not None:
                self._refused(error)
            response = Response(error.body(scope["path"]), error.status, error.headers(), "application/json")
        except ClientDisconnect:
            return
        except (
            asyncio.CancelledError
        ):  # the server ends, and this one has not: its body has not come, or nobody reads its answer
            stopping = HttpError(503, "this server is stopping", kind="overloaded_error")
            response = Response(stopping.body(scope["path"]), stopping.status, stopping.headers(), "application/json")
            with contextlib.suppress(RuntimeError):  # its answer has begun
                await response(scope, receive, send)  # type: ignore[arg-type]
            return
        if response is not None:
            await response(scope, receive, send)  # type: ignore[arg-type]


class ByMethod:
    """An ASGI endpoint of a path whose methods are routes of their own."""

    def __init__(self, endpoints: dict[str, Endpoint]) -> None:
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Sender) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        await self._endpoints[method](scope, receive, send)


class RootPath:
    """Takes the path under which a proxy has this server (--root-path) off the requests that come with it."""

    def __init__(self, app: Any, root: str) -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Sender) -> None:
        if self._root and scope["type"] == "http" and scope["path"].startswith(f"{self._root}/"):
            scope["path"] = scope["path"].removeprefix(self._root)
        await self._app(scope, receive, send)


class KeyCheck:
    """Asks for one of the API keys on every route but the probes, for one with the route's scope, and whether it may ask that often.
    Anthropic's clients send it as X-Api-Key. The key that fits is `scope["meshlm.key"]` from then on."""

    def __init__(self, app: Any, keys: ApiKeys, rates: RateLimits, refused: Refused, paths: Paths) -> None:
        self._app, self._keys, self._rates, self._refused, self._paths = app, keys, rates, refused, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Sender) -> None:
        if scope["type"] == "http" and scope["path"] not in self._paths.open and scope["method"] != "OPTIONS":
            try:
                self._check(scope)
            except HttpError as error:
                if scope["path"] in self._paths.submits:
                    self._refused(error)
                response = Response(error.body(scope["path"]), error.status, error.headers(), "application/json")
                await response(scope, receive, send)  # type: ignore[arg-type]
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """HttpError for a request that is not let in."""
        wanted = self._paths.scope_of(scope["path"])
        if not self._keys.asks_for(wanted):
            if scope["path"] == SETTINGS and scope["method"] == "POST":
                raise HttpError(403, NO_KEY_FOR_SETTINGS, kind="permission_error")
            return
        headers = dict(scope["headers"])
        given = (headers.get(b"authorization", b"").removeprefix(b"Bearer "), headers.get(b"x-api-key", b""))
        found = self._keys.find(given)
        if found is None:
            if not (self._keys or self._keys.has_admin):
                raise HttpError(403, NO_ADMIN, kind="permission_error")
            raise HttpError(401, UNKNOWN_KEY, kind="authentication_error")
        if wanted and wanted not in found.scopes:
            raise HttpError(403, NO_SCOPE % wanted, kind="permission_error")
        if scope["method"] == "POST" and scope["path"] in self._paths.counted:
            take(self._rates, found)
        scope["meshlm.key"] = found.key.decode()


def take(rates: RateLimits, key: ApiKey) -> None:
    """Counts a request of this key. HttpError 429 when it has asked too often; OpenAI's clients wait as long as it says."""
    if waits := rates.take(key):
        assert key.limits is not None
        limits = ", ".join(f"{name}={value}" for name, value in key.limits._asdict().items() if value)
        text = f"Rate limit reached for this key ({limits}); try again in {waits:.1f} s"
        raise HttpError(429, text, kind="rate_limit_error", retry_after_s=math.ceil(waits))


def json_response(value: Any) -> Response:
    """An answer that is this value."""
    return Response(msgspec.json.encode(value), media_type="application/json")
