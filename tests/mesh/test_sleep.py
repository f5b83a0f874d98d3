"""A mesh that sleeps: its memory is gone, its requests are not, whatever dies meanwhile."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from fake_answers import complete, reference
from serving import Serving, serving
from waiting import until

pytestmark = pytest.mark.mesh


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    flags = ("--device", "fake", "--fake-step-ms", "5", "--max-model-len", "4096", "--server-dev-mode")
    with serving(*flags, "--enable-sleep-mode") as found:
        yield found


def do(server: Serving, path: str) -> None:
    answer = httpx.post(f"{server.url}{path}", timeout=300)
    assert (answer.status_code, answer.content) == (200, b""), answer.text


def sleeps(server: Serving) -> bool | None:
    """None: nobody knows at the moment."""
    answer = httpx.get(f"{server.url}/is_sleeping", timeout=300)
    return answer.json()["is_sleeping"] if answer.status_code == 200 else None


def state(server: Serving) -> str | None:
    """None: a coordinator that has just begun has not heard of its ranks."""
    lines = httpx.get(f"{server.url}/metrics", timeout=300).text.splitlines()
    found = [line for line in lines if line.startswith("meshlm:engine_sleep_state{") and line.endswith(" 1.0")]
    assert len(found) <= 1, found
    return found[0].split('sleep_state="')[1].partition('"')[0] if found else None


def doing(server: Serving, role: str) -> str:
    """Empty: none of this role is ready."""
    found = [one for one in server.status()["processes"] if one["role"] == role and one["state"] == "ready"]
    return str(found[0]["phase"]) if found else ""


@pytest.mark.parametrize("level", [1, 2])
def test_requests_go_on_after_it(server: Serving, level: int) -> None:
    pid = server.pid("worker")
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(complete, server, [300 + level], 300)
        until(lambda: "meshlm:num_requests_running{" in httpx.get(f"{server.url}/metrics").text)
        do(server, f"/sleep?level={level}&mode=keep")
        assert sleeps(server) is True
        assert state(server) == ("weights_offloaded", "discard_all")[level - 1]
        assert "sleep" in httpx.get(f"{server.url}/ready").text
        assert (server.pid("worker") == pid) is (level == 1), "what was dropped is another process's to load"
        late = pool.submit(complete, server, [400], 10)
        do(server, "/wake_up?tags=weights")
        assert sleeps(server) is True
        do(server, "/wake_up?tags=kv_cache")
        assert sleeps(server) is False
        assert state(server) == "awake"
        assert running.result(60)["choices"][0]["token_ids"] == reference([300 + level], 300)
        assert late.result(60)["choices"][0]["token_ids"] == reference([400], 10)
    assert httpx.get(f"{server.url}/ready").status_code == 200


@pytest.mark.parametrize("roles", [("worker",), ("scheduler",), ("coordinator",), ("scheduler", "worker")])
def test_it_sleeps_through_the_death_of_a_process(server: Serving, roles: tuple[str, ...]) -> None:
    """And of a scheduler with its worker: the coordinator knows that they slept."""
    do(server, "/sleep?mode=wait")
    pids = {role: server.pid(role) for role in roles}
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    for role, pid in pids.items():
        until(partial(is_replaced, server, role, pid))
    until(lambda: sleeps(server) is True and state(server) == "weights_offloaded")
    until(lambda: doing(server, "worker") == "asleep")
    until(lambda: doing(server, "scheduler") == "its workers sleep")
    do(server, "/wake_up")
    assert sleeps(server) is False
    assert complete(server, [500], 20)["choices"][0]["token_ids"] == reference([500], 20)


def is_replaced(server: Serving, role: str, pid: int) -> bool:
    found = [one for one in server.status()["processes"] if one["role"] == role and one["state"] == "ready"]
    return any(one["pid"] not in (None, pid) for one in found)


@pytest.mark.parametrize("role", ["scheduler", "coordinator"])
def test_a_process_that_dies_at_the_wrong_time_is_waited_for(server: Serving, role: str) -> None:
    """Operations in the moment of its death are done by the next one."""
    with ThreadPoolExecutor(1) as pool:
        assert httpx.post(f"{server.url}/pause?mode=keep", timeout=300).json() == {"status": "paused"}
        running = pool.submit(complete, server, [600], 20)
        os.kill(server.pid(role), signal.SIGKILL)
        assert httpx.post(f"{server.url}/resume", timeout=300).json() == {"status": "resumed"}
        assert running.result(60)["choices"][0]["token_ids"] == reference([600], 20)
        os.kill(server.pid(role), signal.SIGKILL)
        do(server, "/sleep")
        assert sleeps(server) is True
        os.kill(server.pid(role), signal.SIGKILL)
        do(server, "/wake_up")
        assert complete(server, [601], 20)["choices"][0]["token_ids"] == reference([601], 20)


def test_what_cannot_be(server: Serving) -> None:
    for path in ("/sleep?level=3", "/sleep?mode=now", "/wake_up?tags=graphs"):
        assert httpx.post(f"{server.url}{path}").status_code == 400, path
    do(server, "/sleep?level=0&mode=keep")
    assert sleeps(server) is True
    assert state(server) == "awake", "paused alone"
    do(server, "/wake_up?tags=scheduling")
    assert sleeps(server) is False
    do(server, "/sleep")
    answer = httpx.post(f"{server.url}/reset_prefix_cache").json()
    assert not answer["success"]
    assert "sleep" in answer["error"]
    do(server, "/sleep")
    do(server, "/wake_up")
    do(server, "/wake_up")
