"""More than the mesh can take: new requests are refused at once, what runs keeps its pace."""

import asyncio
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import httpx
import pytest
from fake_answers import reference
from http_clients import answer_of, connect, error_of, events, head, metric, post
from serving import Serving, serving
from waiting import until

pytestmark = pytest.mark.mesh
STEP_MS, PLACES, QUEUE, BURST = 20, 4, 4, 60


def stream(server: Serving, number: int, count: int) -> list[float]:
    """A whole stream, every token compared: when they came."""
    prompt = [800 + number, 801]
    body = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "return_token_ids": True, "stream": True}
    ids: list[int] = []
    times: list[float] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        for event in events(answer.iter_lines()):
            ids += event["choices"][0]["token_ids"]
            times.append(time.monotonic())
    assert ids == reference(prompt, count)
    return times


async def burst(server: Serving) -> list[httpx.Response]:
    """Many at once."""
    body = {"prompt": [9, 9], "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=httpx.Limits()) as client:
        return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(BURST)))


def test_beyond_the_queue_is_503_and_what_runs_keeps_its_pace() -> None:
    flags = ("--device", "fake", "--fake-step-ms", str(STEP_MS), "--max-model-len", "4096")
    with serving(*flags, "--max-num-seqs", str(PLACES), "--max-waiting", str(QUEUE)) as server:
        alone = stream(server, 99, 50)
        with ThreadPoolExecutor(PLACES) as pool:
            running = [pool.submit(stream, server, number, 150) for number in range(PLACES)]
            metrics = [httpx.get(f"{server.url}/ready").status_code for _ in range(3)]
            answers = asyncio.run(burst(server))
            times = [one.result(timeout=300) for one in running]
        assert metrics == [200] * 3
        served = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code == 503]
        assert len(served) + len(refused) == BURST
        assert len(refused) >= BURST - 3 * QUEUE - PLACES
        assert all(answer.json()["choices"][0]["token_ids"] == reference([9, 9], 4) for answer in served)
        for answer in refused:
            assert answer.headers["retry-after"]
            assert "--max-waiting" in error_of(answer)["message"]
        assert all(
            answer.elapsed.total_seconds() < min(one.elapsed.total_seconds() for one in served) for answer in refused
        )
        assert pace(times[0]) < 2 * pace(alone)


def test_a_full_queue_refuses_by_the_head_of_a_request() -> None:
    flags = ("--device", "fake", "--fake-step-ms", str(STEP_MS), "--max-model-len", "4096")
    body = {"prompt": [7, 8], "max_tokens": 4000, "ignore_eos": True}
    with (
        serving(*flags, "--max-num-seqs", "1", "--max-waiting", "1") as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        with connect(server) as runs, connect(server) as waits, connect(server) as announces:
            runs.sendall(post({**body, "stream": True}))
            assert runs.recv(4096).startswith(b"HTTP/1.1 200 ")
            waits.sendall(post(body))
            until(lambda: metric(client, "num_requests_waiting") == 1)
            assert client.post("/v1/completions", json=body).status_code == 503
            announces.sendall(
                head("POST", "/v1/completions", "Content-Type: application/json", "Content-Length: 1000000")
            )
            status, content = answer_of(announces)  # and the body never comes
            assert (status, b"--max-waiting" in content) == (503, True)
            assert metric(client, "request_refusal_seconds_count") >= 1
        until(lambda: client.post("/v1/completions", json={**body, "max_tokens": 1}).status_code == 200)


def pace(times: list[float]) -> float:
    """The usual time between tokens."""
    return statistics.median(b - a for a, b in pairwise(times))
