"""Drafted tokens in the whole mesh, with the fake device's drafter: the text is the same, and answers tell of their drafts."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_answers import reference
from http_clients import metric
from hybrid_models import hybrid_model
from serving import Serving, serving
from split_models import greedy
from waiting import until

pytestmark = pytest.mark.mesh
PROMPT, MAX_TOKENS = [300] * 20, 80
COUNTERS = {
    "num_spec_steps": "spec_decode_num_drafts_total",
    "num_draft_tokens": "spec_decode_num_draft_tokens_total",
    "num_accepted_draft_tokens": "spec_decode_num_accepted_tokens_total",
}


def counted(client: httpx.Client) -> dict[str, float]:
    return {name: metric(client, counter) for name, counter in COUNTERS.items()}


@pytest.fixture(scope="module")
def drafting() -> Iterator[Serving]:
    flags = ("--device", "fake", "--max-model-len", "512", "--fake-drafts", "3")
    with serving(*flags, "--per-request-spec-decode-metrics", "detailed") as server:
        yield server


def ask(server: Serving, **fields: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "ignore_eos": True, "return_token_ids": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)


def test_the_text_is_the_same_with_any_number_of_drafts(drafting: Serving) -> None:
    """And what answers tell of their drafts comes to what /metrics counts."""
    total = dict.fromkeys(COUNTERS, 0)
    with httpx.Client(base_url=drafting.url) as client:
        assert counted(client) == total
        for most in (None, 3, 1, 0):
            answer = ask(drafting, num_speculative_tokens=most).json()
            assert answer["choices"][0]["token_ids"] == reference(PROMPT, MAX_TOKENS)
            told = answer["metrics"]["speculative_decoding"]
            drafted, accepted = told["per_step_drafted"], told["per_step_accepted"]
            assert max(drafted, default=0) <= (3 if most is None else most), "fewer where they do not pay"
            assert all(0 <= count <= number for number, count in zip(drafted, accepted, strict=True))
            assert (sum(drafted), sum(accepted)) == (told["num_draft_tokens"], told["num_accepted_draft_tokens"])
            assert (told["num_spec_tokens"], len(told["acceptance_histogram"])) == (3, 4)
            total = {name: count + told[name] for name, count in total.items()}
        assert total["num_accepted_draft_tokens"] > 0
        until(lambda: counted(client) == total)


def test_a_stream_tells_it_at_its_end(drafting: Serving) -> None:
    answer = ask(drafting, stream=True, stream_options={"include_usage": True})
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert [token for chunk in chunks for one in chunk["choices"] for token in one["token_ids"]] == reference(
        PROMPT, MAX_TOKENS
    )
    told = [chunk["metrics"]["speculative_decoding"] for chunk in chunks if "metrics" in chunk]
    assert len(told) == 1
    assert told[0]["num_spec_tokens"] == 3


def test_more_than_the_server_drafts(drafting: Serving) -> None:
    answer = ask(drafting, num_speculative_tokens=4)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "num_speculative_tokens"


@pytest.mark.parametrize(
    ("mode", "method"), [("align", {"method": "ngram", "prompt_lookup_max": 1}), ("all", {"method": "suffix"})]
)
def test_a_model_with_states_gives_the_same_text_whatever_dies(
    mode: str, method: dict[str, Any], tmp_path: Path
) -> None:
    """Some drafts are right and some are wrong; behind checkpoints, too, and under a kill."""
    flags = ("--device", "cpu", "--cpu-threads", "1", "--kv-cache-memory", "4M", "--max-num-batched-tokens", "64")
    states = ("--block-size", "8", "--mamba-block-size", "48", "--mamba-cache-mode", mode, "--max-num-seqs", "8")
    prompts = [([3 + (31 * number + 7 * at) % 200 for at in range(9)] * 9)[: 50 + 4 * number] for number in range(6)]
    with serving(hybrid_model(tmp_path), *flags, *states) as server:
        expected = greedy(server, prompts, 160)
    drafts = {**method, "num_speculative_tokens": 4}
    with (
        serving(str(tmp_path), *flags, *states, "--speculative-config", json.dumps(drafts)) as server,
        httpx.Client(base_url=server.url) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        assert greedy(server, prompts, 160) == expected
        given = metric(client, "generation_tokens_total")
        again = pool.submit(greedy, server, prompts, 160)
        until(lambda: metric(client, "generation_tokens_total") > given + 100)
        os.kill(server.pid("worker"), signal.SIGKILL)
        assert again.result(300) == expected
        told = counted(client)
        assert told["num_accepted_draft_tokens"] < told["num_draft_tokens"]
        assert told["num_accepted_draft_tokens"] or method["method"] == "ngram", "past answers are the same"
        assert metric(client, "prefix_cache_hits_total") > 0, "checkpoints were found"
        server.wait_for("worker/0 is ready")
