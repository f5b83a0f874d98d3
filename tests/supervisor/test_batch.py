"""Batches through a small server: every line gets its line, in order, whatever is wrong with others."""

import argparse
import http.server
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshlm.supervisor import batch
from meshlm.supervisor.cli import run_batch
from meshlm.supervisor.cli.terminal import Server
from meshlm.supervisor.errors import StartError, UsageError


class Peer(http.server.ThreadingHTTPServer):
    """A server whose answers are its request's prompt; "full", "lost" and "bad" are what they say, once each where that is mended."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, str | None, Any]] = []
        self.troubles = ["full", "lost"]
        self.files: dict[str, bytes] = {}
        self.refuses_puts = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Peer

    def _read(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def do_POST(self) -> None:
        body = json.loads(self._read())
        self.server.seen.append((self.path, self.headers["Idempotency-Key"], self.headers["Authorization"]))
        prompt = body.get("prompt")
        if prompt in self.server.troubles:
            self.server.troubles.remove(prompt)
            if prompt == "full":
                self._answer(503, {"error": {"message": "full"}})
            return  # and the connection closes
        self._answer(400 if prompt == "bad" else 200, {"error": {"code": 400}} if prompt == "bad" else {"text": prompt})

    def do_GET(self) -> None:
        found = self.server.files.get(self.path)
        self.send_response(404 if found is None else 200)
        self.end_headers()
        self.wfile.write(found or b"")

    def do_PUT(self) -> None:
        body = self._read()
        self.server.refuses_puts -= 1
        refused = self.server.refuses_puts >= 0
        if not refused:
            self.server.files[self.path] = body
        self.send_response(500 if refused else 201)
        self.end_headers()

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Tests are quiet."""


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def line(custom_id: str, prompt: str, **fields: Any) -> bytes:
    asked = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}, **fields}
    return json.dumps(asked).encode() + b"\n"


def answers_of(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(one) for one in data.splitlines()]


def test_a_broken_line_gets_an_error_and_the_others_run(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "AGAIN_S", 0.01)
    source = [
        line("a", "ü"),
        b"\n",
        b"{broken\n",
        line("b", "x", method="GET"),
        line("c", "x", url="/pause"),
        line("d", "x", body={"stream": True}),
        line("a", "again"),
        b"[]\n",
        line("e", "bad"),
        line("f", "full"),
        b"\xff\n",
        line("g", "lost"),
        line("h", "x").replace(b'"h"', b"5"),
        line("i", "x", body=[]),
        line("j", "last")[:-1],
    ]
    out = io.BytesIO()
    counts = batch.run(io.BytesIO(b"".join(source)), out, Server.of(f"{peer.url}/v1", "secret"))
    found = answers_of(out.getvalue())
    assert [one["custom_id"] for one in found] == ["a", "", "b", "c", "d", "a", "", "e", "f", "", "g", "", "i", "j"]
    fine = {one["custom_id"]: one["response"]["body"] for one in found if one["error"] is None}
    assert fine == {"a": {"text": "ü"}, "f": {"text": "full"}, "g": {"text": "lost"}, "j": {"text": "last"}}
    assert (counts.answered, counts.failed) == (4, 10)
    errors = [one for one in found if one["error"] is not None]
    assert all(one["response"]["status_code"] == 400 and one["response"]["body"] is None for one in errors)
    assert errors[0]["error"]["error"]["message"].startswith("line 3: is not JSON")
    assert "that of line 1" in errors[4]["error"]["error"]["message"]
    assert {path for path, _, _ in peer.seen} == {"/v1/completions"}
    assert {key for _, _, key in peer.seen} == {"Bearer secret"}
    keys = [key for _, key, _ in peer.seen]
    assert (len(keys), len(set(keys))) == (7, 5), "asked again by the same key"


def test_a_request_outlives_any_number_of_frontends(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the same key, as long as the server may come back; a line that fails all the same is the command's exit code."""
    monkeypatch.setattr(batch, "AGAIN_S", 0.001)
    peer.troubles += ["lost"] * 30
    out = tmp_path / "out"
    arguments = argparse.Namespace(input_file=str(tmp_path / "in"), output_file=str(out), output_tmp_dir=None)
    (tmp_path / "in").write_bytes(line("a", "lost"))
    assert run_batch._answer(arguments, Server.of(peer.url, "")) == 0
    assert [one["response"]["body"] for one in answers_of(out.read_bytes())] == [{"text": "lost"}]
    assert len(peer.seen) == 32
    assert len({key for _, key, _ in peer.seen}) == 1
    monkeypatch.setattr(batch, "LOST_S", 0.01)
    peer.troubles += ["lost"] * 10_000
    assert run_batch._answer(arguments, Server.of(peer.url, "")) == 1
    assert answers_of(out.read_bytes())[0]["error"]["error"]["message"].startswith("no answer: ")


def test_a_server_that_is_gone_is_not_waited_for(peer: Peer) -> None:
    ended = threading.Event()
    ended.set()
    peer.troubles += ["lost"] * 9
    out = io.BytesIO()
    counts = batch.run(io.BytesIO(line("a", "lost") * 3), out, Server.of(peer.url, ""), ended=ended)
    assert (counts.answered, counts.failed) == (0, 3)
    assert answers_of(out.getvalue())[0]["response"]["status_code"] == 500


def test_files_behind_http(peer: Peer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(batch, "UPLOAD_AGAIN_S", 0.01)
    peer.files["/in.jsonl"] = line("a", "x")
    peer.refuses_puts = 2
    with batch.requests(f"{peer.url}/in.jsonl") as source, batch.answers(f"{peer.url}/out.jsonl", str(tmp_path)) as out:
        batch.run(source, out, Server.of(peer.url, ""))
    assert answers_of(peer.files["/out.jsonl"])[0]["response"]["body"] == {"text": "x"}
    assert list(tmp_path.iterdir()) == []


def test_answers_that_nobody_takes_are_kept(peer: Peer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(batch, "UPLOAD_AGAIN_S", 0.01)
    peer.refuses_puts = 99
    with (
        pytest.raises(StartError, match=r"HTTP 500 .*the answers are in"),
        batch.answers(f"{peer.url}/out.jsonl", str(tmp_path)) as out,
    ):
        out.write(b"answers\n")
    (kept,) = tmp_path.iterdir()
    assert kept.read_bytes() == b"answers\n"


@pytest.mark.parametrize("name", ["/nowhere/in.jsonl", "http://127.0.0.1:1/in.jsonl", "http://[/x"])
def test_what_cannot_be_read_is_a_line_with_the_flag(name: str) -> None:
    with pytest.raises(UsageError, match=r"^-i "), batch.requests(name):
        pass


def test_what_cannot_be_written_is_a_line_with_the_flag(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^-o "), batch.answers(str(tmp_path / "no" / "out"), None):
        pass
    with pytest.raises(UsageError, match=r"^--output-tmp-dir "), batch.answers("http://x/y", str(tmp_path / "no")):
        pass


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x/?a=b"])
def test_an_address_of_no_server(url: str) -> None:
    with pytest.raises(ValueError, match="must be like"):
        Server.of(url, "")


def test_lines_have_vllms_fields() -> None:
    (found,) = answers_of(batch.answered_line("a", 200, {"x": 1}))
    assert set(found) == {"id", "custom_id", "response", "error"}
    assert set(found["response"]) == {"status_code", "request_id", "body"}
