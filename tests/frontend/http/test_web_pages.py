"""What web pages may ask of a server without an API key, and that all who are no web page are served as before."""

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted import Scripted

from meshlm.frontend.http import web_pages
from meshlm.protocol.config import ServerConfig

URL = "http://localhost:8000"
ASK = {"prompt": "hi", "max_tokens": 2}
EVIL = "http://evil.example"
CROSS = {"Origin": EVIL, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}
OPEN_ADDRESS: Any = {"host": "0.0.0.0"}
KEYED: Any = {"api_key": ("secret",)}
ALLOWED: Any = {"allowed_origins": ("https://app.example",)}


def client(base_url: str = URL, **server: Any) -> httpx.AsyncClient:
    app = Scripted(ServerConfig(responses_store="off", **server)).app
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base_url)


async def status(headers: dict[str, str], path: str = "/v1/completions", base_url: str = URL, **server: Any) -> int:
    """Of a completion that is asked for with these headers, or of a GET."""
    async with client(base_url, **server) as asking:
        if path == "/v1/completions":
            answer = await asking.post(path, json=ASK, headers=headers)
        else:
            answer = await asking.get(path, headers=headers)
    if answer.status_code == 403:
        assert "access-control-allow-origin" not in answer.headers, "the page reads nothing of the refusal"
    return answer.status_code


# --- across origins ---


@pytest.mark.parametrize(
    "headers",
    [
        CROSS,
        {"Origin": EVIL},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"},
        {"Origin": "http://localhost:3000"},
        {"Origin": "chrome-extension://abc", "Sec-Fetch-Site": "none"},
        {"Origin": "http://localhost:8000.evil.example"},
        {"Origin": "file://"},
        {"Origin": ""},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},  # a form
    ],
)
async def test_a_page_of_another_origin_runs_nothing(headers: dict[str, str]) -> None:
    backend = Scripted()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(backend.app), base_url=URL) as asking:
        answer = await asking.post("/v1/completions", json=ASK, headers=headers)
    assert answer.status_code == 403
    assert "--allowed-origins" in answer.json()["error"]["message"]
    assert not backend.submits


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/metrics",
        "/dashboard/history",
        "/dashboard/events",
        "/settings",
        "/server_info",
        "/openapi.json",
        "/none",
    ],
)
async def test_a_page_of_another_origin_reads_nothing(path: str) -> None:
    assert await status(CROSS, path, server_dev_mode=True) == 403
    assert (
        await status({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}, path)
        == 403
    )


@pytest.mark.parametrize(
    "path", ["/pause", "/resume", "/sleep", "/wake_up", "/scale_elastic_ep", "/reset_prefix_cache", "/start_profile"]
)
async def test_a_page_of_another_origin_operates_nothing(path: str) -> None:
    async with client(server_dev_mode=True) as asking:
        assert (await asking.post(path, headers={"Origin": EVIL})).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": URL},
        {"Origin": URL, "Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
    ],
)
async def test_programs_and_the_servers_own_page_are_served(headers: dict[str, str]) -> None:
    assert await status(headers) == 200
    assert await status(headers, "/metrics") == 200


async def test_a_link_of_another_page_leads_here() -> None:
    follows = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert await status({**follows, "Sec-Fetch-Dest": "document"}, "/dashboard") == 200
    assert await status({**follows, "Sec-Fetch-Dest": "iframe"}, "/dashboard") == 403


@pytest.mark.parametrize(
    ("host", "origin", "expected"),
    [
        ("localhost", "http://localhost", 200),
        ("localhost:80", "http://localhost", 200),
        ("localhost", "http://localhost:80", 200),
        ("localhost", "https://localhost:443", 200),
        ("localhost", "http://localhost:8000", 403),
        ("localhost:8000", "http://localhost", 403),
        ("LocalHost:8000", "http://localhost:8000", 200),
        ("[::1]:8000", "http://[::1]:8000", 200),
    ],
)
async def test_an_origin_is_a_host_with_its_port(host: str, origin: str, expected: int) -> None:
    assert await status({"Host": host, "Origin": origin}) == expected


async def test_a_page_behind_a_proxy_that_changes_host() -> None:
    """The browser knows best; where it says nothing, as for plain HTTP, the origins are to be named."""
    assert (
        await status({"Host": "127.0.0.1:8000", "Origin": "https://chat.example", "Sec-Fetch-Site": "same-origin"})
        == 200
    )
    assert await status({"Host": "127.0.0.1:8000", "Origin": "http://chat.example"}) == 403
    opened: Any = {"allowed_origins": ("http://chat.example",)}
    assert await status({"Host": "127.0.0.1:8000", "Origin": "http://chat.example"}, **opened) == 200


# --- names of this host ---

MACHINE = socket.gethostname().lower()


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8000",
        "LOCALHOST",
        "localhost.",
        "app.localhost:1",
        "127.0.0.1:8000",
        "127.9.9.9",
        "[::1]:8000",
        MACHINE,
    ],
)
async def test_names_of_this_host(host: str) -> None:
    assert await status({"Host": host}) == 200
    assert await status({"Host": host}, "/dashboard") == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil",
        "10.0.0.5:8000",
        "[2001:db8::1]",
        "",
        "box.local",
        "[",
        "a, localhost",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/metrics", "/dashboard", "/docs"])
async def test_another_name_is_refused_where_this_host_alone_is_served(host: str, path: str) -> None:
    """DNS rebinding: the page's own name leads here, so to the browser all is of one origin."""
    assert await status({"Host": host, "Sec-Fetch-Site": "same-origin"}, path) == 403


@pytest.mark.parametrize(
    "host",
    [
        "10.0.0.5:8000",
        "[2001:db8::1]:8000",
        "meshlm:8000",
        "meshlm.default.svc.cluster.local",
        "meshlm.prod.svc",
        "box.local",
        "host.docker.internal",
    ],
)
async def test_names_that_no_page_on_the_web_has(host: str) -> None:
    """Of a server that others reach: by a container's port, a service, a pod's address."""
    assert await status({"Host": host}, **OPEN_ADDRESS) == 200
    assert await status({"Host": "evil.example"}, **OPEN_ADDRESS) == 403


async def test_allowed_hosts() -> None:
    names: Any = {"allowed_hosts": ("gpu.example.com", ".lab.example.com")}
    assert [
        await status({"Host": host}, **names)
        for host in ("gpu.example.com:8000", "a.lab.example.com", "GPU.example.com")
    ] == [200] * 3
    assert [await status({"Host": host}, **names) for host in ("evil.example", "xlab.example.com")] == [403] * 2
    assert await status({"Host": "evil.example"}, allowed_hosts=("*",)) == 200
    async with client() as asking:
        answer = await asking.get("/v1/models", headers={"Host": "evil.example"})
    assert "--allowed-hosts" in answer.json()["error"]["message"]


async def test_two_hosts_are_none() -> None:
    async with client() as asking:
        answer = await asking.get("/v1/models", headers=[("Host", "localhost"), ("Host", "localhost")])
    assert answer.status_code == 403


async def test_probes_come_by_any_name() -> None:
    for path in ("/health", "/ready", "/ping"):
        assert await status({"Host": "balancer.example", **CROSS}, path) == 200


def test_the_names_that_etc_hosts_gives_this_machine(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(
        "127.0.0.1 localhost\n127.0.1.1 gpu1.corp.example gpu1 # gpu1.evil\n10.0.0.9 other.example other\n"
    )
    assert set(web_pages._aliases("gpu1", hosts)) == {"gpu1.corp.example", "gpu1"}
    assert list(web_pages._aliases("gpu1", tmp_path / "none")) == []


# --- bodies ---


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("application/x-www-form-urlencoded", 415),
        ("text/plain", 415),
        ("text/plain;a=application/json", 415),
        ("multipart/form-data; boundary=x", 415),
        ("text/x+json", 415),
        (None, 415),
    ],
)
async def test_a_body_says_that_it_is_json(given: str | None, expected: int) -> None:
    headers = {} if given is None else {"Content-Type": given}
    async with client() as asking:
        answer = await asking.post("/v1/completions", content=b'{"prompt": "hi", "max_tokens": 2}', headers=headers)
    assert answer.status_code == expected
    if expected == 415:
        assert "-H 'Content-Type: application/json'" in answer.json()["error"]["message"]


async def test_an_empty_body_says_nothing() -> None:
    async with client(server_dev_mode=True) as asking:
        assert (await asking.post("/ping")).status_code == 200
        assert (await asking.post("/start_profile")).status_code == 404  # of who started without --profiler-dir


# --- --allowed-origins, and keys ---

PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


async def test_an_allowed_origin_asks_first_and_then() -> None:
    origin = {"Origin": "https://app.example", "Sec-Fetch-Site": "cross-site"}
    async with client(**ALLOWED) as asking:
        before = await asking.options(
            "/v1/chat/completions", headers={**origin, **PREFLIGHT, "Access-Control-Request-Private-Network": "true"}
        )
        answer = await asking.post("/v1/completions", json=ASK, headers=origin)
        as_text = await asking.post("/v1/completions", content=b"{}", headers={**origin, "Content-Type": "text/plain"})
        refused = await asking.post("/v1/completions", json={"prompt": 1.5}, headers=origin)
    assert before.status_code == answer.status_code == 200
    for one in (before, answer, refused):
        assert one.headers["access-control-allow-origin"] == "https://app.example"
        assert "Origin" in one.headers["vary"]
    assert "POST" in before.headers["access-control-allow-methods"]
    assert before.headers["access-control-allow-headers"] == "authorization,content-type"
    assert before.headers["access-control-allow-private-network"] == "true"
    assert "access-control-allow-credentials" not in answer.headers
    assert (as_text.status_code, refused.status_code) == (415, 400)


async def test_another_origin_is_not_opened_with_it() -> None:
    async with client(**ALLOWED) as asking:
        assert (await asking.options("/v1/completions", headers={"Origin": EVIL, **PREFLIGHT})).status_code == 403
        assert (await asking.post("/v1/completions", json=ASK, headers={"Origin": EVIL})).status_code == 403
        assert (
            await asking.post("/v1/completions", json=ASK, headers={"Sec-Fetch-Site": "cross-site"})
        ).status_code == 403
        assert (await asking.get("/v1/models", headers={"Host": "evil.example", **CROSS})).status_code == 403
        own = await asking.get("/v1/models", headers={"Origin": URL})
    assert own.status_code == 200
    assert "access-control-allow-origin" not in own.headers
    assert own.headers["vary"] == "Origin"


async def test_all_origins_are_opened_by_name_alone() -> None:
    assert await status(CROSS, allowed_origins=("*",)) == 200
    assert await status({"Sec-Fetch-Site": "cross-site"}, "/metrics", allowed_origins=("*",)) == 200
    assert await status({**CROSS, "Host": "evil.example"}, allowed_origins=("*",)) == 403


async def test_with_a_key_it_is_as_with_vllm() -> None:
    key = {"Authorization": "Bearer secret"}
    async with client(**KEYED) as asking:
        answer = await asking.post("/v1/completions", json=ASK, headers={**CROSS, **key, "Host": "any.example"})
        before = await asking.options("/v1/completions", headers={"Origin": EVIL, **PREFLIGHT})
        as_curl = await asking.post("/v1/completions", content=b'{"prompt": "hi"}', headers=key)
        without = await asking.post("/v1/completions", json=ASK, headers=CROSS)
    assert [one.status_code for one in (answer, before, as_curl, without)] == [200, 200, 200, 401]
    assert answer.headers["access-control-allow-origin"] == before.headers["access-control-allow-origin"] == "*"
    async with client(**KEYED, allowed_origins=()) as asking:
        closed = await asking.get("/v1/models", headers={"Origin": EVIL, **key})
    assert "access-control-allow-origin" not in closed.headers


async def test_a_certificate_is_no_key() -> None:
    """A browser shows it for any page; by a name of another page it does not come so far."""
    files: Any = {"ssl_certfile": "x.pem", "ssl_ca_certs": "x.pem", "ssl_cert_reqs": 2}
    assert await status({"Origin": "https://evil.example"}, **files) == 403
    assert await status({"Host": "llm.example.com"}, **files) == 200


# --- settings ---


async def test_settings_change_with_a_key_alone() -> None:
    change = {"max_waiting": 5}
    async with client() as asking:
        answer = await asking.post("/settings", json=change)
        shown = await asking.get("/settings")
    assert (answer.status_code, shown.status_code) == (403, 200)
    assert "--admin-api-key" in answer.json()["error"]["message"]
    backend = Scripted(ServerConfig(responses_store="off", admin_api_key=("boss",)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(backend.app), base_url=URL) as asking:
        assert (await asking.post("/settings", json=change)).status_code == 401
        assert (
            await asking.post("/settings", json=change, headers={"Authorization": "Bearer boss"})
        ).status_code == 200


async def test_who_names_no_host_is_no_browser() -> None:
    """Probes of HTTP/1.0: a browser always says where it is."""
    sent = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.0",
        "method": "GET",
        "path": "/v1/models",
        "query_string": b"",
        "headers": [],
    }
    await Scripted().app(scope, receive, send)
    assert sent[0]["status"] == 200
    sent.clear()
    await Scripted().app({**scope, "headers": [(b"origin", b"http://evil.example")]}, receive, send)
    assert sent[0]["status"] == 403
