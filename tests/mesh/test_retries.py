"""Clients that ask again with the same Idempotency-Key: at another frontend, at the same one started again, after hanging up."""

import base64
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from fake_answers import VOCAB, reference
from http_clients import connect, error_of, metric, post
from serving import MESHLM, Serving, serving
from waiting import until

from meshlm.protocol.prompt_embeds import PromptEmbeds
from meshlm.workers.fake.tokens import tokens_of_embeds

pytestmark = pytest.mark.mesh
STEP_MS = 10
NUM_TOKENS = 60
LONG = 300  # tokens, so that the figures, once a second, show that it runs


@pytest.fixture(scope="module")
def two() -> Iterator[Serving]:
    """Two frontends, and a device slow enough to die in the middle of an answer."""
    flags = ("--device", "fake", "--fake-step-ms", str(STEP_MS), "--max-model-len", "4096", "--frontends", "2")
    more = ("--detokenizers", "2", "--max-restarts", "20", "--enable-prompt-embeds")
    with serving(*flags, *more) as server:
        yield server


def body(number: int, **more: Any) -> dict[str, Any]:
    asked = {"prompt": [600 + number, 601], "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    return {**asked, **more}


def frontends(server: Serving) -> list[int]:
    """Their pids."""
    return [int(p["pid"]) for p in server.status()["processes"] if p["role"] == "frontend" and p["pid"]]


def holder(pids: list[int], local_port: int) -> int:
    """The pid of the frontend that has this connection."""
    for pid in pids:
        for link in psutil.Process(pid).net_connections("tcp"):
            if link.raddr and link.raddr.port == local_port:
                return pid
    raise AssertionError("no frontend has the connection")


def port_of(answer: httpx.Response) -> int:
    port: int = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
    return port


class Reader:
    """Reads a stream, event by event; what it has survives a broken connection."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, str]] = []  # id, data
        self.begun = threading.Event()
        self.port = 0

    def read(self, server: Serving, asked: dict[str, Any], key: str, last_id: str = "", most: int = 0) -> bool:
        """True when it came to [DONE]. `most`: hang up after so many events."""
        headers = {"Idempotency-Key": key, **({"Last-Event-ID": last_id} if last_id else {})}
        name = ""
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream(
                "POST", f"{server.url}/v1/completions", json={**asked, "stream": True}, headers=headers, timeout=30
            ) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            self.port = port_of(answer)
            for line in answer.iter_lines():
                if line.startswith("id: "):
                    name = line[4:]
                elif line.startswith("data: "):
                    self.parts.append((name, line[6:]))
                    if len(self.parts) > 5:
                        self.begun.set()
                    if len(self.parts) == most:
                        return False
        return bool(self.parts) and self.parts[-1][1] == "[DONE]"

    @property
    def ids(self) -> list[int]:
        return [
            token for _, data in self.parts if data[0] == "{" for token in json.loads(data)["choices"][0]["token_ids"]
        ]


def finish(reader: Reader, server: Serving, asked: dict[str, Any], key: str, last_id: str = "") -> None:
    """Ask until an answer begins: a connection may still have gone to the frontend that is dying."""
    until(lambda: reader.read(server, asked, key, last_id) or bool(reader.parts))
    assert reader.parts[-1][1] == "[DONE]"


def kill_under(server: Serving, reader: Reader, asked: dict[str, Any], key: str) -> None:
    """Kill the frontend that streams to the reader."""
    until(lambda: len(frontends(server)) == 2)
    pids = frontends(server)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader.read, server, asked, key)
        assert reader.begun.wait(20)
        os.kill(holder(pids, reader.port), signal.SIGKILL)
        assert reading.result(timeout=300) is False


def test_log_probabilities_are_told_again(two: Serving) -> None:
    """All of them, to a connection that had a part and to one that has had none."""
    asked = body(99, n=8, max_tokens=LONG, logprobs=20)
    first, again = Reader(), Reader()
    assert first.read(two, asked, "logprobs", most=200) is False
    assert again.read(two, asked, "logprobs")
    found: dict[int, list[str]] = {}
    for _, data in again.parts:
        for choice in json.loads(data)["choices"] if data[0] == "{" else ():
            found.setdefault(choice["index"], []).extend(choice["logprobs"]["tokens"] if choice["logprobs"] else [])
    assert [len(found[index]) for index in range(8)] == [LONG] * 8


def test_a_stream_goes_on_after_the_last_event(two: Serving) -> None:
    whole = Reader()
    asked = body(1, max_tokens=LONG)
    assert whole.read(two, asked, "undisturbed")
    assert whole.ids == reference(asked["prompt"], LONG)
    first, rest = Reader(), Reader()
    kill_under(two, first, asked, "broken")
    last_id = first.parts[-1][0]
    assert re.fullmatch(r"\d+", last_id)
    finish(rest, two, asked, "broken", last_id)
    counts = [int(name.rstrip("ed.")) for name, _ in first.parts + rest.parts]
    assert counts == sorted(counts)
    assert first.ids + rest.ids == whole.ids
    assert rest.parts[-2][0] == f"{LONG}e"


def test_a_stream_asked_again_without_the_last_event_comes_whole(two: Serving) -> None:
    first, again = Reader(), Reader()
    asked = body(2, max_tokens=LONG)
    kill_under(two, first, asked, "whole")
    finish(again, two, asked, "whole")
    assert again.ids == reference(asked["prompt"], LONG)
    assert json.loads(again.parts[0][1])["id"] == json.loads(first.parts[0][1])["id"]
    assert json.loads(again.parts[0][1])["created"] == json.loads(first.parts[0][1])["created"]


MANY = 1000


def tokens_looked_up(server: Serving) -> int:
    """Prompt tokens of all requests that schedulers got until now. The figure comes once a second: one that counts a request of MANY
    tokens counts all before it."""
    with httpx.Client(base_url=server.url) as client:
        before = metric(client, "prefix_cache_queries_total")
        body = {"prompt": [9] * MANY, "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code == 200
        until(lambda: metric(client, "prefix_cache_queries_total") >= before + MANY)
        return int(metric(client, "prefix_cache_queries_total"))


def ask(server: Serving, asked: dict[str, Any], key: str) -> httpx.Response:
    answers: list[httpx.Response] = []

    def answered() -> bool:
        with contextlib.suppress(httpx.TransportError):  # it went to the frontend that is dying
            headers = {"Idempotency-Key": key}
            answers.append(httpx.post(f"{server.url}/v1/completions", json=asked, headers=headers, timeout=300))
        return bool(answers)

    until(answered)
    return answers[0]


def test_an_answer_in_one_piece_is_generated_once(two: Serving) -> None:
    asked = body(3, temperature=1.0, max_tokens=LONG)
    expected = reference(asked["prompt"], LONG)
    before = tokens_looked_up(two)
    with connect(two) as sock:
        sock.sendall(post(asked, "Idempotency-Key: one piece"))
        with httpx.Client(base_url=two.url) as client:
            until(lambda: metric(client, "num_requests_running") == 1)
        os.kill(holder(frontends(two), sock.getsockname()[1]), signal.SIGKILL)
        assert sock.recv(1) == b""
    answer = ask(two, asked, "one piece")
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["token_ids"] == expected
    assert ask(two, asked, "one piece").content == answer.content
    assert tokens_looked_up(two) == before + len(asked["prompt"]) + MANY


def test_a_client_that_hangs_up_may_come_back(two: Serving) -> None:
    first, rest = Reader(), Reader()
    asked = body(4, n=2)
    assert first.read(two, asked, "hung up", most=20) is False
    assert rest.read(two, asked, "hung up", first.parts[-1][0])
    found: dict[int, list[int]] = {0: [], 1: []}
    for _, data in first.parts + rest.parts:
        for choice in json.loads(data)["choices"] if data[0] == "{" else ():
            found[choice["index"]] += choice["token_ids"]
    assert found == dict.fromkeys((0, 1), reference(asked["prompt"], NUM_TOKENS))


def test_the_newer_connection_takes_over(two: Serving) -> None:
    older, newer = Reader(), Reader()
    asked = body(5)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(older.read, two, asked, "twice")
        assert older.begun.wait(20)
        assert newer.read(two, asked, "twice")
        assert reading.result(timeout=300)
    assert newer.ids == reference(asked["prompt"], NUM_TOKENS)
    error = json.loads(older.parts[-2][1])["error"]
    assert (error["code"], error["param"], error["type"]) == (422, "Idempotency-Key", "idempotency_error")


def test_another_body_under_the_same_key_is_refused(two: Serving) -> None:
    asked = body(6, max_tokens=2)
    assert ask(two, asked, "mine").status_code == 200
    for changed in ({**asked, "max_tokens": 3}, {**asked, "n": 2}, {**asked, "prompt": [asked["prompt"], [7]]}):
        refused = ask(two, changed, "mine")
        assert refused.status_code == 422
        assert error_of(refused)["param"] == "Idempotency-Key"
    assert ask(two, dict(reversed(asked.items())), "mine").status_code == 200


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there", "na\u00efve"])
def test_keys_that_are_not_allowed(two: Serving, key: str) -> None:
    headers = [(b"Idempotency-Key", key.encode("latin-1"))]
    refused = httpx.post(f"{two.url}/v1/completions", json=body(7), headers=headers)
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "Idempotency-Key"


def test_openai_client_asks_again_by_itself(two: Serving) -> None:
    """openai-python sends the same request again when its connection breaks; with a key it attaches."""
    whole = ask(two, body(8, max_tokens=LONG), "undisturbed 8").json()["choices"][0]["text"]
    before = tokens_looked_up(two)
    with (
        openai.OpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=3) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(
            client.completions.create,
            model="SmolLM2-135M-Instruct",
            prompt=[608, 601],
            max_tokens=LONG,
            extra_headers={"Idempotency-Key": "by itself"},
            extra_body={"ignore_eos": True},
        )
        with httpx.Client(base_url=two.url) as http:
            until(lambda: metric(http, "num_requests_running") == 1)
        for process in two.status()["processes"]:
            if process["role"] == "frontend" and has_client(process["pid"]):
                os.kill(process["pid"], signal.SIGKILL)
        assert answer.result(timeout=300).choices[0].text == whole
    assert tokens_looked_up(two) == before + 2 + MANY


def has_client(pid: int) -> bool:
    return any(link.status == "ESTABLISHED" for link in psutil.Process(pid).net_connections("tcp"))


def events_of(lines: Any) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line[6:])


def test_a_response_in_the_background_outlives_its_frontend(two: Serving) -> None:
    """The frontend that computes it is killed: another goes on, and a client that follows misses and repeats no event."""
    asked = {"input": "Tell me a story.", "max_output_tokens": LONG, "ignore_eos": True}
    url = f"{two.url}/v1/responses"
    expected = httpx.post(url, json=asked, timeout=300).json()
    received: list[dict[str, Any]] = []
    body = {**asked, "background": True, "stream": True}
    with (
        contextlib.suppress(httpx.TransportError),
        httpx.Client(timeout=300) as client,
        client.stream("POST", url, json=body) as answer,
    ):
        assert answer.status_code == 200
        for event in events_of(answer.iter_lines()):
            received.append(event)
            if len(received) == 40:
                os.kill(holder(frontends(two), port_of(answer)), signal.SIGKILL)
    assert 40 <= len(received) < LONG
    url = f"{url}/{received[0]['response']['id']}"
    while received[-1]["type"] != "response.completed" and received[-1]["type"] != "response.incomplete":
        query = {"stream": True, "starting_after": received[-1]["sequence_number"]}
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.Client(timeout=300) as client,
            client.stream("GET", url, params=query) as answer,
        ):
            assert answer.status_code == 200
            received += events_of(answer.iter_lines())
    assert [event["sequence_number"] for event in received] == list(range(len(received)))
    text = "".join(event["delta"] for event in received if event["type"] == "response.output_text.delta")
    assert text == expected["output"][0]["content"][0]["text"]
    found = httpx.get(url).json()
    assert (found["status"], found["usage"]["output_tokens"]) == ("incomplete", LONG)
    assert found == received[-1]["response"]
    with openai.OpenAI(base_url=f"{two.url}/v1", api_key="none") as openai_client:
        assert openai_client.responses.retrieve(found["id"]).output_text == text
        assert openai_client.responses.create(
            model="SmolLM2-135M-Instruct", input="And?", previous_response_id=found["id"], max_output_tokens=4
        ).output


def test_a_prompt_of_vectors_outlives_every_process_but_its_frontend(two: Serving) -> None:
    """What was sent to a process that died is sent to the next one: the fake device reads the vectors themselves."""
    rows = torch.randn(40, 576)
    buffer = io.BytesIO()
    torch.save(rows, buffer)
    asked = body(0, max_tokens=LONG, prompt=None, prompt_embeds=base64.b64encode(buffer.getvalue()).decode())
    embeds = PromptEmbeds("float32", ((0, 40),), rows.numpy().tobytes())
    roles, ids = ["worker", "scheduler", "coordinator", "detokenizer"], list[int]()
    with httpx.stream("POST", f"{two.url}/v1/completions", json={**asked, "stream": True}, timeout=300) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                ids += json.loads(line[6:])["choices"][0]["token_ids"]
                if roles and len(ids) > LONG // 5 * (5 - len(roles)):
                    role = roles.pop()
                    for process in two.status()["processes"]:
                        if process["role"] == role and process["pid"]:
                            os.kill(int(process["pid"]), signal.SIGKILL)
    assert not roles
    assert ids == reference(tokens_of_embeds(embeds, VOCAB), LONG)


def test_a_batch_outlives_the_deaths_of_its_frontends(tmp_path: Path) -> None:
    """Each of its requests goes on by its key."""
    prompts = [[1000 + number] * 5 for number in range(24)]
    body = {"max_tokens": 300, "ignore_eos": True, "return_token_ids": True}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, **body}}
        for number, prompt in enumerate(prompts)
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("--device", "fake", "--fake-step-ms", "50", "--max-model-len", "4096", "--max-restarts", "1000")
    with serving(*flags) as server:
        command = [MESHLM, "run-batch", "-i", str(source), "-o", str(out), "--server", server.url]
        batch = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd="/")
        num_kills = 0
        try:
            while batch.poll() is None and num_kills < 5:
                until(lambda: batch.poll() is not None or asked_by(batch.pid) == len(prompts))
                os.kill(server.pid("frontend"), signal.SIGKILL)
                num_kills += 1
                server.wait_for("frontend/0 is ready")
            _, said = batch.communicate(timeout=120)
        finally:
            batch.kill()
            batch.wait()
    assert batch.returncode == 0, said
    assert num_kills >= 3
    found = [json.loads(line) for line in out.read_text().splitlines()]
    for prompt, one in zip(prompts, found, strict=True):
        assert one["response"]["body"]["choices"][0]["token_ids"] == reference(prompt, 300)


def asked_by(pid: int) -> int:
    """The connections that this process has."""
    with contextlib.suppress(psutil.Error):
        return sum(one.status == psutil.CONN_ESTABLISHED for one in psutil.Process(pid).net_connections("tcp"))
    return 0
