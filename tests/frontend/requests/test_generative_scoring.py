"""POST /generative_scoring: against a frontend without a mesh, whose model says what the test wants."""

import math
from typing import Any

import httpx
import pytest
from scripted import NUM_PROMPT, Scripted

from meshlm.protocol.edges.text import JoinedPrompt, PositionLogprobs, TextPrompt, TokenLogprob, TokenPrompt
from meshlm.protocol.wire.columns import pack_i32

SHARES = {5: 0.6, 6: 0.2}  # of all tokens


def entry(token: int) -> TokenLogprob:
    return TokenLogprob(token, math.log(SHARES.get(token, 0.1)), 1, f"{token}", b"")


async def score(body: dict[str, Any], status: int = 200) -> tuple[Any, Scripted]:
    server = Scripted()
    server.pieces = ("a",)
    server.logprobs = (PositionLogprobs(entry(9), 1, tuple(entry(token) for token in SHARES)),)
    transport = httpx.ASGITransport(app=server.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post("/generative_scoring", json=body)
    assert answer.status_code == status, answer.text
    return answer.json(), server


async def test_each_item_is_a_prompt_with_the_query() -> None:
    found, server = await score({"query": "q", "items": ["a", [3, 4]], "label_token_ids": [6, 5], "request_id": "me"})
    assert [submit.prompt for submit in server.submits] == [
        JoinedPrompt((TextPrompt("q", True), TextPrompt("a", False))),
        JoinedPrompt((TextPrompt("q", True), TokenPrompt(pack_i32([3, 4])))),
    ]
    assert {submit.sampling.logprob_token_ids for submit in server.submits} == {(6, 5)}
    assert [one["score"] for one in found["data"]] == pytest.approx([0.25, 0.25])
    assert (found["id"], found["object"], found["data"][1]["index"]) == ("generative-scoring-me", "list", 1)
    prompt = 2 * NUM_PROMPT
    assert found["usage"] == {
        "prompt_tokens": prompt, "completion_tokens": 2, "total_tokens": prompt + 2, "prompt_tokens_details": None
    }  # fmt: skip


async def test_the_likelihood_among_all_tokens_and_items_before_the_query() -> None:
    body = {"query": "q", "items": ["a"], "label_token_ids": [5], "apply_softmax": False, "item_first": True}
    found, server = await score(body)
    assert found["data"][0]["score"] == pytest.approx(0.6)
    assert server.submits[0].prompt == JoinedPrompt((TextPrompt("a", False), TextPrompt("q", True)))
    assert (await score({**body, "apply_softmax": True}))[0]["data"][0]["score"] == 1.0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": []}, "items"),
        ({"items": [3]}, "items"),
        ({"items": [[-1]]}, "items"),
        ({"items": [""], "query": ""}, "items"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [1 << 30]}, "label_token_ids"),
        ({"label_token_ids": list(range(129))}, "label_token_ids"),
        ({"query": None}, "query"),
        ({"query": [1 << 30]}, "query"),
        ({"priority": 3}, "priority"),
    ],
)
async def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    found, server = await score({"query": "q", "items": ["a"], "label_token_ids": [5], **fields}, 400)
    assert found["error"]["param"] == param
    assert server.submits == []
