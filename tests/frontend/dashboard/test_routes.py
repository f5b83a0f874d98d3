"""GET /dashboard over HTTP: who may read what, and how streams end."""

import asyncio
import base64
import hashlib
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from scripted import Scripted

from meshlm.frontend.dashboard import feed as feeds
from meshlm.frontend.dashboard import routes
from meshlm.frontend.http import server as http
from meshlm.frontend.http.connection import Timeouts
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.dashboard import History, Snapshot

ADMIN = {"Authorization": "Bearer secret"}
MAX_BYTES = 200 << 10
LIMIT_S = 20


def scripted(**server: Any) -> Scripted:
    return Scripted(ServerConfig(responses_store="off", **server))


def client(backend: Scripted) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(backend.app), base_url="http://localhost")


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@asynccontextmanager
async def listening(backend: Scripted, send_buffer: int = 0) -> AsyncIterator[int]:
    """A real port; a test client's transport would collect a stream before it gives any of it."""
    listener = http.listen("127.0.0.1", 0)
    if send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = http.make_server(backend.app, Timeouts(60, 60, 60), backend.routes.unsent)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield listener.getsockname()[1]
    finally:
        backend.feed.close()
        server.should_exit = True
        await serving


async def test_the_page_is_small_needs_no_key_and_may_run_its_own_script_alone() -> None:
    async with client(scripted(api_key=("secret",))) as browser:
        answer = await browser.get("/dashboard")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
        assert answer.headers["content-encoding"] == "gzip"
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        (style,) = re.findall(r"<style>(.*?)</style>", answer.text, re.DOTALL)
        (script,) = re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL)
        assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
        assert (policy["style-src"], policy["script-src"]) == (hash_of(style), hash_of(script))
        assert policy["require-trusted-types-for"] == "'script'"
        assert len(answer.content) < MAX_BYTES
        again = await browser.get("/dashboard", headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        plain = await browser.get("/dashboard", headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.content == answer.content


def hash_of(text: str) -> str:
    """As a Content-Security-Policy names a text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_page_asks_nobody_else_and_makes_no_markup() -> None:
    text = routes.page().content.decode().replace("http://www.w3.org/2000/svg", "")
    for word in ("http:", "https:", "HTML", "document.write", "eval(", "new Function", "style=", " src=", "url("):
        assert word not in text, word
    assert not re.search(r"\son\w+\s*=", text), "no inline handlers"


def test_every_file_of_the_script_is_in_it_once() -> None:
    folder = Path(__file__).parents[3] / "frontend" / "dashboard" / "page"
    assert sorted(f"{name}.js" for name in routes.SCRIPTS) == sorted(path.name for path in folder.glob("*.js"))
    for path in folder.glob("*.js"):
        assert "</script" not in path.read_text(), "it would end the script"


async def test_data_needs_a_key_of_an_operator(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("reader inference\nadmin admin\n")
    async with client(scripted(api_key_file=str(keys))) as browser:
        for path in ("/dashboard/history", "/dashboard/events"):
            assert (await browser.get(path)).status_code == 401
            assert (await browser.get(path, headers={"X-Api-Key": "reader"})).status_code == 403
        assert (await browser.get("/dashboard/history", headers={"X-Api-Key": "admin"})).status_code == 200


async def test_requests_that_ended_are_told() -> None:
    backend = scripted()
    async with client(backend) as browser:
        body = {"prompt": "hi", "max_tokens": 2}
        assert (await browser.post("/v1/completions", json=body)).status_code == 200
        for answer in backend.answers:
            for choice in answer.choices:
                choice.opened_at = 1.0
            backend.feed.ended(answer, "/v1/completions", 200)
        found = msgspec.json.decode((await browser.get("/dashboard/history")).content, type=History)
    assert found.num_ended == 1
    assert (found.requests[0].path, found.requests[0].status) == ("/v1/completions", 200)


async def test_a_server_without_dashboards_says_so() -> None:
    async with client(scripted(max_dashboards=0)) as browser:
        answer = await browser.get("/dashboard")
        assert answer.status_code == 404
        assert "--max-dashboards" in answer.json()["error"]["message"]


async def events(answer: httpx.Response, count: int) -> list[Snapshot]:
    found: list[Snapshot] = []
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            found.append(msgspec.json.decode(line[6:], type=Snapshot))
            if len(found) == count:
                break
    return found


async def test_events_come_until_the_client_leaves() -> None:
    backend = scripted(api_key=("secret",))
    async with asyncio.timeout(LIMIT_S), listening(backend) as port, httpx.AsyncClient(headers=ADMIN) as browser:
        url = f"http://127.0.0.1:{port}/dashboard/events"
        assert (await browser.head(url)).status_code == 200
        async with browser.stream("GET", url) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            first, second = await events(answer, 2)
            assert second.number == first.number + 1
            assert second.at_s - first.at_s > 0.9 * feeds.STEADY_S, "twice a second where nothing is amiss"
        await until(lambda: not backend.feed._watchers)


async def test_who_asks_for_more_events_gets_them() -> None:
    async with asyncio.timeout(LIMIT_S), listening(scripted(api_key=("secret",))) as port:
        url = f"http://127.0.0.1:{port}/dashboard/events?every=0.1"
        async with httpx.AsyncClient(headers=ADMIN) as browser, browser.stream("GET", url) as answer:
            found = await events(answer, 8)
            least = min(later.at_s - earlier.at_s for earlier, later in pairwise(found))
            assert least < 0.5 * feeds.STEADY_S, "though nothing is amiss"


@pytest.mark.parametrize("every", ["0", "x", "-1", "nan", "inf", "1e9"])
async def test_a_pace_that_cannot_be_is_refused(every: str) -> None:
    async with client(scripted()) as browser:
        answer = await browser.get(f"/dashboard/events?every={every}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "every")


async def test_a_thousand_dashboards_leave_the_server_as_it_is() -> None:
    """Two are let in, all others are refused by name, and whoever is there goes on to see."""
    backend = scripted()
    ask = b"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    async with asyncio.timeout(LIMIT_S), listening(backend) as port:
        first = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in first:
            writer.write(ask)
            await reader.readuntil(b"data: ")
        for _ in range(998):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ask)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 503 "), answer
            assert b"--max-dashboards" in answer
            assert b"retry-after" in answer.lower()
            writer.close()
        for reader, writer in first:
            await reader.readuntil(b'"number":')
            writer.close()


async def test_a_client_that_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "STALL_S", 0.3)
    monkeypatch.setattr(feeds, "STEADY_S", 0.001)
    backend = scripted()
    made = backend.feed._snapshots.make
    padding = b" " * 50_000

    def large(*arguments: Any) -> bytes:
        return made(*arguments) + padding

    monkeypatch.setattr(backend.feed._snapshots, "make", large)
    async with asyncio.timeout(LIMIT_S), listening(backend, send_buffer=4096) as port:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(b"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: bool(backend.feed._watchers))
            await until(lambda: not backend.feed._watchers)
            assert len(backend.feed._tasks) <= 2
