"""Operations that reach the processes of another node: restart, profiler traces, drain."""

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fake_answers import reference
from hosts import LoopbackLink, head, made_keys, node, on_rank, states, stream
from serving import Serving, meshlm
from waiting import until

pytestmark = pytest.mark.mesh
FLAGS = ("--fake-step-ms", "5", "--max-model-len", "4096", "--max-restarts", "0")
NUM_STREAMS, NUM_TOKENS = 8, 60


def pids(server: Serving) -> dict[str, int]:
    return {f"{row['role']}/{row['index']}": row["pid"] for row in server.status()["processes"]}


def under_load(server: Serving, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command while streams run; each must have all its tokens."""
    over, begun = threading.Event(), threading.Barrier(NUM_STREAMS + 1, timeout=60)

    def streams(number: int) -> None:
        prompt = [900 + number] * (10 + number)
        assert stream(server, prompt, NUM_TOKENS) == reference(prompt, NUM_TOKENS)
        begun.wait()
        while not over.is_set():
            assert stream(server, prompt, NUM_TOKENS) == reference(prompt, NUM_TOKENS)

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(streams, number) for number in range(NUM_STREAMS)]
        try:
            begun.wait()
            done = meshlm(server, *arguments)
        finally:
            over.set()
        for one in running:
            one.result(timeout=300)
    return done


def test_restart_and_traces_and_drain(tmp_path: Path) -> None:
    link, key_file = LoopbackLink(), made_keys(tmp_path / "mesh.key")
    flags = (*FLAGS, "--profiler-dir", str(tmp_path))
    first = head(link, key_file, "--data-parallel-size-local", "1", *flags)
    second = node(link, key_file, "--data-parallel-start-rank", "1", *flags)
    try:
        first.wait_for("ready: http")
        second.wait_for("ready: this node serves")
        on_rank(first, 1)
        until(lambda: states(first).get("worker/1") == "ready")

        before = pids(second)
        done = under_load(first, "restart", "scheduler/1")
        assert done.returncode == 0, done.stdout + done.stderr
        assert any(line.startswith("scheduler/1: replaced") for line in done.stdout.splitlines()), done.stdout
        after = pids(second)
        assert {name for name in before if before[name] != after[name]} == {"scheduler/1"}

        before = pids(first)
        done = under_load(first, "restart")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1] == "done: all are ready"
        until(lambda: pids(first)["worker/1"] != before["worker/1"])  # reported once a second
        after = pids(first)
        assert {name for name in before if before[name] == after[name]} == {"supervisor/0"}
        for rank in (0, 1):
            on_rank(first, rank)

        assert httpx.post(f"{first.url}/start_profile", timeout=300).json() == {"paths": []}
        paths = httpx.post(f"{first.url}/stop_profile", timeout=300).json()["paths"]
        assert len(paths) == 2
        assert [path for path in paths if Path(path).is_file()] != paths, "the other node's has its host before it"
        assert all(Path(path.rpartition(":")[2]).is_file() for path in paths)

        refused = meshlm(second, "drain")
        assert refused.returncode == 1
        assert "on the head" in refused.stderr
        done = meshlm(first, "drain", "--stop")
        assert done.returncode == 0, done.stderr
        assert first.process.wait(timeout=30) == 0
        assert second.process.wait(timeout=30) == 0
    finally:
        first.stop()
        second.stop()
