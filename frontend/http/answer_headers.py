"""Headers of every answer: its name, and the load where a balancer asks for it. ASGI middleware around all others of routes.py.

An answer is named by its client's X-Request-Id, else by what the route calls it (`NAME` in the scope), else by a new name; so are
refusals and the answers of routes that compute nothing. The load is ORCA's report, as vLLM gives it: a request header names the form.
"""

import uuid
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from meshlm.frontend.http.errors import is_anthropic
from meshlm.protocol.edges.control import MeshStats

NAME = "meshlm.request_name"  # in the scope: a list of one, so that copies of the scope share it
REQUEST_ID, ANTHROPIC_ID = b"x-request-id", b"request-id"
LOAD_FORMAT, LOAD = b"endpoint-load-metrics-format", b"endpoint-load-metrics"
Scope = dict[str, Any]


class AnswerHeaders:
    """Adds headers to every answer. `figures` are the mesh's as they are known now; `submits` the paths for which it computes."""

    def __init__(self, app: Any, figures: Callable[[], MeshStats], submits: Collection[str]) -> None:
        self._app, self._figures, self._submits = app, figures, submits

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"])
        name = scope[NAME] = [given.get(REQUEST_ID, b"").decode("latin-1") or uuid.uuid4().hex]
        form = given.get(LOAD_FORMAT, b"").decode("latin-1")

        async def send_named(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"]  # without the path of a proxy by now
                headers = message["headers"] = list(message.get("headers", ()))
                known = {key.lower() for key, _ in headers}
                wanted = (REQUEST_ID, ANTHROPIC_ID) if is_anthropic(path) else (REQUEST_ID,)
                headers += [(key, name[0].encode("latin-1", "replace")) for key in wanted if key not in known]
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
