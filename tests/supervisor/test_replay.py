"""Replays against a small server, whose tokens are those that the test wants: what it is asked, and where a difference is found."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlm.protocol.recording import RecordedSequence
from meshlm.protocol.wire.ids import FinishReason
from meshlm.supervisor import replay
from meshlm.supervisor.cli import main
from meshlm.supervisor.cli.terminal import Server
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.replay import Difference, Replay, asked, first_difference, read

BODY = {"model": "tiny", "prompt": [7, 8], "seed": 3, "max_tokens": 9, "min_tokens": 4, "temperature": 0.5}
TOKENS = st.lists(st.integers(0, 3), max_size=12)


@given(TOKENS, TOKENS)
def test_the_first_difference(recorded: list[int], now: list[int]) -> None:
    found = first_difference(recorded, now)
    if found is None:
        assert recorded == now
        return
    same = found.num_same
    assert recorded[:same] == now[:same]
    assert (found.recorded, found.now) == (
        recorded[same] if same < len(recorded) else None,
        now[same] if same < len(now) else None,
    )
    assert found.recorded != found.now
    both, longer = min(len(recorded), len(now)), max(len(recorded), len(now))
    behind = [one for one in range(same + 1, longer) if one >= both or recorded[one] != now[one]]
    assert found.num_after == len(behind)


def test_where_one_ends() -> None:
    assert first_difference([1, 2], [1, 2, 5, 6]) == Difference(2, None, 5, 1)
    assert first_difference([1, 2, 3], [1]) == Difference(1, 2, None, 1)
    assert first_difference([], []) is None


def recorded(*tokens: int, reason: FinishReason = FinishReason.LENGTH, **changes: Any) -> RecordedSequence:
    return RecordedSequence(
        **{
            "custom_id": "cmpl-a-1-0",
            "request_id": "cmpl-a",
            "body": BODY | changes.pop("body", {}),
            "output_token_ids": list(tokens),
            "finish_reason": reason,
            **changes,
        }
    )


def test_what_is_asked() -> None:
    """All that decides the tokens, and what is needed to compare them."""
    told = {"logprobs": 5, "logprob_token_ids": [1], "prompt_logprobs": 1, "timeout": 3.0, "num_speculative_tokens": 2}
    sequence = recorded(1, 2, body={"logit_bias": {"5": 1}, **told})
    added = {"n": 1, "stream": False, "logprobs": 0, "return_token_ids": True}
    assert asked(sequence) == BODY | {"logit_bias": {"5": 1}} | added
    for reason in (FinishReason.ABORT, FinishReason.ERROR):
        body = asked(recorded(1, 2, reason=reason))
        assert (body["max_tokens"], body["min_tokens"]) == (2, 2), "what was cut off is not computed"


def write(file: Path, *sequences: RecordedSequence | bytes) -> Path:
    lines = [one if isinstance(one, bytes) else msgspec.json.encode(one) for one in sequences]
    file.write_bytes(b"\n".join(lines) + b"\n")
    return file


def test_files_and_ids(tmp_path: Path) -> None:
    one, other = recorded(1), recorded(2, request_id="chatcmpl-b", custom_id="chatcmpl-b-7-0")
    write(tmp_path / "1.jsonl", one, b"")
    second = write(tmp_path / "2.jsonl", other)
    write(tmp_path / "3.txt", b"?")
    assert list(read(tmp_path)) == [one, other]
    assert list(read(second)) == [other]
    for name in ("chatcmpl-b", "chatcmpl-b-7-0", "b"):
        assert list(read(tmp_path, name)) == [other]
    assert list(read(tmp_path, "chatcmpl")) == [], "an id is not a part of one"


def test_lines_that_come_while_it_is_read_are_not_read(tmp_path: Path) -> None:
    """A server that records has its replays in its file, too."""
    file, found = write(tmp_path / "a.jsonl", recorded(1), recorded(2)), []
    for one in read(file):
        found.append(one)
        with file.open("ab") as more:
            more.write(msgspec.json.encode(one) + b"\n")
    assert len(found) == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"?", "line 2: no recorded request: JSON is malformed"),
        (b"\xff", "line 2: no recorded request"),
        (b"[]", "line 2: no recorded request: Expected `object`, got `array`"),
        (b'{"custom_id": "a", "body": {"model": "a"}}', "missing required field `output_token_ids`"),
        (msgspec.json.encode(recorded(1, body={"model": 5})), "Expected `str`, got `int` - at `$.model`"),
        (msgspec.json.encode(recorded(1, body={"prompt": "a"})), "Expected `array`, got `str` - at `$.prompt`"),
        (msgspec.json.encode(recorded(1, body={"min_tokens": "9"})), "got `str` - at `$.min_tokens`"),
        (msgspec.json.encode(recorded(1)).replace(b'"length"', b'"bored"'), "Invalid enum value 'bored'"),
    ],
)
def test_a_line_that_is_none(line: bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        list(read(write(tmp_path / "a.jsonl", recorded(1), line)))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


class Peer(http.server.ThreadingHTTPServer):
    """`tokens` is what a replay gets."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokens, self.logprobs, self.reason = [1, 2, 3], [-1.0, -2.0, -3.0], "length"
        self.of_ids = {2: -2.5, 9: -4.0}
        self.refuses = ""
        self.seen: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/detokenize":
            return {"prompt": "".join(f"<{token}>" for token in body["tokens"])}
        self.seen.append(body)
        if "logprob_token_ids" in body:
            top = {f"token_id:{token}": self.of_ids[token] for token in body["logprob_token_ids"]}
            return {"choices": [{"logprobs": {"top_logprobs": [top]}}]}
        logprobs = {"token_logprobs": self.logprobs}
        choice = {"token_ids": self.tokens, "logprobs": logprobs, "finish_reason": self.reason}
        return {"choices": [choice], "system_fingerprint": "now"}


class Handler(http.server.BaseHTTPRequestHandler):
    server: Peer

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.refuses:
            self._send(400, {"error": {"message": self.server.refuses}})
        else:
            self._send(200, self.server.answer(self.path, body))

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def outcome(peer: Peer, sequence: RecordedSequence) -> tuple[str, str]:
    ((_, found),) = Replay(Server.of(peer.url, "")).outcomes(iter([sequence]))
    return found.kind, found.text


def test_the_same(peer: Peer) -> None:
    assert outcome(peer, recorded(1, 2, 3)) == ("same", "same: 3 tokens")
    near = recorded(1, 2, 3, logprobs=[-1.0, -2.25, -3.0])
    assert outcome(peer, near) == ("same", "same: 3 tokens; log-probabilities differ by 0.250000 at most")
    cut = recorded(1, 2, 3, reason=FinishReason.ABORT)
    assert outcome(peer, cut) == ("same", "same: 3 tokens")
    ended = recorded(1, 2, 3, reason=FinishReason.STOP)
    assert outcome(peer, ended) == ("different", "3 tokens are the same, and finish_reason stop is now length")


def test_a_token_differs(peer: Peer) -> None:
    kind, text = outcome(peer, recorded(1, 9, 3, 4))
    assert kind == "different"
    expected = "differs at token 1 of 4: 9 '<9>' (-4.000000) is now 2 '<2>' (-2.500000), a gap of 1.500000"
    assert text == f"{expected}; 1 of 2 tokens after it differ"
    assert peer.seen[-1]["prompt"] == [7, 8, 1], "the prompt, and the tokens before the difference"
    assert peer.seen[-1]["logprob_token_ids"] == [9, 2]


def test_one_ends_before(peer: Peer) -> None:
    assert "differs at token 1 of 1: 2 '<2>' (-2.500000) is new; 1 of 1" in outcome(peer, recorded(1))[1]
    peer.tokens = [1]
    assert "differs at token 1 of 2: 9 '<9>' (-4.000000) is not there now; 0 of 0" in outcome(peer, recorded(1, 9))[1]


def test_what_cannot_be_asked(peer: Peer) -> None:
    skipped = recorded(1, not_replayable=["prompt_embeds", "stop"])
    assert outcome(peer, skipped) == ("not replayable", "not replayable: prompt_embeds, stop")
    assert not peer.seen
    peer.tokens = None  # type: ignore[assignment]
    assert "the answer is not that of a MeshLM" in outcome(peer, recorded(1))[1]
    peer.refuses = "temperature: too hot"
    assert outcome(peer, recorded(1)) == ("not answered", "not answered: temperature: too hot")


def test_outcomes_come_in_order(peer: Peer) -> None:
    many = [recorded(1, 2, 3, custom_id=str(number)) for number in range(2 * replay.CONCURRENT + 5)]
    found = [one.custom_id for one, _ in Replay(Server.of(peer.url, "")).outcomes(iter(many))]
    assert found == [one.custom_id for one in many]


@pytest.mark.parametrize(
    ("sequences", "code", "says"),
    [
        ([recorded(1, 2, 3)], 0, "1 same"),
        ([recorded(1, 2, 3), recorded(1, not_replayable=["file"])], 0, "1 same, 1 not replayable"),
        ([recorded(1, 2, 3), recorded(1, 9, 3)], 1, "1 same, 1 different"),
        ([recorded(1, not_replayable=["file"])], 2, "1 not replayable"),
    ],
)
def test_exit_codes(
    sequences: list[RecordedSequence],
    code: int,
    says: str,
    peer: Peer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write(tmp_path / "a.jsonl", *sequences)
    assert main.run(["replay", str(file), "--url", f"{peer.url}/v1"]) == code
    assert capsys.readouterr().out.splitlines()[-1] == says


def test_another_server(peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "a.jsonl", recorded(1, 2, 3, system_fingerprint="then"))
    assert main.run(["replay", "a", "--recordings", str(file), "--url", peer.url]) == 0
    assert "recorded by then, computed by now" in capsys.readouterr().err
    peer.refuses = "no"
    assert main.run(["replay", str(file), "--url", peer.url]) == 2
    assert capsys.readouterr().out.splitlines() == ["cmpl-a-1-0: not answered: no", "1 not answered"]


def test_what_is_refused_is_one_line(peer: Peer, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Before anything is asked."""
    other = write(tmp_path / "other.jsonl", recorded(1), recorded(1, body={"model": "huge"}))
    empty = write(tmp_path / "empty.jsonl")
    for words, says in (
        ((str(other),), f"recorded of the model 'huge'; {peer.url} has 'tiny'"),
        ((str(empty),), "no requests"),
        ((str(tmp_path / "nothing.jsonl"),), "there is no such file"),
        (("nobody", "--recordings", str(other)), "no request nobody is recorded there"),
        (("nobody", "--recordings", str(tmp_path / "no")), "No such file"),
    ):
        assert main.run(["replay", *words, "--url", peer.url]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert says in line
    assert main.run(["replay", str(other), "--url", peer.url, "--device", "fake"]) == 2
    assert "--device: it is for a mesh of its own, which needs MODEL" in capfd.readouterr().err
    assert main.run(["replay", str(other), "tiny", "--url", peer.url]) == 2
    assert "--url: a server, or MODEL" in capfd.readouterr().err
    assert not peer.seen
    for url, says in (("127.0.0.1", "must be like"), ("http://127.0.0.1:1", "no answer from")):
        assert main.run(["replay", str(other), "--url", url]) == 2
        assert says in capfd.readouterr().err
