"""`bench serve` with vLLM's words against a server in a thread: what it sends, what it saves, and one line for what is wrong."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from meshlm.supervisor.cli import main

USAGE = {"choices": [], "usage": {"completion_tokens": 2}}


class Answers(BaseHTTPRequestHandler):
    """Two tokens for each request; a token a word for those that ask for ids. `wrong`: in place of a stream."""

    asked: ClassVar[list[tuple[str, Any, dict[str, str]]]] = []
    wrong: ClassVar[list[bytes]] = []  # one for each request, until there are no more

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "org/first"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"null")
        self.asked.append((self.path, body, dict(self.headers)))
        if self.path == "/tokenize":
            text = body["prompt"] if "prompt" in body else "<user> " + body["messages"][0]["content"] + " <assistant>"
            self._answer(json.dumps({"tokens": list(range(len(text.split())))}).encode())
        elif self.path == "/detokenize":
            self._answer(json.dumps({"prompt": " ".join("w" for _ in body["tokens"])}).encode())
        elif self.path.endswith("_profile"):
            self._answer(b"{}")
        elif self.wrong:
            self._answer(self.wrong.pop(0))
        else:
            choice: dict[str, Any] = {"delta": {"content": "x"}} if "chat" in self.path else {"text": "x"}
            events = [{"choices": [choice]}, {"choices": [choice]}, USAGE]
            self._answer(
                b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"
            )

    def _answer(self, body: bytes) -> None:
        self.send_response(400 if body.startswith(b'{"error') else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    found = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture
def url(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Answers, "asked", [])
    monkeypatch.setattr(Answers, "wrong", [])
    return server


def bodies(path: str = "/v1/completions") -> list[Any]:
    return [body for asked, body, _ in Answers.asked if asked == path]


def bench(url: str, words: str, *more: str) -> int:
    return main.run(["bench", "serve", "--base-url", url, *words.split(), *more])


def test_a_result_has_vllms_keys(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--num-prompts 4 --input-len 6 --output-len 2 --goodput ttft:60000 e2el:60000 --burstiness 0.5 --request-rate 1000"
    more = f"--save-result --save-detailed --result-dir {tmp_path / 'new'} --label mine --metadata tp=2 by=me --max-concurrency 2"
    assert bench(url, f"{words} {more} --percentile-metrics ttft,e2el --metric-percentiles 50,99.9") == 0
    (file,) = (tmp_path / "new").iterdir()
    assert file.name.startswith("mine-1000.0qps-concurrency2-first-")
    found = json.loads(file.read_text())
    assert (found["completed"], found["total_input_tokens"], found["total_output_tokens"]) == (4, 24, 8)
    assert found["request_goodput"] == found["request_throughput"]
    assert (found["label"], found["backend"], found["tp"], found["by"]) == ("mine", "openai", "2", "me")
    assert (found["model_id"], found["burstiness"], found["max_concurrency"]) == ("org/first", 0.5, 2)
    assert {"mean_ttft_ms", "std_e2el_ms", "p50_ttft_ms", "p99.9_e2el_ms", "ttfts", "itls"} <= found.keys()
    assert found["generated_texts"] == ["xx"] * 4
    shown = capsys.readouterr().out
    assert "Request goodput (req/s):" in shown
    assert "P99.9 TTFT (ms):" in shown


def test_results_are_appended_and_short_unless_they_are_detailed(url: str, tmp_path: Path) -> None:
    for _ in range(2):
        words = f"--num-prompts 1 --append-result --result-dir {tmp_path} --result-filename all.json"
        assert bench(url, words) == 0
    first, second = (json.loads(line) for line in (tmp_path / "all.json").read_text().splitlines())
    assert first.keys() == second.keys()
    assert "itls" not in first


def test_what_a_request_says(url: str) -> None:
    words = "--num-prompts 1 --top-k 5 --temperature 0.5 --logprobs 2 --served-model-name short --request-id-prefix p- --seed 3"
    assert bench(url, words, "--extra-body", '{"top_p": 0.5}', "--header", "x-a=b", "--api-key", "k") == 0
    ((_, body, headers),) = Answers.asked
    assert (body["model"], body["top_k"], body["temperature"], body["logprobs"], body["top_p"]) == (
        "short",
        5,
        0.5,
        2,
        0.5,
    )
    assert body["ignore_eos"] is True
    assert (len(body["prompt"]), body["max_tokens"]) == (1024, 128)
    assert (headers["x-a"], headers["Authorization"], headers["X-Request-Id"]) == ("b", "Bearer k", "p-0")


def test_a_chat_gets_text_of_that_length(url: str) -> None:
    assert bench(url, "--backend openai-chat --num-prompts 2 --random-input-len 7 --model m") == 0
    assert [body["messages"] for body in bodies("/v1/chat/completions")] == [
        [{"role": "user", "content": "w " * 6 + "w"}]
    ] * 2


def test_prefixes_are_repeated(url: str) -> None:
    flags = "--prefix-repetition-num-prefixes 2 --prefix-repetition-prefix-len 4 --prefix-repetition-suffix-len 3"
    assert bench(url, f"--dataset-name prefix_repetition --num-prompts 6 --model m {flags}") == 0
    assert len({tuple(body["prompt"][:4]) for body in bodies()}) == 2
    assert [len(body["prompt"]) for body in bodies()] == [7] * 6
    assert {body["ignore_eos"] for body in bodies()} == {False}


def test_sharegpt_is_counted_by_the_servers_tokenizer(url: str, tmp_path: Path) -> None:
    turns = [{"value": "one two three four"}, {"value": "five six seven eight nine"}]
    (tmp_path / "s.json").write_text(json.dumps([{"conversations": turns}]))
    words = f"--dataset-name sharegpt --dataset-path {tmp_path / 's.json'} --num-prompts 2 --model m"
    assert bench(url, words) == 0
    assert [(body["prompt"], body["max_tokens"]) for body in bodies()] == [("one two three four", 5)] * 2


def test_sonnet_and_custom_have_the_chat_template_of_the_server(url: str, tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text("a line of words\n" * 9)
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a b"}\n')
    sonnet = f"--dataset-name sonnet --dataset-path {tmp_path / 'poem.txt'} --num-prompts 1 --model m --input-len 50"
    assert bench(url, f"{sonnet} --sonnet-prefix-len 20 --output-len 3") == 0
    custom = f"--dataset-name custom --dataset-path {tmp_path / 'mine.jsonl'} --num-prompts 1 --model m"
    assert bench(url, custom, "--chat-template-kwargs", '{"enable_thinking": false}') == 0
    assert bodies("/tokenize")[-1]["chat_template_kwargs"] == {"enable_thinking": False}
    assert bench(url, f"{custom} --skip-chat-template --custom-output-len 4") == 0
    of_sonnet, templated, plain = bodies()
    assert (len(of_sonnet["prompt"]), of_sonnet["max_tokens"]) == (49, 3)
    assert (templated["prompt"], templated["max_tokens"]) == ([0, 1, 2, 3], 256)
    assert (plain["prompt"], plain["max_tokens"]) == ("a b", 4)


def test_warm_ups_and_profiles_are_around_it(url: str) -> None:
    assert bench(url, "--num-prompts 2 --num-warmups 3 --profile --model m") == 0
    paths = [path.removeprefix("/v1/") for path, _, _ in Answers.asked]
    assert paths == ["completions"] * 3 + ["/start_profile"] + ["completions"] * 2 + ["/stop_profile"]


ERROR = b'{"error": {"message": "too\\nlong"}}'


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (ERROR, "failed: too long"),
        (b"data: " + ERROR + b"\n\n", "failed: too long"),
        (b"data: [DONE]\n\n", "failed: the answer has no event with a choice"),
        (b"data: {x\n\n", "failed: "),
    ],
)
def test_a_request_that_fails_is_counted_and_told(
    url: str, wrong: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Answers.wrong[:] = [wrong]
    assert bench(url, "--num-prompts 3 --model m --max-concurrency 1") == 0
    shown = capsys.readouterr().out
    assert f"{'Failed requests:':<40} 1" in shown
    assert f"{'Successful requests:':<40} 2" in shown
    assert said in shown


def test_it_waits_until_the_server_is_ready(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshlm.supervisor.bench.serve.AGAIN_S", 0.01)
    Answers.wrong[:] = [ERROR] * 2
    assert bench(url, "--num-prompts 1 --model m --ready-check-timeout-sec 60") == 0
    assert len(bodies()) == 4
    monkeypatch.setattr("meshlm.supervisor.bench.serve.AGAIN_S", 2.0)
    Answers.wrong[:] = [ERROR]
    assert bench(url, "--num-prompts 1 --model m --ready-check-timeout-sec 1") == 1
    assert capsys.readouterr().err == "meshlm: --ready-check-timeout-sec 1: too long\n"


@pytest.mark.parametrize(
    "words",
    [
        *("--num-prompts 0", "--input-len 0", "--random-range-ratio 1", '--random-range-ratio {"input":0.1}'),
        *("--random-range-ratio x", "--request-rate 0", "--request-rate nan", "--burstiness 0", "--max-concurrency 0"),
        *("--goodput ttft", "--goodput itl:5", "--goodput ttft:-1", "--metadata x", "--header x", "--num-warmups -1"),
        *("--percentile-metrics speed", "--metric-percentiles 101", "--metric-percentiles a", "--base-url x:1"),
        *(
            "--base-url ftp://x",
            "--dataset-path x",
            "--ramp-up-strategy linear",
            "--result-dir /dev/null --save-result",
        ),
        *("--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 2 --request-rate 3", "--vocab-size 0"),
        *("--endpoint /v1/chat/completions", "--prefix-repetition-num-prefixes 0", "--tokenizer /dev/null"),
    ],
)
def test_bad_input_is_one_line_that_names_the_flag(url: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(url, f"--model m --num-prompts 1 {words}") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"meshlm: error: {words.split()[0]}")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--dataset-name sonnet", "--dataset-path: needed with --dataset-name sonnet"),
        ("--dataset-name hf --dataset-path x/y", "--dataset-name hf: it needs a package; pip install datasets"),
        ("--dataset-name sharegpt --dataset-path /nowhere", "--dataset-path /nowhere: No such file or directory"),
    ],
)
def test_a_data_set_that_is_not_there(
    url: str, words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    assert bench(url, f"--model m {words}") == 2
    assert capsys.readouterr().err == f"meshlm: error: {said}\n"


@pytest.mark.parametrize("words", ["--lora-modules a", "--extra-body x", "--extra-body []", "--dataset-name burstgpt"])
def test_what_the_parser_refuses(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.run(["bench", "serve", *words.split()])
    said = capsys.readouterr().err
    assert words.split()[0] in said
    assert said.count("\n") == 1
