"""The whole mesh with the fake device: every token is what the KV contents say it must be."""

import json
import os
import re
import signal
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme
from fake_answers import complete, reference, stream_ids
from http_clients import connect, error_of, head, metric
from serving import MESHLM, Serving, serving
from waiting import until

pytestmark = pytest.mark.mesh


def test_tokens_prove_the_cache(fake: Serving) -> None:
    prompt = [300 + i for i in range(50)]
    choice = complete(fake, prompt, 40)["choices"][0]
    assert choice["token_ids"] == reference(prompt, 40)
    again = complete(fake, prompt, 40)
    assert again["choices"][0]["token_ids"] == choice["token_ids"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 48


def test_over_tls_chunks_come_at_the_interval_that_is_asked_for(tmp_path: Path) -> None:
    """The first token at once, then four or more together, and the rest at the end. Another frontend, in the place of one that was
    killed, has the certificate too, and nobody is served without TLS."""
    authority, cert = trustme.CA(), tmp_path / "cert.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(cert)
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    flags = ("--device", "fake", "--max-model-len", "512", "--stream-interval", "4", "--ssl-certfile", str(cert))
    extra = {"ignore_eos": True, "return_token_ids": True}
    with (
        serving(*flags, says="ready: https") as server,
        openai.DefaultHttpxClient(verify=trusted, timeout=300) as http,
        openai.OpenAI(base_url=f"https://127.0.0.1:{server.port}/v1", api_key="none", http_client=http) as client,
    ):
        assert f"https://127.0.0.1:{server.port}" in server.lines[-1]
        chunks = client.completions.create(
            model="SmolLM2-135M-Instruct", prompt=[300] * 9, max_tokens=22, stream=True, extra_body=extra
        )
        lists = [choice.model_dump().get("token_ids") or [] for chunk in chunks for choice in chunk.choices]
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health")
        os.kill(before := server.pid("frontend"), signal.SIGKILL)
        until(lambda: frontend_of(server) not in (before, 0))
        assert client.with_options(max_retries=9).models.list().data[0].id == "SmolLM2-135M-Instruct"
    lens = [len(ids) for ids in lists if ids]
    assert [token for ids in lists for token in ids] == reference([300] * 9, 22)
    assert lens[0] == 1
    assert len(lens) > 2
    assert min(lens[1:-1]) >= 4


def frontend_of(server: Serving) -> int:
    """The pid of its frontend, 0 while there is none."""
    return next((p["pid"] or 0 for p in server.status()["processes"] if p["role"] == "frontend"), 0)


def test_64_streams_with_little_memory() -> None:
    """KV for about ten of them: they are preempted and recomputed, some are aborted, all others end once and right."""
    with serving("--device", "fake", "--max-model-len", "512", "--kv-cache-memory", "60M") as server:
        prompts = [[1000 + stream] * (10 + 5 * stream % 170) for stream in range(64)]
        before = {p["role"]: p["rss_bytes"] for p in server.status()["processes"]}

        def one(stream: int) -> None:
            if stream % 9 == 4:
                abort(server, prompts[stream])
                return
            ids, reasons = stream_ids(server, prompts[stream], 150 + stream)
            assert ids == reference(prompts[stream], 150 + stream)
            assert reasons == ["length"]

        with ThreadPoolExecutor(64) as pool:
            list(pool.map(one, range(64)))
        metrics = httpx.get(f"{server.url}/metrics").text
        assert "num_preemptions_total" in metrics
        spent = {phase: seconds(metrics, phase) for phase in ("queue", "prefill", "decode", "inference")}
        assert spent["queue"] > 0.0 < spent["decode"]
        assert spent["prefill"] + spent["decode"] == pytest.approx(spent["inference"])
        for hop in ("schedule", "send", "launch", "device", "return", "decode", "write"):
            (line,) = [one for one in metrics.splitlines() if one.startswith(f"meshlm:step_{hop}_time_seconds_count")]
            assert float(line.split()[-1]) > 100, hop
        # A request that may use all memory proves that every block is free again.
        assert complete(server, [7] * 10, 500)["choices"][0]["token_ids"] == reference([7] * 10, 500)
        for process in server.status()["processes"]:
            assert process["rss_bytes"] < before[process["role"]] + 60e6, f"{process['role']} has grown"


def seconds(metrics: str, phase: str) -> float:
    (line,) = (line for line in metrics.splitlines() if line.startswith(f"meshlm:request_{phase}_time_seconds_sum"))
    return float(line.split()[-1])


def abort(server: Serving, prompt: list[int]) -> None:
    """Hang up after a few tokens."""
    body = {"prompt": prompt, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number > 5:
                return


def test_openai_client(fake: Serving) -> None:
    with openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none") as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        whole = client.chat.completions.create(
            model="SmolLM2-135M-Instruct", messages=messages, max_tokens=6, n=2, seed=5
        )
        assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
        chunks = list(
            client.chat.completions.create(
                model="SmolLM2-135M-Instruct",
                messages=messages,
                max_tokens=6,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 6
        assert [model.id for model in client.models.list()] == ["SmolLM2-135M-Instruct"]


def test_status_shows_all_processes_and_small_memory(fake: Serving) -> None:
    status = fake.status()
    roles = [process["role"] for process in status["processes"]]
    assert sorted(roles) == ["coordinator", "detokenizer", "frontend", "scheduler", "supervisor", "worker"]
    for process in status["processes"]:
        assert process["state"] == "ready"
        if process["role"] != "worker":
            assert process["rss_bytes"] < 150e6, process


def test_the_command_prints_the_status_that_the_tests_ask_for(fake: Serving) -> None:
    command = [MESHLM, "status", "--json", "--run-dir", fake.run_dir]
    printed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout)

    def lasting(status: dict[str, Any]) -> dict[str, Any]:
        """Without what changes from one moment to the next."""
        moments: dict[str, Any] = {"uptime_s": 0, "rss_bytes": 0, "phase": "", "state": "", "sent": {}}
        rows = {kind: [{**row, **moments} for row in status[kind]] for kind in ("processes", "standbys")}
        return {**status, **rows}

    assert lasting(printed) == lasting(fake.status())


@pytest.fixture(scope="module")
def mortal() -> Iterator[Serving]:
    """A mesh for tests that kill a process, one role each, and leave it whole. Its steps give rows none, one or several tokens."""
    with serving("--device", "fake", "--max-model-len", "4096", "--fake-drafts", "3") as server:
        yield server


ROLES = ["worker", "scheduler", "detokenizer", "coordinator", "frontend"]
FORM = "([a-z]{3,9} ){150}[0-9]"


def streamed_text(server: Serving, begun: Callable[[], None]) -> str:
    """The text of a stream that keeps to FORM; `begun` is called when its beginning is there."""
    body = {"prompt": [700, 701], "max_tokens": 3000, "stream": True, "guided_regex": FORM}
    text = ""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                if not text and choice["text"]:
                    begun()
                text += choice["text"]
    return text


@pytest.mark.parametrize("role", ROLES)
def test_a_killed_process_is_started_again(mortal: Serving, role: str) -> None:
    """And what is computed stays, unless the memory went that held it. All others live on. A stream with a grammar keeps to it."""
    prompt = list(
        range(500 + 1000 * ROLES.index(role), 1500 + 1000 * ROLES.index(role))
    )  # one that nobody has asked for before

    def lives() -> dict[str, tuple[int, int]]:
        return {
            row["role"]: (row["pid"], row["restarts"])
            for row in mortal.status()["processes"]
            if row["state"] == "ready"
        }

    before = lives()
    assert len(before) == len(ROLES) + 1, "it is whole, with its supervisor"
    assert complete(mortal, prompt, 8)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    mortal.forget()

    def kill() -> None:
        os.kill(before[role][0], signal.SIGKILL)

    if role == "frontend":  # it takes its streams along
        kill()
    else:
        text = streamed_text(mortal, kill)
        assert re.fullmatch(FORM, text)
    mortal.wait_for(f"{role}/0 is ready")
    until(lambda: httpx.get(f"{mortal.url}/ready").status_code == 200)
    again = complete(mortal, prompt, 8)
    assert again["choices"][0]["token_ids"] == reference(prompt, 8)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (0 if role == "worker" else 992)
    after = lives()
    assert after[role][1] == before[role][1] + 1 == 1
    assert {name for name in after if after[name] != before[name]} == {role}
    if role != "frontend":
        assert streamed_text(mortal, lambda: None) == text


def test_answers_of_steps_with_several_tokens_are_the_same(fake: Serving, mortal: Serving) -> None:
    """Stop strings, stop tokens, log-probabilities and several choices, whole and as a stream."""
    expected = complete(fake, [300] * 9, 60)["choices"][0]
    asks: list[dict[str, Any]] = [
        {},
        {"stop": expected["text"][100:103]},
        {"stop_token_ids": expected["token_ids"][33:34]},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"logprobs": 1, "stop": [expected["text"][90:94]], "include_stop_str_in_output": True},
        {"n": 3, "seed": 5},
        {"max_tokens": 1},
    ]
    for ask in asks:
        one, several = (complete(server, [300] * 9, 60, **ask) for server in (fake, mortal))
        assert one["choices"] == several["choices"], ask
        assert one["usage"]["completion_tokens"] == several["usage"]["completion_tokens"]
    assert stream_ids(mortal, [300] * 9, 60) == (expected["token_ids"], ["length"])


def test_tokenize_and_detokenize(fake: Serving) -> None:
    got = httpx.post(f"{fake.url}/tokenize", json={"prompt": "Hello world"}).json()
    assert got["count"] == len(got["tokens"]) > 0
    back = httpx.post(f"{fake.url}/detokenize", json={"tokens": got["tokens"]}).json()
    assert back == {"prompt": "Hello world"}


def test_small_paths(fake: Serving) -> None:
    with httpx.Client(base_url=fake.url) as client:
        (listed,) = client.get("/v1/models").json()["data"]
        (again,) = client.get("/v1/models/").json()["data"]
        assert again["id"] == listed["id"]
        nameless = client.post("/v1/completions", json={"model": "", "prompt": "a", "max_tokens": 1})
        assert nameless.json()["model"] == listed["id"]
        one = client.get(f"/v1/models/{listed['id']}").json()
        clocks = {"created": 0, "permission": []}
        assert {**one, **clocks} == {**listed, **clocks}
        assert client.get("/v1/models/nobody/nothing").status_code == 404
        assert client.get("/load").json()["server_load"] >= 0
        absent = client.post("/v1/embeddings", json={"input": "x"})
        assert (absent.status_code, absent.json()["error"]["type"]) == (404, "not_found_error")
        assert "--runner pooling serves vectors" in absent.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_clients_name_for_its_request_comes_back(fake: Serving, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 1, "stream": stream}
    named = httpx.post(f"{fake.url}/v1/completions", json=body, headers={"X-Request-Id": "mine"})
    assert named.headers["x-request-id"] == "mine"
    assert '"id":"cmpl-mine"' in named.text
    in_body = httpx.post(f"{fake.url}/v1/completions", json={**body, "request_id": "too"})
    assert in_body.headers["x-request-id"] == "cmpl-too"
    assert '"id":"cmpl-too"' in in_body.text


def test_gauges_are_exact_once_an_answer_is_complete(fake: Serving) -> None:
    """Also of a request that a stop string ended, which its scheduler hears by way of an abort."""
    with httpx.Client(base_url=fake.url, timeout=300) as client:
        text = client.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 40, "ignore_eos": True}).json()
        stop = text["choices"][0]["text"][10:14]
        for body in ({"max_tokens": 3}, {"max_tokens": 500, "stop": stop}, {"max_tokens": 5, "n": 3}):
            for _ in range(5):
                asked = {"prompt": [5, 6], "ignore_eos": True, **body}
                assert client.post("/v1/completions", json=asked).status_code == 200
                assert metric(client, "num_requests_running") == 0
        assert client.get("/load").json() == {"server_load": 0}


def test_refused_requests_are_in_no_latency(fake: Serving) -> None:
    with httpx.Client(base_url=fake.url, timeout=300) as client:
        names = ("e2e_request_latency_seconds_count", "request_success_total", "time_to_first_token_seconds_count")
        before = [metric(client, name) for name in names]
        too_long = {"prompt": [5] * 5000, "max_tokens": 1}
        assert client.post("/v1/completions", json=too_long).status_code == 400
        assert [metric(client, name) for name in names] == before


def test_abandoned_questions_hold_up_nobody(fake: Serving) -> None:
    """Forty texts of a megabyte take a tokenizer most of a minute; their clients leave, and a small one is answered soon."""
    text = {"prompt": " ".join(str(number * 7919) for number in range(150_000))[: 1 << 20]}
    for _ in range(40):
        with connect(fake) as sock:
            content = json.dumps(text).encode()
            sock.sendall(head("POST", "/tokenize", f"Content-Length: {len(content)}") + content)
    with httpx.Client(base_url=fake.url, timeout=300) as client:
        begun = time.monotonic()
        small = client.post("/tokenize", json={"prompt": "Hello you"})
        assert small.json()["count"] == 2
        assert client.post("/v1/completions", json={"prompt": "Hello you", "max_tokens": 1}).status_code == 200
        assert time.monotonic() - begun < 15
        assert client.post("/tokenize", json={"prompt": text["prompt"] + "x"}).status_code == 400


def test_output_tokens_are_counted_as_they_come() -> None:
    def counted(server: Serving) -> float:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("meshlm:generation_tokens_total{"))

    with serving("--device", "fake", "--fake-step-ms", "2", "--drain-timeout", "0") as server:
        body = {"prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as stream:
            events = (line for line in stream.iter_lines() if line.startswith("data: {"))
            for _ in range(20):
                next(events)
            assert 20 <= counted(server) < 2000


def test_a_batch_with_a_mesh_of_its_own(tmp_path: Path) -> None:
    """As many as its rows many times over, one of them broken; the mesh ends with the file."""
    prompts = [[1000 + number] * 9 for number in range(100)]
    asked = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": prompt, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True},
        }
        for number, prompt in enumerate(prompts)
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(one) for one in asked) + "\nbroken\n")
    flags = ("--device", "fake", "--max-model-len", "512", "--max-num-seqs", "16")
    command = [MESHLM, "run-batch", "-i", str(source), "-o", str(out), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=300)
    assert ended.returncode == 1, "a line failed"
    assert "100 requests answered, 1 with an error" in ended.stderr
    *found, broken = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["custom_id"] for one in found] == [str(number) for number in range(100)]
    for prompt, one in zip(prompts, found, strict=True):
        assert one["response"]["body"]["choices"][0]["token_ids"] == reference(prompt, 5)
    assert (broken["response"]["status_code"], broken["response"]["body"]) == (400, None)


def test_a_mesh_that_renders_alone() -> None:
    """Three processes, none of which has a model: templates, tokens and back; no answers."""
    with serving(command=("launch", "render")) as server:
        roles = {process["role"] for process in server.status()["processes"]}
        assert roles == {"supervisor", "coordinator", "detokenizer", "frontend"}
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
        chat = {"messages": [{"role": "user", "content": "hi"}], "return_token_offsets": True}
        rendered = httpx.post(f"{server.url}/v1/chat/completions/render", json=chat).json()
        ids = rendered["token_ids"]
        text = httpx.post(f"{server.url}/detokenize", json={"tokens": ids}).json()["prompt"]
        assert text.endswith("assistant\n")
        assert "".join(text[begin:end] for begin, end in rendered["token_offsets"]) == text
        generated = {"choices": [{"index": 0, "token_ids": ids[:3]}]}
        answer = httpx.post(f"{server.url}/v1/chat/completions/derender", json={"generate_response": generated})
        assert answer.json()["choices"][0]["message"]["content"]
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, "meshlm launch render" in error_of(refused)["message"]) == (404, True)
