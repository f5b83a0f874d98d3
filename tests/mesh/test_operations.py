"""`meshlm restart` and `meshlm drain` on a mesh that serves."""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fake_answers import reference
from http_clients import error_of, events
from serving import Serving, meshlm, serving
from waiting import until

pytestmark = pytest.mark.mesh
NUM_STREAMS = 16
NUM_TOKENS = 60


def stream(server: Serving, number: int) -> None:
    """One whole stream on a connection of its own, every token compared."""
    prompt = [700 + number, 701]
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True, "stream": True}
    ids: list[int] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        for event in events(answer.iter_lines()):
            ids += event["choices"][0]["token_ids"]
    assert ids == reference(prompt, NUM_TOKENS)


def restarted(server: Serving, what: str) -> list[str]:
    """Restart under load: the lines that it printed. No stream fails, and those that began before and after are right."""
    over, begun = threading.Event(), threading.Barrier(NUM_STREAMS + 1, timeout=60)

    def streams(number: int) -> int:
        stream(server, number)
        begun.wait()
        count = 1
        while not over.is_set():
            stream(server, number)
            count += 1
        return count

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(streams, number) for number in range(NUM_STREAMS)]
        try:
            begun.wait()
            done = meshlm(server, "restart", what)
        finally:
            over.set()
        assert all(one.result(timeout=300) > 1 for one in running)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_restart_replaces_every_process_and_no_request_fails() -> None:
    with serving("--device", "fake", "--fake-step-ms", "5", "--max-model-len", "4096", "--max-restarts", "0") as server:
        before = {(p["role"], p["pid"]) for p in server.status()["processes"]}
        lines = restarted(server, "all")
        assert lines[-1] == "done: all are ready"
        processes = server.status()["processes"]
        assert all(process["state"] == "ready" for process in processes)
        assert before & {(p["role"], p["pid"]) for p in processes} == {("supervisor", server.process.pid)}
        roles = ("coordinator", "detokenizer", "scheduler", "worker", "frontend")
        assert [p["role"] for p in processes] == ["supervisor", "worker", "coordinator", *roles[2:0:-1], "frontend"]
        assert [role for role in roles if any(line.startswith(f"{role}/0: replaced") for line in lines)] == list(roles)


def test_two_frontends_take_turns() -> None:
    with serving("--device", "fake", "--fake-step-ms", "5", "--max-model-len", "4096", "--frontends", "2") as server:
        lines = restarted(server, "frontend")
        assert [line.split(":")[0] for line in lines if "replaced" in line and line[0] == "f"] == [
            "frontend/0",
            "frontend/1",
        ]


def test_what_cannot_be_restarted_is_one_line(fake: Serving) -> None:
    for what, code in (("cat", 2), ("frontend/9", 1), ("supervisor", 1)):
        done = meshlm(fake, "restart", what)
        assert done.returncode == code
        assert len(done.stderr.splitlines()) == 1
        assert what in done.stderr


def test_drain_lets_what_runs_finish_and_can_be_undone() -> None:
    with serving("--device", "fake", "--fake-step-ms", "20", "--max-model-len", "4096") as server:
        body = {"prompt": [5, 6], "max_tokens": 100, "ignore_eos": True, "return_token_ids": True}
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=300)
            until(lambda: any(p["phase"] == "1 requests" for p in server.status()["processes"]))
            drained = meshlm(server, "drain")
            answer = running.result(timeout=30)
        assert drained.stdout.splitlines() == ["draining: 1 requests are open", "drained: no request is open"]
        assert answer.json()["choices"][0]["token_ids"] == reference([5, 6], 100)
        refused = httpx.post(f"{server.url}/v1/completions", json=body)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert "draining" in error_of(refused)["message"]
        ready = httpx.get(f"{server.url}/ready")
        assert (ready.status_code, "draining" in ready.text) == (503, True)
        assert meshlm(server, "restart", "frontend").returncode == 0
        until(lambda: "draining" in httpx.get(f"{server.url}/ready").text)
        assert meshlm(server, "drain", "--undo").returncode == 0
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
        assert json.loads(httpx.post(f"{server.url}/v1/completions", json={**body, "max_tokens": 1}).content)["choices"]
        assert meshlm(server, "drain", "--stop").returncode == 0
        assert server.process.wait(timeout=20) == 0


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_who_dies_while_the_mesh_stops_costs_no_stream_its_rest(role: str) -> None:
    body = {"prompt": [5, 6], "max_tokens": 100, "ignore_eos": True, "return_token_ids": True, "stream": True}
    with serving("--device", "fake", "--fake-step-ms", "30", "--max-model-len", "4096") as server:
        pid = server.pid(role)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as answer:
            found = events(answer.iter_lines())
            ids = next(found)["choices"][0]["token_ids"]
            server.process.send_signal(signal.SIGTERM)
            until(lambda: any("stopping" in line for line in server.lines))
            os.kill(pid, signal.SIGKILL)
            for event in found:
                ids += event["choices"][0]["token_ids"]
        assert ids == reference([5, 6], 100)
        assert server.process.wait(timeout=20) == 0


def test_drain_gives_up_waiting() -> None:
    with serving(
        "--device", "fake", "--fake-step-ms", "50", "--max-model-len", "4096", "--drain-timeout", "0"
    ) as server:
        body = {"prompt": [5, 6], "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as answer:
            assert answer.status_code == 200
            done = meshlm(server, "drain", "--timeout", "0.1")
        assert done.returncode == 1
        assert "1 requests are still open" in done.stderr


def test_what_is_open_when_the_drain_is_over_is_told_why() -> None:
    """And nothing waits for it: the supervisor would kill what is left after five seconds, and the connections would just break."""
    with (
        serving(
            "--device", "fake", "--fake-step-ms", "50", "--max-model-len", "4096", "--drain-timeout", "0"
        ) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        url = f"{server.url}/v1/completions"
        body = {"prompt": [5, 6], "max_tokens": 1000, "ignore_eos": True}
        whole = pool.submit(httpx.post, url, json=body, timeout=300)
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=300) as answer:
            events = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
            next(events)
            until(lambda: httpx.get(f"{server.url}/load").json()["server_load"] == 2)
            server.process.send_signal(signal.SIGTERM)
            told = [json.loads(event)["error"] for event in events if "error" in event]
        assert whole.result(timeout=300).status_code == 503
        assert [(error["message"], error["code"]) for error in told] == [("this server is stopping", 503)]
        assert server.process.wait(timeout=20) == 0
