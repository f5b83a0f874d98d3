"""A mesh of the fake device that starts, is refused or stops: it says why, and leaves nothing behind."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fake_answers import complete
from serving import MESHLM, Serving, serving
from waiting import free_port, until

from meshlm.supervisor import control

pytestmark = pytest.mark.mesh


def test_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = Serving("--device", "fake", "--port", str(taken.getsockname()[1]))
        assert server.process.wait(timeout=30) == 1
        server.stop()
        assert len(server.lines) == 1
        assert "Address already in use" in server.lines[0]


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_too_little_memory_says_what_would_fit(device: str) -> None:
    server = Serving("--device", device, "--kv-cache-memory", "10M")
    assert server.process.wait(timeout=90) == 1
    server.stop()
    assert "--max-model-len" in server.lines[-1]
    assert "would fit" in server.lines[-1]


@pytest.mark.parametrize("flags", ["--device cpu", "--device fake", "--device fake -tp 2 -pp 2"])
def test_auto_starts_again_with_what_fits(flags: str) -> None:
    """A worker that dies later is started with it, too."""
    with serving(*flags.split(), "--kv-cache-memory", "20M", "--max-model-len", "auto") as server:
        length = httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
        assert 16 <= length < 8192
        assert any(f"auto: {length} tokens fit; starting again" in line for line in server.lines), server.lines
        os.kill(server.pid("worker"), signal.SIGKILL)
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 3}, timeout=300)
        assert answer.json()["usage"]["completion_tokens"] == 3


def test_the_supervisor_takes_all_with_it() -> None:
    """Those too that a command has added. What it leaves in its directory holds no key."""
    with serving("--device", "fake", "--api-key", "secret-9", "--orphan-grace", "0") as server:
        command = [MESHLM, "launch", "detokenizer", "--run-dir", server.run_dir]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd="/") as launched:
            added = Path(server.run_dir, "detokenizer-1.sock")
            until(added.exists, limit_s=30)
            pids = [process["pid"] for process in server.status()["processes"]]
            pids += [child.pid for child in psutil.Process(launched.pid).children()]
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait(timeout=5)
            _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5)
            assert not alive
            assert launched.stderr is not None
            assert "the mesh has ended, and so does detokenizer/1" in launched.stderr.read()
        left = [file for file in Path(server.run_dir).rglob("*") if file.is_file()]
        assert b"secret-9" not in b"".join(file.read_bytes() for file in left)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_mesh_that_has_stopped_leaves_nothing(number: signal.Signals) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored by all that is started below
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGHUP, before)
        server = stack.enter_context(serving("--device", "fake"))
        server.process.send_signal(number)
        server.wait_for("stopping: up to 30 s", limit_s=10)
        assert server.process.wait(timeout=30) == 0
        assert list(Path(server.run_dir).iterdir()) == []


def test_a_node_that_is_stopped_while_it_looks_for_its_head_leaves_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert subprocess.run([MESHLM, "keys", str(tmp_path / "keys")], cwd="/", check=False).returncode == 0
    command = [MESHLM, "serve", "--headless", "--join", "tcp://head.invalid:5000", "--key-file", str(tmp_path / "keys")]
    command += ["--device", "fake", "-dp", "2", "--data-parallel-start-rank", "1", "--run-dir", str(run_dir)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd="/") as node:
        try:
            assert node.stderr is not None
            assert "waiting for the head" in node.stderr.readline()
            assert run_dir.is_dir()
            node.terminate()
            assert node.wait(timeout=10) == 0
            assert node.stderr.read() == ""
        finally:
            node.kill()
    assert not run_dir.exists()


def test_every_line_is_json_where_that_is_wanted() -> None:
    """What the processes log, what the supervisor says, deaths and a crash's stacks."""
    with serving("--device", "fake", "--log-format", "json", "--disable-log-stats") as server:
        complete(server, [5], 3)
        os.kill(server.pid("scheduler"), signal.SIGABRT)  # faulthandler writes its stacks
        server.wait_for("scheduler/0 is ready")
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.lines]
    assert all(isinstance(line["event"], str) and line["level"] and line["timestamp"] for line in lines)
    said = {line["event"]: line for line in lines}
    died = said["scheduler/0 died and is started again (signal 6)"]
    assert (died["level"], died["process"]) == ("error", "supervisor")
    assert said["Fatal Python error: Aborted"]["process"] == "scheduler/0"
    assert any(event.startswith("stopping") for event in said)
    assert any("is not needed" in event for event in said), "of a flag, before anything is known"


@pytest.mark.parametrize("closed", [">&- 2>&- <&-", "2>/dev/full --log-format json"])
def test_it_serves_without_standard_streams(closed: str) -> None:
    run_dir, port = tempfile.mkdtemp(prefix="mlm"), free_port()
    serve = (
        f'exec "$0" serve --device fake --orphan-grace 0 --disable-log-stats --port {port} --run-dir {run_dir} {closed}'
    )
    with subprocess.Popen(["sh", "-c", serve, MESHLM], cwd="/") as server:
        try:
            until(lambda: Path(run_dir, "status.sock").exists() and is_ready(Path(run_dir)), limit_s=60)
            os.kill(pid_of(Path(run_dir), "coordinator"), signal.SIGKILL)
            until(lambda: is_ready(Path(run_dir)), limit_s=30)
            server.terminate()
            assert server.wait(timeout=30) == 0
        finally:
            server.kill()
            shutil.rmtree(run_dir)


def is_ready(run_dir: Path) -> bool:
    return bool(control.request(run_dir, {"command": "status"})["ready"])


def pid_of(run_dir: Path, role: str) -> int:
    rows: Any = control.request(run_dir, {"command": "status"})["processes"]
    return next(int(row["pid"]) for row in rows if row["role"] == role)


# Whoever the supervisor leaves behind becomes this program's child.
REAPER = """
import ctypes, os, pathlib, signal, subprocess, sys, time

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
delay, *command = sys.argv[1:]
supervisor = subprocess.Popen(command)
children = pathlib.Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children")
while not children.read_text():
    time.sleep(0.001)
time.sleep(float(delay))
print(children.read_text())
supervisor.kill()
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


@pytest.mark.parametrize("delay_s", [0.1, 0.6])
def test_a_supervisor_that_dies_while_it_starts_leaves_nobody(delay_s: float, tmp_path: Path) -> None:
    serve = [MESHLM, "serve", "--device", "fake", "--port", str(free_port()), "--run-dir", str(tmp_path / "run")]
    command = [sys.executable, "-P", "-c", REAPER, str(delay_s), *serve]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd="/") as reaper:
        try:
            assert reaper.wait(timeout=20) == 0
            assert reaper.stdout is not None
            assert reaper.stdout.read().split(), "some had been started"
        finally:
            for left in psutil.Process(reaper.pid).children(recursive=True) if reaper.poll() is None else ():
                left.kill()
            reaper.kill()


def test_a_log_that_nobody_reads_stops_nobody(tmp_path: Path) -> None:
    """A pipe holds the lines of some 300 requests."""
    port, run_dir = free_port(), tmp_path / "run"
    command = [
        MESHLM,
        "serve",
        "--device",
        "fake",
        "--port",
        str(port),
        "--run-dir",
        str(run_dir),
        "--orphan-grace",
        "0",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd="/") as server:
        try:
            until(lambda: (run_dir / "status.sock").exists() and is_ready(run_dir), limit_s=60)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
                for _ in range(600):
                    body = {"prompt": [5], "max_tokens": 1}
                    assert client.post("/v1/completions", json=body).status_code == 200
            server.terminate()
            assert server.wait(timeout=30) == 0
        finally:
            server.kill()
