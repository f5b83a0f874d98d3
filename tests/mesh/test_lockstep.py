"""Ranks that step together, with the fake worker: an idle one steps along, and whichever process dies, every stream goes on; also where
they are paused, or sleep."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fake_answers import reference
from serving import Serving, serving
from timed_streams import Stream
from waiting import until

pytestmark = pytest.mark.mesh
NUM_STREAMS, NUM_TOKENS = 6, 300
DEATHS = (("worker", 1), ("scheduler", 0), ("coordinator", 0), ("worker", 0))


FLAGS = ("--device", "fake", "--max-model-len", "4096", "--fake-step-ms", "5", "-dp", "2", "--fake-lockstep")


def completion(url: str, prompt: list[int], rank: int) -> list[int]:
    body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}, timeout=300)
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def kill(server: Serving, role: str, index: int) -> None:
    status = server.status()["processes"]
    (victim,) = [p["pid"] for p in status if (p["role"], p["index"]) == (role, index)]
    os.kill(victim, signal.SIGKILL)
    until(lambda: pid_of(server, role, index) not in (None, victim))


def pid_of(server: Serving, role: str, index: int) -> int | None:
    """None while it is not ready."""
    ready = [p for p in server.status()["processes"] if p["state"] == "ready"]
    return next((p["pid"] for p in ready if (p["role"], p["index"]) == (role, index)), None)


def post(server: Serving, path: str) -> None:
    answer = httpx.post(f"{server.url}{path}", timeout=300)
    assert answer.status_code == 200, answer.text


def sleeps(server: Serving) -> bool:
    answer = httpx.get(f"{server.url}/is_sleeping", timeout=300)
    return answer.status_code == 200 and bool(answer.json()["is_sleeping"])


def num_tokens(streams: list[Stream]) -> int:
    return sum(len(stream.ids) for stream in streams)


@pytest.mark.parametrize("asleep", ["", "?level=1&mode=keep", "?level=2&mode=keep"])
def test_streams_rest_while_the_ranks_are_paused_or_asleep_whoever_dies(asleep: str) -> None:
    with serving(*FLAGS, "--enable-sleep-mode", "--server-dev-mode") as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        for role, index in DEATHS:
            streams = [Stream(number) for number in range(NUM_STREAMS)]
            ends = [pool.submit(stream.read, server.url) for stream in streams]
            assert all(stream.begun.wait(30) for stream in streams)
            post(server, f"/sleep{asleep}" if asleep else "/pause?mode=keep")
            kill(server, role, index)
            until(lambda: sleeps(server))
            had = num_tokens(streams)
            assert had < NUM_STREAMS * NUM_TOKENS, "they were over before"
            post(server, "/wake_up" if asleep else "/resume")
            for end in ends:
                end.result(timeout=300)
            for stream in streams:
                assert stream.ids == reference(stream.prompt, NUM_TOKENS), (role, index)
            assert not sleeps(server)


def test_every_rank_steps_and_every_stream_survives() -> None:
    with serving(*FLAGS) as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        for rank in (0, 1):
            assert completion(server.url, [5, 6, rank], rank) == reference([5, 6, rank], 40)
        for role, index in DEATHS:
            streams = [Stream(number) for number in range(NUM_STREAMS)]
            ends = [pool.submit(stream.read, server.url) for stream in streams]
            assert all(stream.begun.wait(30) for stream in streams)
            kill(server, role, index)
            for end in ends:
                end.result(timeout=300)
            for stream in streams:
                assert stream.ids == reference(stream.prompt, NUM_TOKENS), (role, index)
            until(lambda: all(p["state"] == "ready" for p in server.status()["processes"]))
    assert any("all steps have ended" in line for line in server.lines), server.lines[-5:]
