"""Pages that move in a real mesh: lost blocks come back from the store; one rank computes a prompt, and another decodes."""

import os
import signal

import httpx
import pytest
from fake_answers import complete, reference
from serving import Serving, serving
from waiting import until

pytestmark = pytest.mark.mesh
PROMPT = [300 + i for i in range(100)]


def counted(server: Serving, name: str) -> float:
    """A metric, of all ranks."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"meshlm:{name}"))


def test_what_a_dead_worker_had_comes_back_from_the_store() -> None:
    flags = (
        "--device",
        "fake",
        "--max-model-len",
        "512",
        "--kv-offloading-size",
        "0.25",
        "--enable-prompt-tokens-details",
    )
    with serving(*flags) as server:
        assert complete(server, PROMPT, 20)["choices"][0]["token_ids"] == reference(PROMPT, 20)
        until(lambda: counted(server, "kv_saved_blocks_total{") >= 6)
        before = server.pid("worker")
        os.kill(before, signal.SIGKILL)
        until(lambda: server.pid("worker") != before)
        again = complete(server, PROMPT, 20)
        assert again["choices"][0]["token_ids"] == reference(PROMPT, 20)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        until(lambda: counted(server, "external_prefix_cache_hits_total") == 96)


def test_a_prompt_is_computed_at_one_rank_and_decoded_at_another() -> None:
    flags = ("--device", "fake", "--max-model-len", "2048", "-dp", "2", "--dp-roles", "prefill:1,decode:1")
    prompt = [300 + i % 90 for i in range(1000)]
    with serving(*flags) as server:
        assert complete(server, prompt, 20)["choices"][0]["token_ids"] == reference(prompt, 20)
        until(lambda: counted(server, "external_prefix_cache_hits_total") == 992, 20)
