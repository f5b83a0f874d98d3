"""Tokens that are told as an answer: against a frontend without a mesh."""

from typing import Any

import pytest
from letters import Letters
from scripted import post

from meshlm.protocol.config import ServerConfig

ECHO = {"prompt": "a", "echo": True}
USER = {"role": "user", "content": "hi"}


async def test_derendered_tokens_are_an_answer() -> None:
    server = Letters(ServerConfig(reasoning_parser="deepseek_r1"))
    thought = list(b"so</think>yes")
    generated = {"request_id": "r", "choices": [{"index": 0, "token_ids": thought, "finish_reason": "length"}]}
    body = {"generate_response": generated, "prompt_tokens": 4, "chat_request": {"messages": [USER]}}
    found = await post(server, "/v1/chat/completions/derender", body)
    (choice,) = found["choices"]
    assert (found["id"], choice["message"]["reasoning"], choice["message"]["content"]) == ("r", "so", "yes")
    assert (choice["finish_reason"], found["usage"]["total_tokens"]) == ("length", 4 + len(thought))
    plain = {"generate_responses": [generated, {**generated, "choices": [{"index": 0, "token_ids": list(b"ab")}]}]}
    found = await post(server, "/v1/completions/derender", {**plain, "prompt_tokens": [1, 2]})
    assert [(one["text"], one["index"]) for one in found["choices"]] == [("so</think>yes", 0), ("ab", 1)]
    assert found["usage"]["prompt_tokens"] == 3


def generated(text: str, reason: str = "stop", **fields: Any) -> dict[str, Any]:
    return {
        "request_id": "r",
        "choices": [{"index": 0, "token_ids": list(text.encode()), "finish_reason": reason}],
        **fields,
    }


async def test_without_the_request_all_text_is_content() -> None:
    """Nothing says then that the model was to reason or to call."""
    server = Letters(ServerConfig(reasoning_parser="deepseek_r1", responses_store="off"))
    found = await post(server, "/v1/chat/completions/derender", {"generate_response": generated("yes")})
    assert found["choices"][0]["message"]["content"] == "yes"
    assert found["choices"][0]["message"]["reasoning"] is None


@pytest.mark.parametrize(
    ("fields", "text", "reason", "shown", "stop_reason"),
    [
        ({"stop": ["zz", "lo"]}, "hello", "stop", "hel", "lo"),
        ({"stop": ["lo"], "include_stop_str_in_output": True}, "hello", "stop", "hello", "lo"),
        ({"stop": ["lo"]}, "hello", "length", "hello", None),
        ({"stop": ["he"], "min_tokens": 4}, "hello", "stop", "hello", None),  # it was not what has ended the text
        ({"stop_token_ids": [ord("o")]}, "hello", "stop", "hell", ord("o")),
        ({}, "hell\2", "stop", "hell", None),  # the model's end
        ({"ignore_eos": True}, "hell\2", "stop", "hell\2", None),
    ],
)
async def test_what_ends_a_text_is_no_part_of_it(
    fields: dict[str, Any], text: str, reason: str, shown: str, stop_reason: object
) -> None:
    server = Letters()
    body = {"generate_response": generated(text, reason), "chat_request": {"messages": [USER], **fields}}
    (choice,) = (await post(server, "/v1/chat/completions/derender", body))["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == (shown, stop_reason)
    plain = {"generate_responses": [generated(text, reason)], "completion_request": {"prompt": "a", **fields}}
    (choice,) = (await post(server, "/v1/completions/derender", plain))["choices"]
    assert (choice["text"], choice["stop_reason"]) == (shown, stop_reason)


async def test_what_came_with_the_tokens_is_passed_on() -> None:
    """Log-probabilities name tokens by their texts then."""

    def entry(token: int | str) -> dict[str, Any]:
        return {"token": f"token_id:{token}" if isinstance(token, int) else token, "logprob": -0.5, "bytes": None}

    positions = [{**entry(ord(one)), "top_logprobs": [entry(ord(one)), entry("own")]} for one in "ab"]
    more: dict[str, Any] = {"prompt_logprobs": [None, {"5": {"logprob": -1.0, "rank": 1, "decoded_token": "x"}}]}
    given = generated("ab", **more, kv_transfer_params={"a": 1}, ec_transfer_params=None)
    given["choices"][0]["logprobs"] = {"content": positions}
    server = Letters()
    asked = {"messages": [USER], "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    found = await post(server, "/v1/chat/completions/derender", {"generate_response": given, "chat_request": asked})
    assert found["kv_transfer_params"] == {"a": 1}
    assert found["prompt_logprobs"] == more["prompt_logprobs"]
    assert found["prompt_token_ids"] is None
    (choice,) = found["choices"]
    assert choice["token_ids"] == [97, 98]
    named = [{"token": name, "logprob": -0.5, "bytes": list(name.encode())} for name in ("a", "b", "own")]
    assert choice["logprobs"] == {
        "content": [
            {**named[0], "top_logprobs": [named[0], named[2]]},
            {**named[1], "top_logprobs": [named[1], named[2]]},
        ]
    }
    found = await post(server, "/v1/completions/derender", {"generate_responses": [generated("z"), given]})
    first, second = found["choices"]
    assert found["kv_transfer_params"] == {"a": 1}
    assert (first["prompt_logprobs"], second["prompt_logprobs"]) == (None, more["prompt_logprobs"])
    assert second["logprobs"]["tokens"] == ["a", "b"]
    assert second["logprobs"]["text_offset"] == [0, 1]
    assert second["logprobs"]["top_logprobs"][0] == {"a": -0.5, "own": -0.5}


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("chat/completions", {"generate_response": {"choices": []}}, "choices"),
        ("chat/completions", {"generate_response": {"choices": [{"index": 0, "token_ids": [1] * 9999}]}}, "token_ids"),
        ("chat/completions", {"generate_response": {"choices": [{"index": 0, "token_ids": []}]}}, "token_ids"),
        ("chat/completions", {"generate_response": {"choices": [{"index": 0, "token_ids": None}]}}, "token_ids"),
        (
            "completions",
            {"generate_responses": [{"choices": [{"index": 0, "token_ids": [97]}]}], "completion_request": ECHO},
            "echo",
        ),
        ("completions", {"generate_responses": []}, "generate_responses"),
        ("completions", {"generate_responses": [{"choices": []}], "prompt_tokens": [1, 2]}, "prompt_tokens"),
    ],
)
async def test_what_cannot_be_derendered(path: str, body: dict[str, Any], name: str) -> None:
    assert (await post(Letters(), f"/v1/{path}/derender", body, 400))["error"]["param"] == name
