"""Ranks for prompts and ranks that decode: the tokens are those of a mesh without roles, and their pages were moved, whoever dies."""

import os
import random
import re
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_answers import complete, reference, stream_ids
from serving import Serving, meshlm, serving
from split_models import FLAGS, greedy, small_model
from waiting import until

pytestmark = pytest.mark.mesh
ROLES = ("-dp", "2", "--dp-roles", "prefill:1,decode:1")
FAKE = ("--device", "fake", "--max-model-len", "4096", "--fake-step-ms", "5")
NUM_KILLS = 8


def metric(server: Serving, name: str, labels: str = "") -> float:
    """The sum over all series of this metric with these labels."""
    text = httpx.get(f"{server.url}/metrics", timeout=300).text
    lines = re.findall(rf"^meshlm:{re.escape(name)}\{{(.*)\}} (\S+)$", text, re.M)
    return sum(float(value) for found, value in lines if labels in found)


def prompts(count: int, length: int = 400) -> list[list[int]]:
    return [[900 + number, *range(300 + number, 300 + number + length)] for number in range(count)]


def test_pages_are_moved_to_the_rank_that_decodes() -> None:
    """One after the other, so that no rank takes the other's work for want of its own."""
    with serving(*FAKE, *ROLES) as server:
        for prompt in prompts(4):
            answer = complete(server, prompt, 20)
            assert answer["choices"][0]["token_ids"] == reference(prompt, 20)
        assert metric(server, "request_hand_offs_total", 'engine="0"') == 4
        assert metric(server, "kv_loaded_blocks_total", 'engine="1"') >= 4 * (400 // 16)
        assert metric(server, "prompt_tokens_by_source_total", 'source="local_compute"') < 2 * 4 * 401
        assert complete(server, [5, 6, 7], 9)["choices"][0]["token_ids"] == reference([5, 6, 7], 9)
        assert metric(server, "request_hand_offs_total") == 4, "a short prompt is computed where it decodes"
        roles = httpx.get(f"{server.url}/metrics", timeout=300).text
        assert re.search(r'^meshlm:rank_role\{engine="1".*role="decode"\} 1\.0$', roles, re.M)
        assert "2 ranks (prefill:1,decode:1)" in meshlm(server, "status").stdout


def pid_of(server: Serving, role: str, index: int) -> int:
    """Of a process that is ready; 0 while it is not."""
    for process in server.status()["processes"]:
        if (process["role"], process["index"]) == (role, index) and process["state"] == "ready":
            return int(process["pid"])
    return 0


def num_done(streams: list[Future[Any]]) -> int:
    return sum(one.done() for one in streams)


def ended_since(streams: list[Future[Any]], before: int) -> bool:
    return num_done(streams) > before


def kill_some(server: Serving, streams: list[Future[Any]], seed: int) -> int:
    """Kills schedulers and workers of both ranks, each time when another stream has ended; how many."""
    dice = random.Random(seed)
    num_kills = 0
    for kill in range(NUM_KILLS):
        before, role, index = num_done(streams), ("scheduler", "worker")[kill % 2], dice.randrange(2)
        if before == len(streams):
            break
        until(partial(ended_since, streams, before))
        if pid := pid_of(server, role, index):
            os.kill(pid, signal.SIGKILL)
            num_kills += 1
    return num_kills


@pytest.mark.parametrize("seed", range(2))
def test_no_kill_of_either_rank_loses_a_token(seed: int) -> None:
    flags = ("--max-restarts", "1000", "--max-num-seqs", "8")
    with serving(*FAKE, *ROLES, *flags) as server, ThreadPoolExecutor(12) as pool:
        asked = [(prompt, 30 + 10 * number) for number, prompt in enumerate(prompts(60))]
        streams = [pool.submit(stream_ids, server, prompt, count) for prompt, count in asked]
        num_kills = kill_some(server, list(streams), seed)
        for (prompt, count), stream in zip(asked, streams, strict=True):
            assert stream.result(timeout=300) == (reference(prompt, count), ["length"])
        assert num_kills > 3
        assert metric(server, "kv_loaded_blocks_total") > 0
        until(lambda: all(pid_of(server, role, index) for role in ("scheduler", "worker") for index in range(2)))
        (prompt,) = prompts(1, 500)
        assert complete(server, prompt, 9)["choices"][0]["token_ids"] == reference(prompt, 9)


def test_roles_change_under_load() -> None:
    flags = ("-dp", "3", "--dp-roles", "prefill:1,decode:2", "--max-num-seqs", "4")
    with serving(*FAKE, *flags) as server, ThreadPoolExecutor(24) as pool:
        asked = [(prompt, 60) for prompt in prompts(72)]
        streams = [pool.submit(stream_ids, server, prompt, count) for prompt, count in asked]
        for done, change in (
            (8, ("set", "dp-roles", "prefill:2,decode:1")),
            (24, ("scale", "--dp", "4")),
            (40, ("set", "dp-roles", "prefill:1,decode:3")),
            (56, ("scale", "--dp", "2", "--drain-timeout", "0.1")),
        ):
            until(partial(ended_since, streams, done - 1))
            made = meshlm(server, *change)
            assert made.returncode == 0, made.stderr
        for (prompt, count), stream in zip(asked, streams, strict=True):
            assert stream.result(timeout=300) == (reference(prompt, count), ["length"])
        assert "2 ranks (prefill:1,decode:1)" in meshlm(server, "status").stdout
        for change, says in (
            (("set", "dp-roles", "prefill:2,decode:1"), "dp-roles: 3 ranks, and --data-parallel-size is 2"),
            (("scale", "--dp", "1"), "--dp 1: a rank has to decode beside those for prompts (prefill:1,decode:1)"),
        ):
            refused = meshlm(server, *change)
            assert refused.returncode != 0
            assert says in refused.stderr


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_on_a_cpu_the_tokens_are_those_of_a_mesh_without_roles(kind: str, tmp_path: Path) -> None:
    """Also with a sliding window, whose earlier pages are not there any more."""
    model = small_model(tmp_path, kind)
    asked = [[3 + 7 * i % (190 + number) for i in range(300 + number)] for number in range(6)]
    others = [[5 + 11 * i % (180 + number) for i in range(280 + number)] for number in range(16)]
    flags = (model, *FLAGS, "--load-format", "dummy", "--max-model-len", "512")
    with serving(*flags) as server:
        wanted, wanted_of_others = greedy(server, asked), greedy(server, others)
    with serving(*flags, *ROLES) as server:
        assert [one for prompt in asked for one in greedy(server, [prompt])] == wanted
        assert metric(server, "request_hand_offs_total", 'engine="0"') == len(asked)
        assert metric(server, "kv_loaded_blocks_total", 'engine="1"') > 0
        assert greedy(server, asked) == wanted, "at once, and cached"
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(greedy, server, [prompt]) for prompt in others]
            assert kill_some(server, list(streams), len(asked)) > 1
            assert [one for stream in streams for one in stream.result(timeout=300)] == wanted_of_others
