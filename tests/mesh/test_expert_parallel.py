"""A mixture of experts over two ranks, on the CPU: the tokens are those of one rank with all experts, also when ranks die."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_clients import metric
from mixture import NUM_STREAMS, NUM_TOKENS, mixture, texts
from serving import Serving, serving
from timed_streams import Stream
from waiting import until

pytestmark = pytest.mark.mesh


@pytest.fixture(scope="module")
def flags(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return mixture(tmp_path_factory.mktemp("mixture"), smollm2)


@pytest.fixture(scope="module")
def expected(flags: tuple[str, ...]) -> list[list[int]]:
    """Of one rank with all experts."""
    with serving(*flags) as server:
        return texts(server)


def kill_under_load(server: Serving, role: str, index: int, expected: list[list[int]]) -> None:
    """All streams say what is expected of them all the same."""
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [Stream(number, temperature=0, max_tokens=NUM_TOKENS) for number in range(NUM_STREAMS)]
        ends = [pool.submit(stream.read, server.url) for stream in streams]
        assert all(stream.begun.wait(30) for stream in streams)
        status = server.status()["processes"]
        (victim,) = [p["pid"] for p in status if (p["role"], p["index"]) == (role, index)]
        os.kill(victim, signal.SIGKILL)
        for end in ends:
            end.result(timeout=300)
    assert [stream.ids for stream in streams] == expected, (role, index)

    def restarts(processes: list[dict[str, Any]]) -> dict[tuple[str, int], int]:
        return {(p["role"], p["index"]): p["restarts"] for p in processes}

    before = restarts(status)
    until(lambda: restarts(server.status()["processes"]).get((role, index), 0) > before[role, index], 60)
    until(lambda: all(p["state"] == "ready" for p in server.status()["processes"]), 60)
    after = restarts(server.status()["processes"])
    assert {name for name in before if after[name] > before[name]} == {(role, index)}, "nobody else is started again"


def test_ranks_share_experts_and_none_is_missed_when_it_dies(flags: tuple[str, ...], expected: list[list[int]]) -> None:
    halves = ("--enable-dbo", "--dbo-decode-token-threshold", "2", "--dbo-prefill-token-threshold", "8")
    with serving(*flags, "-dp", "2", "--enable-expert-parallel", *halves) as server:
        assert texts(server) == expected
        for role, index in (("worker", 1), ("worker", 0), ("scheduler", 1)):
            kill_under_load(server, role, index, expected)


@pytest.mark.parametrize("level", [1, 2])
def test_ranks_that_share_experts_sleep_while_requests_wait(
    flags: tuple[str, ...], expected: list[list[int]], level: int
) -> None:
    sleeping = ("--enable-sleep-mode", "--server-dev-mode")
    with (
        serving(*flags, "-dp", "2", "--enable-expert-parallel", *sleeping) as server,
        ThreadPoolExecutor(NUM_STREAMS) as pool,
    ):
        streams = [Stream(number, temperature=0, max_tokens=NUM_TOKENS) for number in range(NUM_STREAMS)]
        ends = [pool.submit(stream.read, server.url) for stream in streams]
        assert all(stream.begun.wait(30) for stream in streams)
        for path in (f"/sleep?level={level}&mode=keep", "/wake_up"):
            assert httpx.post(f"{server.url}{path}", timeout=300).status_code == 200, path
            at_once = [len(stream.ids) for stream in streams]
            assert min(at_once) < NUM_TOKENS, "they were over before"
        for end in ends:
            end.result(timeout=300)
        assert [stream.ids for stream in streams] == expected


@pytest.mark.parametrize("method", [{"method": "ngram", "prompt_lookup_max": 1}, {"method": "suffix"}])
def test_ranks_draft_each_by_itself(method: dict[str, Any], flags: tuple[str, ...], expected: list[list[int]]) -> None:
    """Their steps have different numbers of drafts, and halves take turns."""
    drafts = ("--speculative-config", json.dumps({**method, "num_speculative_tokens": 4}))
    halves = ("--enable-dbo", "--dbo-decode-token-threshold", "2", "--dbo-prefill-token-threshold", "8")
    with serving(*flags, "-dp", "2", "--enable-expert-parallel", *halves, *drafts) as server:
        assert texts(server) == expected
        kill_under_load(server, "worker", 1, expected)
        with httpx.Client(base_url=server.url) as client:
            given, accepted = (
                metric(client, f"spec_decode_num_{name}_total") for name in ("draft_tokens", "accepted_tokens")
            )
        assert 0 < accepted < given


def test_experts_that_move_are_not_lost_with_a_rank(flags: tuple[str, ...], expected: list[list[int]]) -> None:
    eplb = '{"window_size": 16, "step_interval": 16, "num_redundant_experts": 2}'
    with serving(*flags, "-dp", "2", "--enable-expert-parallel", "--enable-eplb", "--eplb-config", eplb) as server:
        assert texts(server) == expected
        server.wait_for("experts moved")
        server.forget()
        kill_under_load(server, "worker", 1, expected)
        server.wait_for("experts moved")  # they are back where they were at the start, and go on from there
        assert texts(server) == expected
