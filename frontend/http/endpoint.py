"""Around every route: errors in its API's form, keys, the mesh's load, headers, and what the router refuses. For application.py."""

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshlm.frontend.http import retry
from meshlm.frontend.http.connection import EXTENSION
from meshlm.frontend.http.errors import NOT_SERVED, HttpError, is_anthropic
from meshlm.frontend.http.operation import Paths
from meshlm.frontend.http.rate_limits import RateLimits
from meshlm.protocol.edges.control import MeshStats
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
_IDEMPOTENCY_KEY = retry.KEY.lower().encode()
NAME = "meshlm.request_name"  # in the scope: a list of one, so that copies of the scope share it
REQUEST_ID, ANTHROPIC_ID = b"x-request-id", b"request-id"
WEIGHTS = b"x-meshlm-weights-version"
LOAD_FORMAT, LOAD = b"endpoint-load-metrics-format", b"endpoint-load-metrics"
Refused = Callable[[HttpError], None]  # hears of each request for an answer that got an error instead


def plain_error(request: Request, error: Exception) -> Response:
    """The answer to a request that the router refuses (404, 405), in OpenAI's form."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: " + (
        "this path takes " + error.headers["Allow"]
        if error.headers and "Allow" in error.headers
        else "there is no such path"
    )
    if error.status_code == 404 and (why := NOT_SERVED.get(request.url.path)):
        text += f": {why}"
    return _refusal(HttpError(error.status_code, text), request.url.path, dict(error.headers or {}))


def _refusal(error: HttpError, path: str, headers: dict[str, str] | None = None) -> Response:
    """The answer that is this error, in the form of the API that the path belongs to."""
    headers = error.headers() if headers is None else headers
    return Response(error.body(path), error.status, headers, "application/json")


class Endpoint:
    """An ASGI endpoint around a method: errors become OpenAI's form, `send` is within reach of the writer."""

    def __init__(self, method: Callable[[Request], Awaitable[Response]], refused: Refused | None) -> None:
        self._method, self._refused = method, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["meshlm.send"] = send
        request = Request(scope, receive)
        try:
            response = await self._method(request)
        except HttpError as error:
            if self._refused is not None:
                self._refused(error)
            response = _refusal(error, scope["path"])
        except ClientDisconnect:
            return
        except asyncio.CancelledError:  # the server ends; the request's body has not come, or nobody reads its answer
            response = _refusal(HttpError(503, "this server is stopping"), scope["path"])
            with contextlib.suppress(RuntimeError):  # its answer has begun
                await response(scope, receive, send)
            return
        await response(scope, receive, send)


class ByMethod:
    """An ASGI endpoint of a path whose methods are routes of their own."""

    def __init__(self, endpoints: dict[str, Endpoint]) -> None:
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        await self._endpoints[method](scope, receive, send)


class RootPath:
    """Takes the path under which a proxy has this server (--root-path) off the requests that come with it."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._root and scope["type"] == "http" and scope["path"].startswith(f"{self._root}/"):
            scope["path"] = scope["path"].removeprefix(self._root)
        await self._app(scope, receive, send)


class Gate:
    """ASGI middleware that asks `check` of each request, whose body is not read yet: what gets an HttpError is answered with it, and
    goes no further. `refused` hears of that where the mesh would have computed; of a 503 also how long it took, in seconds since the
    request's head began to come; 0: nobody knows."""

    def __init__(
        self,
        app: ASGIApp,
        check: Callable[[Scope], None],
        refused: Callable[[HttpError, float], None],
        submits: Collection[str],
    ) -> None:
        self._app, self._check, self._refused, self._submits = app, check, refused, submits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except HttpError as error:
                # A client that asks before it sends its body may leave it out now, and nobody knows where the next request begins.
                close = {"Connection": "close"} if b"expect" in dict(scope["headers"]) else {}
                await _refusal(error, scope["path"], {**error.headers(), **close})(scope, receive, send)
                if scope["path"] in self._submits:
                    begun = scope.get("extensions", {}).get(EXTENSION, {}).get("begun")
                    self._refused(error, time.monotonic() - begun if begun and error.status == 503 else 0.0)
                return
        await self._app(scope, receive, send)


class KeyCheck:
    """Asks for one of the API keys on every route but the probes, for one with the route's scope, and whether it may ask that often.
    Anthropic's clients send it as X-Api-Key. The key that fits is `scope["meshlm.key"]` from then on."""

    def __init__(self, keys: ApiKeys, rates: RateLimits, paths: Paths) -> None:
        self._keys, self._rates, self._paths = keys, rates, paths

    def check(self, scope: Scope) -> None:
        if scope["path"] in self._paths.open or scope["method"] == "OPTIONS":
            return
        wanted = self._paths.scope_of(scope["path"])
        if not self._keys.asks_for(wanted):
            if scope["path"] == SETTINGS and scope["method"] == "POST":
                raise HttpError(403, NO_KEY_FOR_SETTINGS)
            return
        headers = dict(scope["headers"])
        given = (headers.get(b"authorization", b"").removeprefix(b"Bearer "), headers.get(b"x-api-key", b""))
        found = self._keys.find(given)
        if found is None:
            if not (self._keys or self._keys.has_admin):
                raise HttpError(403, NO_ADMIN)
            raise HttpError(401, UNKNOWN_KEY)
        if wanted and wanted not in found.scopes:
            raise HttpError(403, NO_SCOPE % wanted)
        if scope["method"] == "POST" and scope["path"] in self._paths.counted:
            take(self._rates, found)
        scope["meshlm.key"] = found.key.decode()


def load_shedder(refusal: Callable[..., str], submits: Collection[str]) -> Callable[[Scope], None]:
    """The check of a Gate that answers 503 from the head of a request: an overloaded server spends its time on what it refuses.
    `refusal` says why a request cannot be taken now, "" when it can; with an Idempotency-Key (`attaches`) it may attach to one that
    runs."""

    def check(scope: Scope) -> None:
        is_asked = scope["path"] in submits and scope["method"] == "POST"
        if is_asked and (reason := refusal(attaches=_IDEMPOTENCY_KEY in dict(scope["headers"]))):
            raise HttpError(503, reason)

    return check


class AnswerHeaders:
    """Headers of every answer: its name, and the load where a balancer asks for it. Middleware around all others.

    An answer is named by its client's X-Request-Id, else by what the route calls it (`NAME` in the scope), else by a new name; so are
    refusals and the answers of routes that compute nothing. The load is ORCA's report, as vLLM gives it, of the mesh's `figures` as
    they are known now, for the paths for which the mesh computes (`submits`); a request header names the form. Those answers also name
    the version of the weights that the mesh has when they begin."""

    def __init__(self, app: ASGIApp, figures: Callable[[], MeshStats], submits: Collection[str]) -> None:
        self._app, self._figures, self._submits = app, figures, submits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"])
        name = scope[NAME] = [given.get(REQUEST_ID, b"").decode("latin-1") or uuid.uuid4().hex]
        form = given.get(LOAD_FORMAT, b"").decode("latin-1")

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"]  # without the path of a proxy by now
                headers = message["headers"] = list(message.get("headers", ()))
                known = {key.lower() for key, _ in headers}
                wanted = (REQUEST_ID, ANTHROPIC_ID) if is_anthropic(path) else (REQUEST_ID,)
                headers += [(key, name[0].encode("latin-1", "replace")) for key in wanted if key not in known]
                if path in self._submits and message["status"] < 400:
                    headers.append((WEIGHTS, self._figures().weights.label.encode("latin-1", "replace")))
                if form and path in self._submits and (report := load_report(form, self._figures())):
                    headers.append((LOAD, report.encode()))
            await send(message)

        await self._app(scope, receive, send_named)


def load_report(form: str, stats: MeshStats) -> str:
    """ORCA's report in the form of this name, with vLLM's figures over all ranks; empty for a form that is not there."""
    usage = sum(rank.kv_cache_usage for rank in stats.ranks) / max(1, len(stats.ranks))
    waiting = stats.num_held + sum(rank.num_waiting for rank in stats.ranks)
    figures = {"kv_cache_usage_perc": round(usage, 4), "num_requests_waiting": waiting}
    match form.strip().upper():
        case "TEXT":
            return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in figures.items())
        case "JSON":
            return f"JSON {msgspec.json.encode({'named_metrics': figures}).decode()}"
    return ""


def take(rates: RateLimits, key: ApiKey) -> None:
    """Counts a request of this key. HttpError 429 when it has asked too often; OpenAI's clients wait as long as it says."""
    if waits := rates.take(key):
        assert key.limits is not None
        limits = ", ".join(f"{name}={value}" for name, value in key.limits._asdict().items() if value)
        text = f"Rate limit reached for this key ({limits}); try again in {waits:.1f} s"
        raise HttpError(429, text, retry_after_s=math.ceil(waits))


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
