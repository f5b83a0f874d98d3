"""A worker dies under load while another rank is there: what it ran goes on at that rank at once."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from fake_answers import reference
from serving import Serving, serving
from timed_streams import NUM_TOKENS, Stream

pytestmark = pytest.mark.mesh
NUM_STREAMS = 12


def stop_the_next_child(server: Serving, known: set[int]) -> psutil.Process:
    """The dead worker's successor does not get far: it takes for ever to load."""
    supervisor = psutil.Process(server.process.pid)
    for _ in range(1000):
        for child in supervisor.children():
            if child.pid not in known:
                child.suspend()
                return child
        threading.Event().wait(0.005)
    raise AssertionError("the worker is not started again")


def test_what_a_dead_worker_ran_goes_on_at_the_other_rank_at_once() -> None:
    flags = ("--device", "fake", "--max-model-len", "4096", "--fake-step-ms", "20", "-dp", "2")
    with serving(*flags) as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [Stream(number) for number in range(NUM_STREAMS)]
        ends = [pool.submit(stream.read, server.url) for stream in streams]
        assert all(stream.begun.wait(30) for stream in streams)
        status = server.status()["processes"]
        (victim,) = [p["pid"] for p in status if (p["role"], p["index"]) == ("worker", 0)]
        known = {child.pid for child in psutil.Process(server.process.pid).children()}
        os.kill(victim, signal.SIGKILL)
        killed_at = time.monotonic()
        successor = stop_the_next_child(server, known)
        for end in ends:
            end.result(timeout=300)
        away_s = time.monotonic() - killed_at
        assert successor.status() == psutil.STATUS_STOPPED, "all ended while rank 0 had no worker"
        for stream in streams:
            assert stream.ids == reference(stream.prompt, NUM_TOKENS)
        gaps = sorted(stream.longest_gap_s for stream in streams)
        print(f"longest gaps {gaps[0]:.3f} to {gaps[-1]:.3f} s; without the worker for {away_s:.1f} s")
        assert gaps[-1] < away_s / 2
        successor.resume()
        server.wait_for("worker/0 is ready")
        answer = httpx.post(
            f"{server.url}/v1/completions",
            json={"prompt": [5, 6], "max_tokens": 4, "ignore_eos": True, "return_token_ids": True},
            headers={"X-data-parallel-rank": "0"},
            timeout=60,
        ).json()
        assert answer["choices"][0]["token_ids"] == reference([5, 6], 4)
