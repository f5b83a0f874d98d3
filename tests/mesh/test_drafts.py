"""Drafted tokens in the whole mesh, with the fake device's drafter: the text is the same, and answers tell of their drafts."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_answers import reference
from http_clients import metric
from serving import Serving, serving
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
