"""GET /dashboard and what belongs to it. The page and its files hold no data, so they need no key; what they ask for does.

Called by server.py.
"""

import asyncio
import gzip
import hashlib
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.connection import EXTENSION
from meshlm.frontend.dashboard.feed import PERIOD_S, STALL_S, Feed, Watcher
from meshlm.frontend.errors import HttpError
from meshlm.frontend.operation import CSS, EVENTS, HTML, SCRIPT

JSON = "application/json"
MAX_EVERY_S = STALL_S / 2
# The page runs its own script alone, asks its own server alone, and is in no other page. What a model says is text.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
Receive = Any
Send = Any


class Shows(Protocol):
    """The part of the frontend that is used."""

    feed: Feed


class Asset(NamedTuple):
    """A file of the page."""

    content: bytes
    compressed: bytes
    tag: str  # for If-None-Match


@cache
def asset(name: str) -> Asset:
    content = (files("meshlm.frontend.dashboard") / name).read_bytes()
    return Asset(content, gzip.compress(content, 9, mtime=0), f'"{hashlib.sha256(content).hexdigest()[:20]}"')


class DashboardRoutes:
    """See the module docstring."""

    def __init__(self, backend: Shows) -> None:
        self._backend = backend

    async def page(self, request: Request) -> HttpResponse:
        return _asset(request, "page.html", HTML)

    async def script(self, request: Request) -> HttpResponse:
        return _asset(request, "page.js", SCRIPT)

    async def style(self, request: Request) -> HttpResponse:
        return _asset(request, "page.css", CSS)

    async def history(self, request: Request) -> HttpResponse:
        return HttpResponse(await self._backend.feed.history(), media_type=JSON, headers=HEADERS)

    async def events(self, request: Request) -> HttpResponse:
        every_s = _every(request.query_params.get("every", str(PERIOD_S)))
        if request.method == "HEAD":
            return HttpResponse(media_type=EVENTS, headers=HEADERS)
        return _EventStream(self._backend.feed, self._backend.feed.join(every_s))


def _every(text: str) -> float:
    try:
        every_s = float(text)
    except ValueError:
        every_s = 0.0
    if not PERIOD_S <= every_s <= MAX_EVERY_S:
        raise HttpError(400, f"every: seconds from {PERIOD_S:g} to {MAX_EVERY_S:g}", "every")
    return every_s


def _asset(request: Request, name: str, media_type: str) -> HttpResponse:
    found = asset(name)
    headers = {**HEADERS, "ETag": found.tag, "Vary": "Accept-Encoding"}
    if request.headers.get("if-none-match") == found.tag:
        return HttpResponse(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return HttpResponse(found.compressed, media_type=media_type, headers=headers)
    return HttpResponse(found.content, media_type=media_type, headers=headers)


class _EventStream(HttpResponse):
    """Events until the client leaves, takes nothing any more, or the server ends."""

    def __init__(self, feed: Feed, watcher: Watcher) -> None:
        super().__init__(media_type=EVENTS, headers=HEADERS)
        del self.headers["content-length"]  # nobody knows it
        self._feed, self._watcher = feed, watcher

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        left = asyncio.ensure_future(_left(receive, self._watcher))
        try:
            async with asyncio.timeout(STALL_S) as limit:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                while (event := await self._watcher.next()) is not None and not left.done():
                    limit.reschedule(asyncio.get_running_loop().time() + STALL_S)
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            if (extension := scope.get("extensions", {}).get(EXTENSION)) is not None:
                extension["transport"].abort()
                await left
        finally:
            left.cancel()
            self._feed.leave(self._watcher)


async def _left(receive: Receive, watcher: Watcher) -> None:
    """Wait until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    watcher.offer(None)
