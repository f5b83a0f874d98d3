"""Ranks that step together, with the fake worker: an idle one steps along, and whichever process dies, every stream goes on."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fake_answers import reference
from serving import serving
from timed_streams import Stream
from waiting import until

pytestmark = pytest.mark.mesh
NUM_STREAMS, NUM_TOKENS = 6, 300
DEATHS = (("worker", 1), ("scheduler", 0), ("coordinator", 0), ("worker", 0))


def completion(url: str, prompt: list[int], rank: int) -> list[int]:
    body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}, timeout=300)
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def test_every_rank_steps_and_every_stream_survives() -> None:
    flags = ("--device", "fake", "--max-model-len", "4096", "--fake-step-ms", "5", "-dp", "2", "--fake-lockstep")
    with serving(*flags) as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        for rank in (0, 1):
            assert completion(server.url, [5, 6, rank], rank) == reference([5, 6, rank], 40)
        for role, index in DEATHS:
            streams = [Stream(number) for number in range(NUM_STREAMS)]
            ends = [pool.submit(stream.read, server.url) for stream in streams]
            assert all(stream.begun.wait(30) for stream in streams)
            status = server.status()["processes"]
            (victim,) = [p["pid"] for p in status if (p["role"], p["index"]) == (role, index)]
            os.kill(victim, signal.SIGKILL)
            for end in ends:
                end.result(timeout=300)
            for stream in streams:
                assert stream.ids == reference(stream.prompt, NUM_TOKENS), (role, index)
            until(lambda: all(p["state"] == "ready" for p in server.status()["processes"]))
    assert any("all steps have ended" in line for line in server.lines), server.lines[-5:]
