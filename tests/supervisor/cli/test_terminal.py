"""`meshlm chat` and `meshlm complete` against a server in a thread: what is asked, what is shown, and one line for what goes wrong."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from meshlm.supervisor.cli import main

CHUNKS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [{"delta": {"role": "assistant", "content": ""}}, {"delta": {"content": "Hi"}}],
    "/v1/completions": [{"text": "Hi"}],
}


class Answers(BaseHTTPRequestHandler):
    """Keeps what it is asked."""

    asked: ClassVar[list[tuple[str, Any, str | None]]] = []
    wrong = b""  # in place of what is right

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body, self.headers["Authorization"]))
        events = [{"choices": [choice]} for choice in CHUNKS[self.path]] + [
            {"choices": [], "usage": {"completion_tokens": 5}}
        ]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._answer(self.wrong or text.encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(400 if body.startswith(b'{"error') else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("MESHLM_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Answers, "asked", [])
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_chat_with_vllms_words(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["chat", "--url", url, "--model-name", "mine", "--system-prompt", "Be brief", "--api-key", "k"]
    assert main.run([*words, "-q", "Hello", "--stats", "--max-tokens", "3"]) == 0
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    asked = {"model": "mine", "messages": messages, "stream": True, "max_tokens": 3}
    asked["stream_options"] = {"include_usage": True}
    assert Answers.asked == [("/v1/chat/completions", asked, "Bearer k")]
    first, *stats = capsys.readouterr().out.splitlines()
    assert first == "Hi"
    assert [line.split()[0] for line in stats] == ["TTFT:", "TPS:"]
    assert "(5 tokens in " in stats[1]


def test_a_conversation_remembers(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n\n"))
    assert main.run(["chat", "--url", url]) == 0
    bodies = [body for _, body, _ in Answers.asked]
    assert [body["model"] for body in bodies] == ["first", "first"]
    assert [m["content"] for m in bodies[1]["messages"]] == ["one", "Hi", "two"]


def test_complete(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
    assert main.run(["complete", "--url", url + "/", "--quick", "Once"]) == 0
    asked = {"model": "first", "prompt": "Once", "stream": True}
    assert Answers.asked == [("/v1/completions", asked, "Bearer of-the-environment")]
    assert capsys.readouterr().out == "Hi\n"


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_the_key_is_found_where_serve_finds_it(command: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "somebody's")
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert main.run([command, "--url", url, "--quick", "Once"]) == 0
    monkeypatch.setenv("MESHLM_API_KEY", "ours")
    assert main.run([command, "--url", url, "--quick", "Once"]) == 0
    assert [key for _, _, key in Answers.asked] == ["Bearer theirs", "Bearer ours"]


@pytest.mark.parametrize(
    "bad", ["localhost:8000", "ftp://x/v1", "http://", "http://x:99999/v1", "http://x/v 1", "http://[/"]
)
@pytest.mark.parametrize("command", ["chat", "complete"])
def test_what_is_no_url_gets_one_line(command: str, bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([command, "--url", bad, "-q", "x"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"meshlm: error: --url {bad}: must be like ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (b'{"error": {"message": "no\\nsuch model"}}', "meshlm: no such model"),
        (b"data: {nonsense\n\n", "meshlm: no answer from "),
        (b'data: {"error": {"message": "gone"}}\n\n', "meshlm: gone"),
        (b"data: 7\n\n", "meshlm: no answer from "),
        (b"data: \xff\n\n", "meshlm: no answer from "),
    ],
)
def test_what_goes_wrong_gets_one_line(
    url: str, wrong: bytes, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Answers, "wrong", wrong)
    assert main.run(["chat", "--url", url, "-q", "x"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert err.count("\n") == 1


def test_nobody_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["complete", "--host", "127.0.0.1", "--port", "1", "-q", "x"]) == 1
    assert main.run(["complete", "--port", "70000", "-q", "x"]) == 1
    assert main.run(["complete", "--api-key", "a\nb", "-q", "x", "--model-name", "m", "--port", "1"]) == 1
    assert capsys.readouterr().err.count("\n") == 3
