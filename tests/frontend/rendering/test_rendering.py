"""Prompts that are rendered, tokens in and out: against a frontend without a mesh."""

import json
from typing import Any

import msgspec
import pytest
from letters import Letters
from scripted import NUM_PROMPT, post

from meshlm.frontend.rendering.schema import GenerateRequest
from meshlm.frontend.rendering.tokens import completion_of
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.edges.text import TokenPrompt
from meshlm.protocol.extras import find_extra
from meshlm.protocol.grammar import Grammar

USER = {"role": "user", "content": "hi"}


async def test_a_rendered_prompt_is_taken_as_it_is() -> None:
    server = Letters()
    asked = {
        "prompt": ["ab", "cde"],
        "temperature": 0.5,
        "stop": ["x"],
        "seed": 3,
        "logit_bias": {"5": 1},
        "max_tokens": 7,
        "return_token_offsets": True,
        "bad_words": ["darn"],
        "logprobs": 2,
        "stop_token_ids": [9],
    }
    first, second = await post(server, "/v1/completions/render", asked)
    assert (first["token_ids"], second["token_ids"]) == (list(b"ab"), list(b"cde"))
    assert second["token_offsets"] == [[0, 1], [1, 2], [2, 3]]
    assert first["sampling_params"]["max_tokens"] == 7
    await post(server, "/inference/v1/generate", first)
    await post(server, "/v1/completions", {**asked, "prompt": list(b"ab"), "return_token_offsets": None})
    rendered, direct = server.submits
    assert isinstance(rendered.prompt, TokenPrompt)
    for name in ("prompt", "sampling", "text", "max_tokens", "cap_max_tokens"):
        assert getattr(rendered, name) == getattr(direct, name), name


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}, "disable_additional_properties": True},
        {"regex": "[a-c]+"},
        {"choice": ["yes", "no"]},
        {"grammar": 'root ::= "a"+'},
        {"json_object": True},
        {"json": {"type": "string", "minLength": 1, "not": {"const": "a"}}, "strict": False},
    ],
)
async def test_a_rendered_constraint_is_the_same_one(constraint: dict[str, Any]) -> None:
    server = Letters()
    (rendered,) = await post(server, "/v1/completions/render", {"prompt": "ab", "structured_outputs": constraint})
    await post(server, "/inference/v1/generate", rendered)
    await post(server, "/v1/completions", {"prompt": list(b"ab"), "structured_outputs": constraint})
    one, other = (find_extra(submit.extras, Grammar) for submit in server.submits)
    assert one is not None
    assert one == other


async def test_all_that_decides_the_tokens_is_rendered() -> None:
    """Not least what no SamplingParams of the client's has: a lenient schema, a budget of reasoning, arguments of processors."""
    server = Letters(ServerConfig(reasoning_parser="deepseek_r1", responses_store="off"))
    lenient = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}, "strict": False}}
    for fields in (
        {"seed": 1, "timeout": 5.0, "min_tokens": 2},
        {"seed": 1, "response_format": lenient},
        {"seed": 1, "thinking_token_budget": 7},
    ):
        server.submits.clear()
        (rendered,) = await post(server, "/v1/completions/render", {"prompt": "ab", **fields})
        await post(server, "/inference/v1/generate", rendered)
        await post(server, "/v1/completions", {"prompt": list(b"ab"), **fields, "max_tokens": 16})
        one, other = server.submits
        assert one.deadline_s is None or abs(one.deadline_s - other.deadline_s) < 5
        assert (one.deadline_s is None) == (other.deadline_s is None)
        grammars = [find_extra(submit.extras, Grammar) for submit in (one, other)]
        if grammars[0] is not None:
            assert grammars[1] is not None
            assert msgspec.structs.replace(grammars[0], param="") == msgspec.structs.replace(grammars[1], param="")
        same = [submit.sampling for submit in (one, other)]
        assert same[0] == same[1]
        assert (grammars[0] is None) == ("timeout" in fields)


async def test_the_arguments_of_logits_processors_are_rendered() -> None:
    """By SamplingParams' name of them."""
    server = Letters(None, msgspec.structs.replace(Letters().resolved, logits_processors=("a.b:C",)))
    (rendered,) = await post(server, "/v1/completions/render", {"prompt": "ab", "vllm_xargs": {"a": 1}})
    assert rendered["sampling_params"]["extra_args"] == {"a": 1}
    body = msgspec.convert({"token_ids": [1], "sampling_params": rendered["sampling_params"]}, GenerateRequest)
    assert completion_of(body)["vllm_xargs"] == {"a": 1}


async def test_the_number_of_drafts_is_rendered() -> None:
    server = Letters(None, msgspec.structs.replace(Letters().resolved, num_speculative_tokens=3))
    for wanted, rendered in ((2, 2), (0, 0), (3, None), (None, None)):
        (one,) = await post(server, "/v1/completions/render", {"prompt": "ab", "num_speculative_tokens": wanted})
        assert one["sampling_params"].get("num_speculative_tokens") == rendered


async def test_a_constraint_behind_reasoning_cannot_be_rendered() -> None:
    server = Letters(ServerConfig(reasoning_parser="deepseek_r1"))
    body = {"messages": [USER], "response_format": {"type": "json_object"}}
    error = (await post(server, "/v1/chat/completions/render", body, 400))["error"]
    assert error["param"] == "response_format"


async def test_a_rendered_chat() -> None:
    found = await post(
        Letters(), "/v1/chat/completions/render", {"messages": [USER], "stream": True, "ignore_eos": True}
    )
    assert (found["token_ids"], found["stream"], found["token_offsets"]) == (list(b"chat"), True, None)
    assert found["request_id"].startswith("chatcmpl-")
    assert found["sampling_params"] == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "min_tokens": 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        "max_tokens": Letters().resolved.max_model_len - 4,
    }


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "echo": True, "max_tokens": 0}, "echo"),
        ({"prompt": "a", "max_tokens": 1 << 20}, "max_tokens"),
        ({"prompt": "a" * (1 << 14)}, "prompt"),
        ({"prompt": [1000000]}, "prompt"),
    ],
)
async def test_what_cannot_be_rendered(body: dict[str, Any], name: str) -> None:
    error = (await post(Letters(), "/v1/completions/render", body, 400))["error"]
    assert error["param"] == name
    assert name in error["message"]


async def test_a_truncated_prompt_is_rendered_as_it_is_cut() -> None:
    for side, left in (("left", b"cd"), ("right", b"ab")):
        asked = {"prompt": "abcd", "truncate_prompt_tokens": 2, "truncation_side": side, "return_token_offsets": True}
        (found,) = await post(Letters(), "/v1/completions/render", asked)
        assert found["token_ids"] == list(left)
        assert found["token_offsets"][0][0] == "abcd".index(left.decode())


async def test_what_the_assistant_wrote_is_told_and_cut_with_the_prompt() -> None:
    chat = {"messages": [USER], "return_assistant_tokens_mask": True}
    found = await post(Letters(), "/v1/chat/completions/render", chat)
    assert found["assistant_tokens_mask"] == [1, 0, 0, 1]
    cut = await post(Letters(), "/v1/chat/completions/render", {**chat, "truncate_prompt_tokens": 3})
    assert (cut["token_ids"], cut["assistant_tokens_mask"]) == (list(b"hat"), [0, 0, 1])
    plain = await post(Letters(), "/v1/chat/completions/render", {"messages": [USER]})
    assert plain["assistant_tokens_mask"] is None


async def test_tokens_in_and_out() -> None:
    server = Letters()
    asked = {"token_ids": [5, 6], "sampling_params": {"temperature": 0, "ignore_eos": True, "detokenize": False}}
    found = await post(server, "/inference/v1/generate", {**asked, "request_id": "mine"})
    (choice,) = found["choices"]
    assert found["request_id"] == "mine"
    assert (choice["token_ids"], choice["finish_reason"], choice["logprobs"]) == ([0, 1], "stop", None)
    assert found["usage"]["prompt_tokens"] == NUM_PROMPT
    assert server.submits[0].max_tokens is None, "what the context leaves"
    assert server.submits[0].sampling.eos_token_ids == ()
    assert server.ignored_fields == ()
    text = await post(
        server, "/inference/v1/generate", {**asked, "stream": True, "stream_options": {"include_usage": True}}
    )
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert [choice["token_ids"] for event in events for choice in event["choices"]] == [[0], [1], []]
    assert events[-1]["usage"]["completion_tokens"] == 2
    assert text.endswith("data: [DONE]\n\n")


async def test_unknown_sampling_params_are_named_and_wrong_ones_refused() -> None:
    server = Letters()
    await post(server, "/inference/v1/generate", {"token_ids": [5], "sampling_params": {"zeta": 1}})
    assert server.ignored_fields == ("sampling_params.zeta",)
    for wrong, name in (({"temperature": -1}, "temperature"), ({"n": 0}, "n")):
        body = {"token_ids": [5], "sampling_params": wrong}
        assert (await post(server, "/inference/v1/generate", body, 400))["error"]["param"] == name
    body = {"token_ids": [5], "sampling_params": {}, "kv_transfer_params": {"do_remote_decode": True}}
    assert (await post(server, "/inference/v1/generate", body, 400))["error"]["param"] == "kv_transfer_params"
