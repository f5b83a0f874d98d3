"""Three faults, staged, and what docs/operations.md says that an operator sees of each. The words are the document's."""

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fake_answers import complete, reference
from http_clients import connect, post
from serving import Serving, meshlm, serving
from waiting import until

pytestmark = pytest.mark.mesh
PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text("utf-8")
SECTION = PAGE.partition("## Three faults, and how they look")[2].partition("\n## ")[0]
FLAGS = ("--device", "fake", "--fake-step-ms", "2", "--max-model-len", "4096", "--kv-cache-memory", "200M")
TIMES = ("--stall-timeout", "2", "--http-send-timeout", "2")


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(*FLAGS, *TIMES) as found:
        yield found


def said(words: str) -> str:
    """These words, which the document has."""
    assert words in SECTION, words
    return words


def metric(server: Serving, name: str, labels: str = "") -> float:
    """The sum over all series of this metric with these labels, which the document has."""
    said(f"`{name}" + (f"{{{labels}}}`" if labels else "`"))
    text = httpx.get(f"{server.url}/metrics", timeout=300).text
    lines = re.findall(rf"^{re.escape(name)}\{{(.*)\}} (\S+)$", text, re.M)
    return sum(float(value) for found, value in lines if labels in found)


def test_a_stuck_worker(server: Serving) -> None:
    pid = server.pid("worker")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(complete, server, [31, 32], 600)
        until(lambda: metric(server, "meshlm:num_requests_running") > 0)
        os.kill(pid, signal.SIGSTOP)
        line = server.wait_for(said("worker/0 is replaced"))
        assert said("no sign of life for") in line
        assert said("stopped by a signal") in line
        server.wait_for(said("worker/0 died and is started again"))
        server.wait_for("worker/0 is ready")
        assert asked.result(timeout=300)["choices"][0]["token_ids"] == reference([31, 32], 600), "no token is lost"
    (row,) = [process for process in server.status()["processes"] if process["role"] == "worker"]
    assert (row["restarts"], row["state"]) == (1, "ready")
    why = meshlm(server, *said("meshlm status --why").split()[1:]).stdout
    assert f"worker/0, pid {pid}: {said('signal 9')}" in why
    assert said("last sign of life") in why
    assert "worker/0 is replaced" in meshlm(server, *said("meshlm logs supervisor").split()[1:]).stdout


def test_a_full_kv_cache(server: Serving) -> None:
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(complete, server, [40 + number], 1200) for number in range(8)]
        until(lambda: metric(server, "meshlm:kv_cache_usage_perc") > 0.9)
        until(lambda: metric(server, "meshlm:num_requests_waiting_by_reason", 'reason="capacity"') > 0)
        until(lambda: metric(server, "meshlm:num_preemptions_total") > 0)
        assert metric(server, "meshlm:num_requests_running") < 8
        for number, one in enumerate(asked):
            ids = one.result(timeout=300)["choices"][0]["token_ids"]
            assert ids == reference([40 + number], 1200), "they wait, and none is wrong"


def test_a_slow_client(server: Serving) -> None:
    before = metric(server, "meshlm:request_success_total", 'finished_reason="abort"')
    server.forget()
    body = {"prompt": [50], "max_tokens": 3000, "n": 16, "logprobs": 20, "stream": True, "ignore_eos": True}
    with connect(server, receive_buffer=4096) as client:
        client.sendall(post(body))
        line = server.wait_for(said("client cut off"), limit_s=60)
        assert said("--http-send-timeout") in line
        until(lambda: metric(server, "meshlm:request_success_total", 'finished_reason="abort"') >= before + 16)
    assert complete(server, [51], 5)["choices"][0]["token_ids"] == reference([51], 5), "others are served"
    lines = meshlm(server, *said("meshlm logs frontend").split()[1:]).stdout
    assert "client cut off" in lines
    assert said("finish_reason") in lines
