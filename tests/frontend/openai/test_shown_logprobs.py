"""Which log-probabilities an answer shows: against a frontend without a mesh, whose model says what the test wants."""

import json
from typing import Any

import pytest
from scripted import Scripted, post

from meshlm.protocol.config import ServerConfig
from meshlm.protocol.edges.text import PositionLogprobs, TokenLogprob

USER = {"role": "user", "content": "hi"}


def entry(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0, 1, f"<{token}>", b"")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("sampling", "top"),
    [
        ({"logprobs": 0}, ["token_id:9"]),
        ({"logprobs": 1}, ["token_id:3"]),
        ({"logprobs": 1, "logprob_token_ids": [3]}, ["token_id:9", "token_id:3"]),
        ({"logprobs": 1, "logprob_token_ids": [9]}, ["token_id:9"]),
    ],
)
async def test_the_sampled_token_is_among_those_that_are_asked_for(
    sampling: dict[str, Any], top: list[str], stream: bool
) -> None:
    server = Scripted()
    likeliest = () if sampling["logprobs"] == 0 else (9 if sampling.get("logprob_token_ids") == [9] else 3,)
    server.pieces = ("a",)
    server.logprobs = (PositionLogprobs(entry(9), 1, tuple(entry(token) for token in likeliest)),)
    body = {"token_ids": [5, 6], "sampling_params": sampling, "stream": stream}
    answer = await post(server, "/inference/v1/generate", body)
    events = (
        [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")] if stream else [answer]
    )
    found = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
    assert [token["token"] for token in found[0]["content"][0]["top_logprobs"]] == top
    assert found[0]["content"][0]["token"] == "token_id:9"


async def test_a_chat_shows_the_sampled_token_beside_certain_ones() -> None:
    server = Scripted()
    server.pieces = ("a",)
    server.logprobs = (PositionLogprobs(entry(9), 1, (entry(3),)),)
    chat = {"messages": [USER], "logprobs": True, "top_logprobs": 1}
    for asked, top in (({}, [3]), ({"logprob_token_ids": [3]}, [9, 3])):
        for stream in (False, True):
            answer = await post(server, "/v1/chat/completions", {**chat, **asked, "stream": stream})
            lines = answer.splitlines() if stream else [f"data: {json.dumps(answer)}"]
            choices = [json.loads(line[6:])["choices"] for line in lines if line.startswith("data: {")]
            (found,) = [choice["logprobs"] for some in choices for choice in some if choice.get("logprobs")]
            assert [token["token"] for token in found["content"][0]["top_logprobs"]] == [f"<{token}>" for token in top]


async def test_all_of_the_vocabulary_can_be_asked_for_where_the_server_allows_it() -> None:
    """--max-logprobs -1."""
    generate = {"token_ids": [5], "sampling_params": {"logprobs": -1}}
    for path, body in (("/v1/completions", {"prompt": "a", "logprobs": -1}), ("/inference/v1/generate", generate)):
        server = Scripted(ServerConfig(max_logprobs=-1))
        await post(server, path, body)
        assert server.submits[0].sampling.logprobs == Scripted().resolved.spec.vocab_size
        error = (await post(Scripted(), path, body, 400))["error"]
        assert "--max-logprobs" in error["message"]
