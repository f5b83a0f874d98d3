"""Ranks come to and leave a running mesh while streams run: every token is what an undisturbed run gives."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fake_answers import complete, reference, stream_ids
from serving import MESHLM, Serving, serving

pytestmark = pytest.mark.mesh


def scale(server: Serving, num_ranks: int, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [MESHLM, "scale", "--dp", str(num_ranks), "--run-dir", server.run_dir, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/", check=False)


def ranks(server: Serving) -> list[int]:
    return sorted(
        p["index"] for p in server.status()["processes"] if p["role"] == "scheduler" and p["state"] == "ready"
    )


def test_ranks_come_and_go_under_load() -> None:
    flags = ("--device", "fake", "--max-model-len", "4096", "--fake-step-ms", "10", "--max-num-seqs", "4")
    with serving(*flags) as server, ThreadPoolExecutor(24) as pool:
        prompts = [[700 + number] * (20 + number) for number in range(12)]
        first = [pool.submit(stream_ids, server, prompt, 150) for prompt in prompts]
        grown = scale(server, 3)
        assert (grown.returncode, grown.stdout) == (0, "3 ranks\n"), grown.stderr
        assert ranks(server) == [0, 1, 2]
        second = [pool.submit(stream_ids, server, prompt, 150) for prompt in prompts]
        headers = {"X-data-parallel-rank": "2"}
        body = {"prompt": [5, 6], "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
        pinned = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=300).json()
        assert pinned["choices"][0]["token_ids"] == reference([5, 6], 4)
        shrunk = scale(server, 1, "--drain-timeout", "0.1")
        assert (shrunk.returncode, shrunk.stdout) == (0, "1 rank\n"), shrunk.stderr
        assert ranks(server) == [0]
        for streams in (first, second):
            for prompt, stream in zip(prompts, streams, strict=True):
                assert stream.result(timeout=300) == (reference(prompt, 150), ["length"])
        refused = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
        assert refused.status_code == 400
        assert "rank 0 only" in refused.json()["error"]["message"]
        assert server.status()["data_parallel_size"] == 1
        assert complete(server, [9, 8], 5)["choices"][0]["token_ids"] == reference([9, 8], 5)
        for wrong in ("0", "2000"):
            answer = scale(server, int(wrong))
            assert answer.returncode == 1
            assert f"--dp {wrong}: a number of ranks from 1 to 1024" in answer.stderr
        assert scale(server, 1).stdout == "1 rank\n"


def test_scaling_over_http_loses_no_token() -> None:
    """vLLM's POST /scale_elastic_ep: from one rank to two and back while streams run, and new requests are served all the while."""
    flags = (
        "--device",
        "fake",
        "--max-model-len",
        "4096",
        "--fake-step-ms",
        "10",
        "--max-num-seqs",
        "4",
        "--server-dev-mode",
    )
    with serving(*flags) as server, ThreadPoolExecutor(24) as pool:
        prompts = [[700 + number] * (20 + number) for number in range(8)]
        streams = [pool.submit(stream_ids, server, prompt, 200) for prompt in prompts]
        for size in (2, 1):
            change = pool.submit(post_scale, server, size, 0.1)
            assert complete(server, [9, size], 5)["choices"][0]["token_ids"] == reference([9, size], 5)
            answer = change.result(timeout=300)
            assert (answer.status_code, answer.json()) == (200, {"message": f"Scaled to {size} data parallel engines"})
            assert ranks(server) == list(range(size))
            is_scaling = httpx.post(f"{server.url}/is_scaling_elastic_ep", timeout=300)
            assert is_scaling.json() == {"is_scaling_elastic_ep": False}
            assert httpx.get(f"{server.url}/get_world_size", timeout=300).json() == {"world_size": size}
        for prompt, stream in zip(prompts, streams, strict=True):
            assert stream.result(timeout=300) == (reference(prompt, 200), ["length"])
        assert post_scale(server, 1, None).status_code == 200, "nothing to do"
        assert post_scale(server, 0, None).status_code == 400


def post_scale(server: Serving, num_ranks: int, drain_s: float | None) -> httpx.Response:
    body = {"new_data_parallel_size": num_ranks, "drain_timeout": drain_s}
    return httpx.post(f"{server.url}/scale_elastic_ep", json=body, timeout=300)


def test_ranks_that_cannot_start_are_taken_back() -> None:
    with serving("--device", "fake", "--max-model-len", "512", "--server-dev-mode") as server:
        # It opens this file first of all, and cannot where a directory is.
        Path(server.run_dir, "scheduler-1.stacks.txt").mkdir()
        failed = scale(server, 2)
        assert failed.returncode == 1
        assert "scaling failed, 1 rank as before" in failed.stderr
        answer = post_scale(server, 2, None)
        assert answer.status_code == 500
        assert "scaling failed, the ranks are as before (1)" in answer.json()["error"]["message"]
        assert httpx.get(f"{server.url}/get_world_size", timeout=300).json() == {"world_size": 1}
        status = server.status()
        assert (status["ready"], status["data_parallel_size"]) == (True, 1)
        assert ranks(server) == [0]
        assert complete(server, [3], 5)["choices"][0]["token_ids"] == reference([3], 5)
        Path(server.run_dir, "scheduler-1.stacks.txt").rmdir()
        assert scale(server, 2).stdout == "2 ranks\n"


def test_one_rank_behind_an_outer_balancer_goes_by_its_own_number() -> None:
    with serving(
        "--device", "fake", "--max-model-len", "512", "-dp", "4", "--data-parallel-rank", "3", "--server-dev-mode"
    ) as server:
        assert ranks(server) == [0]
        body = {"prompt": [5, 6], "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
        for rank, code in (("3", 200), ("0", 400)):
            answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"X-data-parallel-rank": rank})
            assert answer.status_code == code, answer.text
        assert "this mesh has rank 3 only" in answer.json()["error"]["message"]
        assert 'engine="3"' in httpx.get(f"{server.url}/metrics").text
        refused = scale(server, 2)
        assert refused.returncode == 1
        assert "outer balancer" in refused.stderr
        answer = post_scale(server, 2, None)
        assert answer.status_code == 409
        assert "outer balancer" in answer.json()["error"]["message"]
