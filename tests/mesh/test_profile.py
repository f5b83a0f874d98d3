"""Profiler traces over HTTP and from the bench."""

import json
import subprocess
from pathlib import Path

import httpx
import pytest
from serving import MESHLM, Serving, serving

pytestmark = pytest.mark.mesh


def test_start_and_stop_over_http(tmp_path: Path) -> None:
    with serving("--device", "fake", "--max-model-len", "512", "--profiler-dir", str(tmp_path)) as server:
        assert httpx.post(f"{server.url}/stop_profile", timeout=30).status_code == 409
        assert httpx.post(f"{server.url}/start_profile", timeout=60).json() == {"paths": []}
        refused = httpx.post(f"{server.url}/start_profile", timeout=30)
        assert refused.status_code == 409
        assert "running already" in refused.json()["error"]["message"]
        (path,) = httpx.post(f"{server.url}/stop_profile", timeout=60).json()["paths"]
        assert json.loads(Path(path).read_text())["traceEvents"]


def test_without_a_directory_there_is_no_such_route(fake: Serving) -> None:
    answer = httpx.post(f"{fake.url}/start_profile", timeout=30)
    assert answer.status_code == 404
    assert "--profiler-dir" in answer.json()["error"]["message"]


def test_bench_latency_writes_a_trace(tmp_path: Path) -> None:
    lengths = ["--max-model-len", "64", "--input-len", "8", "--output-len", "2", "--batch-size", "1"]
    counts = ["--num-iters-warmup", "1", "--num-iters", "1", "--profile", "--profile-dir", str(tmp_path)]
    done = subprocess.run(
        [MESHLM, "bench", "latency", "--device", "cpu", "--kv-cache-memory", "64M", *lengths, *counts],
        capture_output=True, text=True, timeout=90, check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("Profiler trace: "))
    names = {e.get("name") for e in json.loads(Path(line.partition(": ")[2]).read_text())["traceEvents"]}
    assert {"meshlm::layers", "aten::cumsum"} <= names  # of the model and of sampling
