"""Pages of other origins and a server without an API key, in a real browser: see frontend/http/web_pages.py."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from browser import Browser
from dashboard_site import Site

# What a page of another origin tries: what it may send unasked, what it must ask for, and what it might read.
ATTACK = """<!doctype html><script>
const to = "http://localhost:PORT";
const ask = JSON.stringify({ prompt: "hi", max_tokens: 2 });
const tries = {
  text: () => fetch(`${to}/v1/completions`, { method: "POST", mode: "no-cors", headers: { "Content-Type": "text/plain" }, body: ask }),
  blob: () => fetch(`${to}/v1/completions`, { method: "POST", mode: "no-cors", body: new Blob([ask]) }),
  json: () => fetch(`${to}/v1/completions`, { method: "POST", headers: { "Content-Type": "application/json" }, body: ask }),
  beacon: async () => navigator.sendBeacon(`${to}/v1/completions`, ask),
  settings: () => fetch(`${to}/settings`, { method: "POST", mode: "no-cors", body: '{"max_concurrent_requests": 1}' }),
  models: () => fetch(`${to}/v1/models`).then((answer) => answer.text()),
  history: () => fetch(`${to}/dashboard/history`).then((answer) => answer.text()),
};
const read = {};
const done = Promise.all(Object.entries(tries).map(async ([name, attempt]) => {
  try { read[name] = await attempt(); } catch (error) { read[name] = error.name; }
})).then(() => (window.over = true));
</script>"""


@pytest.fixture
def keyless() -> Iterator[Site]:
    found = Site()
    yield found
    found.stop()


@pytest.fixture
def other_origin() -> Iterator[Callable[[str], str]]:
    """Serves a page at a port of its own, and gives its address."""
    served: list[ThreadingHTTPServer] = []

    def serve(page: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(page.encode())

            def log_message(self, *words: Any) -> None:
                """Nothing is said."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        served.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}/"

    yield serve
    for server in served:
        server.shutdown()
        server.server_close()


def test_a_page_of_another_origin_runs_and_reads_nothing_here(
    browser: Browser, keyless: Site, other_origin: Callable[[str], str]
) -> None:
    browser.open(other_origin(ATTACK.replace("PORT", str(keyless.port))))
    browser.until("window.over === true")
    for name in ("json", "models", "history"):
        assert browser.run(f"read.{name}") == "TypeError"
    assert keyless.do(lambda: len(keyless.backend.submits)) == 0
    assert keyless.do(lambda: keyless.backend.config.server.max_concurrent_requests) > 1


def test_the_servers_own_page_needs_no_key_here(browser: Browser, keyless: Site) -> None:
    for host in ("127.0.0.1", "localhost"):
        browser.open(f"http://{host}:{keyless.port}/dashboard")
        browser.until("byId('state').textContent === 'serving'")
        browser.run("byId('message').value = 'Hi'; byId('ask').requestSubmit()")
        browser.until("byId('said').textContent.startsWith('first token after')")
    assert keyless.do(lambda: len(keyless.backend.submits)) == 2


def test_an_origin_that_is_allowed_asks_and_reads(browser: Browser, other_origin: Callable[[str], str]) -> None:
    address = other_origin("<!doctype html>")
    site = Site(allowed_origins=(address.rstrip("/"),))
    try:
        browser.open(address)
        headers = "{'Content-Type': 'application/json', Authorization: 'Bearer x'}"
        asked = f"{{method: 'POST', headers: {headers}, body: JSON.stringify({{prompt: 'hi'}})}}"
        browser.run(
            f"fetch('http://localhost:{site.port}/v1/completions', {asked})"
            ".then((answer) => answer.json()).then((answer) => (window.said = answer.choices[0].text))"
        )
        browser.until("window.said === 'Hello you'")
    finally:
        site.stop()
