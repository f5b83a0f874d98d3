"""A short run of benchmarks/chaos.py, with kills of every role and one stop, and what must hold when the supervisor dies."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hybrid_models import hybrid_model
from serving import Serving, serving
from split_models import greedy
from timed_streams import NUM_TOKENS, Stream
from waiting import until

pytestmark = pytest.mark.mesh
CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


def test_no_kill_loses_or_repeats_a_token(tmp_path: Path) -> None:
    """Two kills of each role, the supervisor's too, and one SIGSTOP until the process is replaced, under 16 streams."""
    found = tmp_path / "chaos.json"
    flags = ["--device", "fake", "--streams", "16", "--tokens", "24", "120", "--stall-timeout", "3"]
    flags += [
        "--script",
        *(
            "kill:" + role
            for role in ("worker", "scheduler", "supervisor", "detokenizer", "coordinator", "frontend") * 2
        ),
    ]
    flags += ["stuck:scheduler", "--json", str(found)]
    done = subprocess.run([sys.executable, "-P", str(CHAOS), *flags], capture_output=True, text=True)
    assert found.exists(), done.stderr
    report: dict[str, Any] = json.loads(found.read_text())
    told = json.dumps(report["failures"][:2], indent=1) + done.stderr
    assert done.returncode == 0, told
    assert (report["lost"], report["duplicated"], report["wrong"], report["errors"]) == (0, 0, 0, 0), told
    assert report["num_kills"] == 12
    assert report["num_stuck"] == 1
    assert report["right"] == report["streams"] > 16
    assert all(process["state"] == "ready" for process in report["processes"])


def children(server: Serving) -> list[psutil.Process]:
    return [psutil.Process(p["pid"]) for p in server.status()["processes"] if p["role"] != "supervisor"]


def runs(process: psutil.Process) -> bool:
    """Not so when it has ended, and waits for the machine's first process to take note of that."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_the_supervisors_death_ends_everything(number: signal.Signals) -> None:
    """With --orphan-grace 0: within two seconds, while requests run, with an exit code that is not 0."""
    flags = ("--device", "fake", "--fake-step-ms", "20", "--max-model-len", "4096", "--orphan-grace", "0")
    with serving(*flags) as server:
        mine = children(server)
        body = {"prompt": [300], "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(server.process.pid, number)
            begun = time.monotonic()
            until(lambda: not any(map(runs, mine)), 2)
            assert time.monotonic() - begun < 2
        assert server.process.wait(timeout=5) == -number


def timed(server: Serving, body: dict[str, Any]) -> tuple[httpx.Response, float]:
    begun = time.monotonic()
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": [300], "ignore_eos": True, **body}, timeout=300)
    return answer, time.monotonic() - begun


def test_a_timeout_ends_requests_that_run_that_wait_and_whose_process_died() -> None:
    flags = ("--device", "fake", "--fake-step-ms", "50", "--max-model-len", "4096", "--max-num-seqs", "1")
    with serving(*flags, "--stall-timeout", "60") as server:
        running, took = timed(server, {"max_tokens": 2000, "timeout": 1.0})
        assert running.status_code == 504, running.text
        assert took < 4
        body = {"prompt": [301], "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as answer:
            lines = answer.iter_lines()
            next(lines)
            waiting, took = timed(server, {"max_tokens": 4, "timeout": 1.0})
            assert waiting.status_code == 504, waiting.text
            assert took < 4
        for role in ("worker", "scheduler", "detokenizer", "coordinator"):
            pid = server.pid(role)
            os.kill(pid, signal.SIGSTOP)
            dead, took = timed(server, {"max_tokens": 2000, "timeout": 1.0})
            os.kill(pid, signal.SIGCONT)
            assert dead.status_code == 504, (role, dead.text)
            assert took < 5, role


def test_a_step_that_never_ends_costs_its_request_and_not_the_mesh() -> None:
    flags = ("--device", "fake", "--fake-step-ms", "600000", "--step-timeout", "1", "--max-model-len", "4096")
    with serving(*flags) as server:
        answer, _ = timed(server, {"max_tokens": 4})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "poison_request_error"
        assert "its worker died 2 times" in answer.json()["error"]["message"]
        line = server.wait_for("worker/0 is replaced")
        assert "does not end for 1 s (--step-timeout)" in line
        assert "in step" in (Path(server.run_dir) / "worker-0.stacks.txt").read_text()
        server.wait_for("worker/0 is ready")
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_kills_under_a_hybrid_model_change_no_token(tmp_path: Path) -> None:
    """The scheduler and the worker of a model with recurrent states die under eight streams: states are computed anew.

    Before that the same prompts are served undisturbed, so what the streams are computed from has been checkpoints, too.
    """
    flags = ("--device", "cpu", "--cpu-threads", "1", "--kv-cache-memory", "2M", "--max-num-batched-tokens", "64")
    states = ("--block-size", "8", "--mamba-block-size", "48", "--mamba-cache-mode", "align")
    prompts = [[3 + (31 * number + 7 * at) % 200 for at in range(40 + 17 * number)] for number in range(8)]
    with serving(hybrid_model(tmp_path), *flags, *states) as server:
        expected = greedy(server, prompts, NUM_TOKENS)
        assert len({tuple(sorted(set(tokens))) for tokens in expected}) == len(prompts), "texts that prove something"
        streams = [Stream(number, prompt=prompt, temperature=0) for number, prompt in enumerate(prompts)]
        with ThreadPoolExecutor(len(streams)) as pool:
            reads = [pool.submit(stream.read, server.url) for stream in streams]
            for role in ("worker", "scheduler"):
                begun = [len(stream.ids) for stream in streams]
                until(lambda: any(len(stream.ids) >= had + 10 for stream, had in zip(streams, begun, strict=True)), 60)  # noqa: B023
                assert not any(read.done() for read in reads), "under load"
                os.kill(server.pid(role), signal.SIGKILL)
                server.wait_for(f"{role}/0 is ready")
            for read in reads:
                read.result(timeout=300)
        assert [stream.ids for stream in streams] == expected
        assert {p["role"]: p["restarts"] for p in server.status()["processes"]}["scheduler"] == 1
