"""`meshlm top`: what it draws of the dashboard's events, and one line for what goes wrong."""

import builtins
import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import msgspec
import pytest
from rich.console import Console

from meshlm.protocol.dashboard import History, NewsView, Percentiles, ProcessView, RankView, RequestView, Snapshot
from meshlm.supervisor.cli import main, terminal, top
from meshlm.supervisor.cli.top_view import Screen, seconds

HOSTILE = "\x1b[2J[red]evil[/red]"
SNAPSHOT = Snapshot(
    number=7, at_s=1750000000.0, frontend="frontend/0", version="1.2", model="tiny", serving=True, reason="", paused=False,
    blocked="", missing="", num_held=2, num_open=3, num_watchers=1, prompt_per_s=2000.0, generated_per_s=1234.0,
    ttft=Percentiles(9, 0.0573, 0.2, 1.5), itl=Percentiles(0, 0.0, 0.0, 0.0),
    processes=(
        ProcessView("frontend/0", "", "ready", 70, 7200.0, 0, "3 requests", 50_000_000),
        ProcessView("worker/0", "", "starting", 77, 3.0, 2, "weights", 51_000_000),
    ),
    standbys=(ProcessView("worker", "", "standby", 78, 3.0, 0, "", 49_000_000),),
    edges=(),
    ranks=(
        RankView(0, 5, 4, {"capacity": 4}, 0.95, {"used": 9}, {"full": 7, "sliding": 2}, 0.25, 6, 2000.0, 1234.0, 0.5,
                 {"device": 0.0204, "return": 0.001}, (30, 10), 0.625, 2.25, "prefill", 1500),
    ),
    stores=(),
    running=(RequestView("cmpl-1", "", 0.0, 2.5, {"encode": 0.001, "decode": 2.4}, rank="0", num_output_tokens=31, num_attempts=2),),
    num_ended=0, ended=(), news=(NewsView(1750000000.0, "error", "worker/0 died and is started again (signal 9)"),),
)  # fmt: skip


class Events(BaseHTTPRequestHandler):
    """A frontend: `snapshots`, and then the end of the stream."""

    snapshots: ClassVar[list[Snapshot]] = []
    asked: ClassVar[list[tuple[str, str | None]]] = []
    refusal = b""

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        self.send_response(403 if self.refusal else 200)
        self.end_headers()
        self.wfile.write(self.refusal)
        if self.path == "/dashboard/history" and not self.refusal:
            self.wfile.write(msgspec.json.encode(History(0, (), (NewsView(1.0, "info", "long ago"), *SNAPSHOT.news))))
            return
        for snapshot in [] if self.refusal else self.snapshots:
            self.wfile.write(b"data: " + msgspec.json.encode(snapshot) + b"\n\n")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in terminal.API_KEYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Events, "asked", [])
    monkeypatch.setattr(Events, "snapshots", [SNAPSHOT] * 20)
    found = ThreadingHTTPServer(("127.0.0.1", 0), Events)
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def drawn(snapshot: Snapshot, width: int = 160, height: int = 50) -> list[str]:
    out = io.StringIO()
    Screen(Console(file=out, width=width, height=height), "http://x").show(snapshot)
    return out.getvalue().splitlines()


def test_it_shows_what_the_mesh_does() -> None:
    lines = drawn(SNAPSHOT)
    text = "\n".join(lines)
    assert lines[0].startswith("MeshLM tiny  serving  http://x  frontend/0")
    assert (
        "1,234 tokens/s  2,000 prompt tokens/s  5 running  6 waiting  TTFT 57.3 ms / 200 ms / 1.5 s  ITL -" in lines[1]
    )
    (rank,) = (line.split() for line in lines if line.lstrip().startswith("0 "))
    assert rank[:6] == ["0", "prefill", "1,500", "→", "5", "4"]
    for word in ("95%", "full 7, sliding 2", "25%", "50%", "67%", "62% 2.2", "device 20.4 ms  return 1.0 ms"):
        assert word in text, word
    (worker,) = (line for line in lines if line.startswith("worker/0"))
    assert worker.split() == ["worker/0", "starting", "2", "3.0", "s", "51", "MB", "weights"]
    assert "standby" in text
    assert "cmpl-1" in text
    assert "encode 1.0 ms  decode 2.4 s, attempt 2" in text
    assert "worker/0 died and is started again (signal 9)" in lines[-1]


def test_a_mesh_that_does_not_serve_says_why_first() -> None:
    lines = drawn(msgspec.structs.replace(SNAPSHOT, serving=False, reason="no detokenizer", ranks=(), running=()))
    assert "not serving: no detokenizer" in lines[0]
    assert "no open requests" in "\n".join(lines)


def test_nodes_have_a_column_where_there_are_several() -> None:
    far = msgspec.structs.replace(SNAPSHOT.processes[1], node="gpu-7")
    text = "\n".join(drawn(msgspec.structs.replace(SNAPSHOT, processes=(far,))))
    assert "process   node" in text
    assert "gpu-7" in text


def test_what_others_chose_moves_no_cursor_and_is_no_markup() -> None:
    process = msgspec.structs.replace(SNAPSHOT.processes[0], name=HOSTILE, phase=HOSTILE, node=HOSTILE)
    request = msgspec.structs.replace(SNAPSHOT.running[0], id=HOSTILE, hops={HOSTILE: 1.0})
    news = NewsView(0.0, "info", HOSTILE)
    snapshot = msgspec.structs.replace(
        SNAPSHOT, model=HOSTILE, processes=(process,), running=(request,), news=(news,), reason=HOSTILE
    )
    text = "\n".join(drawn(snapshot))
    assert "\x1b" not in text
    assert text.count("\\x1b[2J[red]evil[/red]") == 8


def test_it_is_drawn_in_place_within_the_terminal() -> None:
    out = io.StringIO()
    with Screen(Console(file=out, width=40, height=9, force_terminal=True, color_system=None), "http://x") as screen:
        assert not screen.has_drawn
        screen.draw(SNAPSHOT)
        screen.draw(SNAPSHOT)
        begun = out.tell()
        screen.lost("it was killed")
    out.seek(begun)
    lines = out.read().split("\n")
    assert "not connected: it was killed; these fig…" in lines[0]
    assert len(lines) <= 9 + 1


def test_where_no_terminal_is_it_shows_all_once(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["top", "--port", str(server.server_port), "--api-key", "secret"]) == 0
    out = capsys.readouterr().out
    assert "MeshLM tiny  serving" in out
    assert out.count("died and is started again") == out.count("long ago") == 1
    paths = ["/dashboard/history", "/dashboard/events?every=0.1"]
    assert Events.asked == [(path, "Bearer secret") for path in paths]
    assert main.run(["top", "--once", "--url", f"http://127.0.0.1:{server.server_port}/v1"]) == 0


def test_what_goes_wrong_is_one_line(
    server: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Events, "refusal", b'{"error": {"message": "Forbidden: this key is not for admin"}}')
    assert main.run(["top", "--port", str(server.server_port)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("Forbidden: this key is not for admin")
    monkeypatch.setattr(Events, "refusal", b"")
    monkeypatch.setattr(Events, "snapshots", [])
    assert main.run(["top", "--port", str(server.server_port)]) == 1
    assert "the events have ended" in capsys.readouterr().err
    assert main.run(["top", "--every", "0"]) == 2
    assert "--every 0: seconds from 0.1 to 5" in capsys.readouterr().err


def test_without_rich_it_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.startswith("rich"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="rich")
        return found(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main.run(["top"]) == 1
    assert top.NEEDS_RICH in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 µs"), (0.0123, "12.3 ms"), (0.5, "500 ms"), (90.0, "90.0 s"), (600.0, "10 min"), (9000.0, "2 h")],
)
def test_durations(value: float, text: str) -> None:
    assert seconds(value) == text
