"""Profiler traces over HTTP and from the bench."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_answers import reference
from serving import MESHLM, Serving, serving
from waiting import until

pytestmark = pytest.mark.mesh
ENDLESS = {"prompt": [7] * 10, "max_tokens": 4000, "ignore_eos": True, "stream": True, "return_token_ids": True}


def test_start_and_stop_over_http(tmp_path: Path) -> None:
    flags = ("--device", "fake", "--max-model-len", "4096", "--fake-step-ms", "5", "--server-dev-mode")
    with serving(*flags, "--profiler-dir", str(tmp_path)) as server:
        assert httpx.post(f"{server.url}/stop_profile", timeout=300).status_code == 409
        assert httpx.post(f"{server.url}/start_profile", timeout=300).json() == {"paths": []}
        refused = httpx.post(f"{server.url}/start_profile", timeout=300)
        assert refused.status_code == 409
        assert "running already" in refused.json()["error"]["message"]
        (path,) = httpx.post(f"{server.url}/stop_profile", timeout=300).json()["paths"]
        assert json.loads(Path(path).read_text())["traceEvents"]
        resets_its_prefix_cache(server.url)
        pauses(server)


def resets_its_prefix_cache(url: str) -> None:
    def num_cached() -> int:
        body = {"prompt": [7] * 100, "max_tokens": 2, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert (num_cached(), num_cached()) == (0, 96)
    assert httpx.post(f"{url}/reset_prefix_cache", timeout=300).json() == {"success": True}
    assert (num_cached(), num_cached()) == (0, 96)
    with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS, timeout=300) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        ids = json.loads(next(lines)[6:])["choices"][0]["token_ids"]
        refused = httpx.post(f"{url}/reset_prefix_cache", timeout=300).json()
        assert refused == {"success": False, "error": "1 requests run"}
        again = httpx.post(f"{url}/reset_prefix_cache?reset_running_requests=true", timeout=300)
        assert again.json() == {"success": True}
        while len(ids) < 400:
            ids += json.loads(next(lines)[6:])["choices"][0]["token_ids"]
    assert ids == reference([7] * 10, len(ids))


def follows(server: Serving, killed: int) -> bool:
    """Whether another scheduler is ready in the place of the one that was killed."""
    found = [p for p in server.status()["processes"] if (p["role"], p["state"]) == ("scheduler", "ready")]
    return [p["pid"] for p in found if p["pid"] == killed] == [] and len(found) == 1


def pauses(server: Serving) -> None:
    """A stream stands still, also where its scheduler dies, and goes on; others are ended by their names."""

    def post(path: str, **body: object) -> Any:
        answer = httpx.post(f"{server.url}/{path}", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def is_paused() -> bool:
        return bool(httpx.get(f"{server.url}/is_paused", timeout=300).json()["is_paused"])

    asked = {**ENDLESS, "max_tokens": 300}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=300) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        ids = json.loads(next(lines)[6:])["choices"][0]["token_ids"]
        assert (is_paused(), post("pause?mode=keep"), is_paused()) == (False, {"status": "paused"}, True)
        killed = server.pid("scheduler")
        os.kill(killed, signal.SIGKILL)
        until(lambda: follows(server, killed))
        until(lambda: httpx.get(f"{server.url}/ready", timeout=300).status_code == 200)
        assert is_paused()
        assert (post("resume"), is_paused()) == ({"status": "resumed"}, False)
        for line in lines:
            ids += json.loads(line[6:])["choices"][0]["token_ids"]
    assert ids == reference([7] * 10, 300)
    asked = {**ENDLESS, "max_tokens": 100}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=300) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        ids = json.loads(next(lines)[6:])["choices"][0]["token_ids"]
        assert (post("pause?mode=wait"), is_paused()) == ({"status": "paused"}, True)
        assert httpx.get(f"{server.url}/load", timeout=300).json() == {"server_load": 0}
        for line in lines:
            ids += json.loads(line[6:])["choices"][0]["token_ids"]
    assert ids == reference([7] * 10, 100)
    assert httpx.get(f"{server.url}/get_world_size", timeout=300).json() == {"world_size": 1}
    assert post("resume") == {"status": "resumed"}
    headers = {"X-Request-Id": "mine"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ENDLESS, headers=headers, timeout=300) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        next(lines)
        assert post("abort_requests", request_ids=["nobody"])["aborted"] == 0
        assert post("abort_requests", request_ids=["mine"]) == {"status": "aborted", "aborted": 1}
        *_, last = lines
        assert json.loads(last[6:])["choices"][0]["finish_reason"] == "abort"


def test_without_a_directory_there_is_no_such_route(fake: Serving) -> None:
    answer = httpx.post(f"{fake.url}/start_profile", timeout=300)
    assert answer.status_code == 404
    assert "--profiler-dir" in answer.json()["error"]["message"]


def test_bench_latency_writes_a_trace(tmp_path: Path) -> None:
    lengths = ["--max-model-len", "64", "--input-len", "8", "--output-len", "2", "--batch-size", "1"]
    counts = ["--num-iters-warmup", "1", "--num-iters", "1", "--profile", "--profile-dir", str(tmp_path)]
    done = subprocess.run(
        [MESHLM, "bench", "latency", "--device", "cpu", "--kv-cache-memory", "64M", *lengths, *counts],
        capture_output=True, text=True, timeout=300, check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("Profiler trace: "))
    names = {e.get("name") for e in json.loads(Path(line.partition(": ")[2]).read_text())["traceEvents"]}
    assert {"meshlm::layers", "aten::cumsum"} <= names  # of the model and of sampling
