"""GET /dashboard and what belongs to it. The page holds no data, so it needs no key; what it asks for does."""

import asyncio
import contextlib
import gzip
import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.types import Receive, Scope, Send

from meshlm.frontend.dashboard.feed import PERIOD_S, STALL_S, Feed, Watcher
from meshlm.frontend.http.connection import EXTENSION
from meshlm.frontend.http.errors import field_error
from meshlm.frontend.http.operation import EVENTS, HTML, Group, OfClass, Parameter, route
from meshlm.frontend.http.web_pages import HEADERS, source
from meshlm.protocol.dashboard import History
from meshlm.runtime.api_keys import ADMIN

JSON = "application/json"
MAX_EVERY_S = STALL_S / 2
# In their order, since one uses what those before it have said.
SCRIPTS = (
    *("elements", "access", "answers", "feed", "figures", "healing", "drawing", "hops", "tables", "requests", "news"),
    *("playground", "start"),
)
_EVERY = Parameter("every", "query", {"type": "number", "minimum": 0.1, "maximum": 5.0}, "Seconds between events.")


class Shows(Protocol):
    """The part of the observer that is used."""

    feed: Feed


class Page(NamedTuple):
    """The page with its style and its script in it: one answer, so that a browser draws it without asking again."""

    content: bytes
    compressed: bytes
    tag: str  # for If-None-Match
    policy: str  # it runs its own script alone, asks its own server alone, and is in no other page; what a model says is text


@cache
def page() -> Page:
    folder = files("meshlm.frontend.dashboard") / "page"
    style = (folder / "page.css").read_text("utf-8")
    script = '"use strict";\n' + "\n".join((folder / f"{name}.js").read_text("utf-8") for name in SCRIPTS)
    text = (folder / "page.html").read_text("utf-8")
    text = text.replace("<style></style>", f"<style>{style}</style>")
    text = text.replace("<script></script>", f"<script>{script}</script>")
    policy = (
        f"default-src 'none'; script-src {source(script)}; style-src {source(style)}; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    content = text.encode()
    return Page(content, gzip.compress(content, 9, mtime=0), f'"{hashlib.sha256(content).hexdigest()[:20]}"', policy)


class DashboardRoutes:
    routes = OfClass(Group.DASHBOARD, ADMIN)

    def __init__(self, shown: Shows) -> None:
        self._shown = shown

    @route("/dashboard", "A page that shows the mesh; it asks for a key.", answers=HTML, is_open=True)
    async def page(self, request: Request) -> HttpResponse:
        found = page()
        headers = {**HEADERS, "Content-Security-Policy": found.policy, "ETag": found.tag, "Vary": "Accept-Encoding"}
        if request.headers.get("if-none-match") == found.tag:
            return HttpResponse(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
            return HttpResponse(found.compressed, media_type=HTML, headers=headers)
        return HttpResponse(found.content, media_type=HTML, headers=headers)

    @route("/dashboard/history", "The last thousand requests, and news.", answers=History)
    async def history(self, request: Request) -> HttpResponse:
        return HttpResponse(await self._shown.feed.history(), media_type=JSON, headers=HEADERS)

    @route("/dashboard/events", answers=EVENTS, parameters=(_EVERY,))
    async def events(self, request: Request) -> HttpResponse:
        """What it shows, up to ten times a second, without end."""
        every_s = 0.0
        if (every := request.query_params.get("every")) is not None:
            with contextlib.suppress(ValueError):
                every_s = float(every)
            if not PERIOD_S <= every_s <= MAX_EVERY_S:
                raise field_error("every", f"seconds from {PERIOD_S:g} to {MAX_EVERY_S:g}")
        if request.method == "HEAD":
            return HttpResponse(media_type=EVENTS, headers=HEADERS)
        return _EventStream(self._shown.feed, self._shown.feed.join(every_s))


class _EventStream(HttpResponse):
    """Events until the client leaves, takes nothing any more, or the server ends."""

    def __init__(self, feed: Feed, watcher: Watcher) -> None:
        super().__init__(media_type=EVENTS, headers=HEADERS)
        del self.headers["content-length"]  # nobody knows it
        self._feed, self._watcher = feed, watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
