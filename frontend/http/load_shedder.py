"""503 from the head of a request, while its body is not read and nothing was done for it. Installed by routes.py.

An overloaded server spends its time on what it refuses, so a refusal must be cheap. The reasons are the Backend's (io.py).
"""

import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

from starlette.responses import Response as HttpResponse
from starlette.types import Receive, Scope
from starlette.types import Send as AsgiSend

from meshlm.frontend.http.connection import EXTENSION
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.requests import retry

_KEY = retry.KEY.lower().encode()
_CLOSE = {"Connection": "close"}


class Refusal(Protocol):
    """Why a new request cannot be taken now, "" when it can. With an Idempotency-Key it may attach to one that runs."""

    def __call__(self, *, attaches: bool) -> str: ...


class LoadShedder:
    """ASGI middleware around the routes. `refused` hears how long each refusal took, in seconds since its head began to come; 0: nobody
    knows."""

    def __init__(
        self, app: Any, refusal: Refusal, refused: Callable[[HttpError, float], None], submits: Collection[str]
    ) -> None:
        self._app, self._refusal, self._refused, self._submits = app, refusal, refused, submits

    async def __call__(self, scope: Scope, receive: Receive, send: AsgiSend) -> None:
        if scope["type"] == "http" and scope["path"] in self._submits and scope["method"] == "POST":
            names = [name for name, _ in scope["headers"]]
            if reason := self._refusal(attaches=_KEY in names):
                error = HttpError(503, reason, kind="overloaded_error")
                # A client that asks before it sends its body may leave it out now, and nobody knows where the next request begins.
                close = _CLOSE if b"expect" in names else {}
                response = HttpResponse(
                    error.body(scope["path"]), 503, {**error.headers(), **close}, "application/json"
                )
                await response(scope, receive, send)
                begun = scope.get("extensions", {}).get(EXTENSION, {}).get("begun")
                self._refused(error, time.monotonic() - begun if begun else 0.0)
                return
        await self._app(scope, receive, send)
