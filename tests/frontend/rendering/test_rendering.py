"""Render, derender, tokens in and out, several conversations: against a frontend without a mesh."""

import json
from typing import Any

import httpx
import msgspec
import pytest
from scripted import NUM_PROMPT, Scripted

from meshlm.frontend.rendering.schema import GenerateRequest
from meshlm.frontend.rendering.tokens import completion_of
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.edges.text import Detokenize, DetokenizeReply, TextPrompt, Tokenize, TokenizeReply, TokenPrompt
from meshlm.protocol.extras import find_extra
from meshlm.protocol.grammar import Grammar
from meshlm.protocol.wire.columns import ints, pack_i32

ECHO = {"prompt": "a", "echo": True}
USER = {"role": "user", "content": "hi"}


class Texts(Scripted):
    """Its tokens are letters, by their numbers."""

    async def ask(self, message: Tokenize | Detokenize) -> TokenizeReply | DetokenizeReply:
        if isinstance(message, Detokenize):
            ids = list(ints(message.token_ids))
            if message.each:
                return DetokenizeReply(
                    message.handle, texts=tuple(map(chr, ids)), token_bytes=tuple(bytes((token,)) for token in ids)
                )
            return DetokenizeReply(message.handle, bytes(ids).decode(), pack_i32([1] * len(ids)))
        text = message.prompt.text if isinstance(message.prompt, TextPrompt) else "chat"
        places = pack_i32([place for at in range(len(text)) for place in (at, at + 1)]) if message.want_offsets else b""
        mask = b"\1\0\0\1" if message.want_assistant_mask else b""  # of "chat"
        return TokenizeReply(message.handle, pack_i32(list(text.encode())), (), places, 2048, assistant_mask=mask)


async def post(server: Scripted, path: str, body: Any, status: int = 200) -> Any:
    transport = httpx.ASGITransport(app=server.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.text if answer.headers["content-type"].startswith("text/event-stream") else answer.json()


async def test_a_rendered_prompt_is_taken_as_it_is() -> None:
    server = Texts()
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
    server = Texts()
    (rendered,) = await post(server, "/v1/completions/render", {"prompt": "ab", "structured_outputs": constraint})
    await post(server, "/inference/v1/generate", rendered)
    await post(server, "/v1/completions", {"prompt": list(b"ab"), "structured_outputs": constraint})
    one, other = (find_extra(submit.extras, Grammar) for submit in server.submits)
    assert one is not None
    assert one == other


async def test_all_that_decides_the_tokens_is_rendered() -> None:
    """Not least what no SamplingParams of the client's has: a lenient schema, a budget of reasoning, arguments of processors."""
    server = Texts(ServerConfig(reasoning_parser="deepseek_r1", responses_store="off"))
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
    server = Texts(None, msgspec.structs.replace(Texts().resolved, logits_processors=("a.b:C",)))
    (rendered,) = await post(server, "/v1/completions/render", {"prompt": "ab", "vllm_xargs": {"a": 1}})
    assert rendered["sampling_params"]["extra_args"] == {"a": 1}
    body = msgspec.convert({"token_ids": [1], "sampling_params": rendered["sampling_params"]}, GenerateRequest)
    assert completion_of(body)["vllm_xargs"] == {"a": 1}


async def test_the_number_of_drafts_is_rendered() -> None:
    server = Texts(None, msgspec.structs.replace(Texts().resolved, num_speculative_tokens=3))
    for wanted, rendered in ((2, 2), (0, 0), (3, None), (None, None)):
        (one,) = await post(server, "/v1/completions/render", {"prompt": "ab", "num_speculative_tokens": wanted})
        assert one["sampling_params"].get("num_speculative_tokens") == rendered


async def test_a_constraint_behind_reasoning_cannot_be_rendered() -> None:
    server = Texts(ServerConfig(reasoning_parser="deepseek_r1"))
    body = {"messages": [USER], "response_format": {"type": "json_object"}}
    error = (await post(server, "/v1/chat/completions/render", body, 400))["error"]
    assert error["param"] == "response_format"


async def test_a_rendered_chat() -> None:
    found = await post(Texts(), "/v1/chat/completions/render", {"messages": [USER], "stream": True, "ignore_eos": True})
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
        "max_tokens": Texts().resolved.max_model_len - 4,
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
    error = (await post(Texts(), "/v1/completions/render", body, 400))["error"]
    assert error["param"] == name
    assert name in error["message"]


async def test_a_truncated_prompt_is_rendered_as_it_is_cut() -> None:
    for side, left in (("left", b"cd"), ("right", b"ab")):
        asked = {"prompt": "abcd", "truncate_prompt_tokens": 2, "truncation_side": side, "return_token_offsets": True}
        (found,) = await post(Texts(), "/v1/completions/render", asked)
        assert found["token_ids"] == list(left)
        assert found["token_offsets"][0][0] == "abcd".index(left.decode())


async def test_what_the_assistant_wrote_is_told_and_cut_with_the_prompt() -> None:
    chat = {"messages": [USER], "return_assistant_tokens_mask": True}
    found = await post(Texts(), "/v1/chat/completions/render", chat)
    assert found["assistant_tokens_mask"] == [1, 0, 0, 1]
    cut = await post(Texts(), "/v1/chat/completions/render", {**chat, "truncate_prompt_tokens": 3})
    assert (cut["token_ids"], cut["assistant_tokens_mask"]) == (list(b"hat"), [0, 0, 1])
    plain = await post(Texts(), "/v1/chat/completions/render", {"messages": [USER]})
    assert plain["assistant_tokens_mask"] is None


async def test_tokens_in_and_out() -> None:
    server = Texts()
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
    server = Texts()
    await post(server, "/inference/v1/generate", {"token_ids": [5], "sampling_params": {"zeta": 1}})
    assert server.ignored_fields == ("sampling_params.zeta",)
    for wrong, name in (({"temperature": -1}, "temperature"), ({"n": 0}, "n")):
        body = {"token_ids": [5], "sampling_params": wrong}
        assert (await post(server, "/inference/v1/generate", body, 400))["error"]["param"] == name
    body = {"token_ids": [5], "sampling_params": {}, "kv_transfer_params": {"do_remote_decode": True}}
    assert (await post(server, "/inference/v1/generate", body, 400))["error"]["param"] == "kv_transfer_params"


async def test_derendered_tokens_are_an_answer() -> None:
    server = Texts(ServerConfig(reasoning_parser="deepseek_r1"))
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
    server = Texts(ServerConfig(reasoning_parser="deepseek_r1", responses_store="off"))
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
    server = Texts()
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
    server = Texts()
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
    assert (await post(Texts(), f"/v1/{path}/derender", body, 400))["error"]["param"] == name


async def test_several_conversations_have_a_choice_each() -> None:
    server = Scripted()
    body = {"messages": [[USER], [{"role": "user", "content": "ho"}]], "max_tokens": 5, "return_token_ids": True}
    found = await post(server, "/v1/chat/completions/batch", body)
    assert [(one["index"], one["message"]["content"]) for one in found["choices"]] == [
        (0, "Hello you"),
        (1, "Hello you"),
    ]
    assert found["usage"]["prompt_tokens"] == 2 * NUM_PROMPT
    assert found["prompt_token_ids"] is None
    prompts = [getattr(submit.prompt, "messages_json", b"") for submit in server.submits]
    assert [b'"hi"' in prompts[0], b'"ho"' in prompts[1]] == [True, True]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"messages": [USER]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [[USER], []]}, "messages"),
        ({"messages": [[USER], [{"role": "user"}]]}, "messages"),
        ({"messages": [[USER]], "n": 2}, "n"),
        ({"messages": [[USER]], "stream": True}, "stream"),
        ({"messages": [[USER]], "use_beam_search": True}, "use_beam_search"),
        ({"messages": [[USER]], "tools": [{"type": "function"}]}, "tools"),
    ],
)
async def test_what_a_batch_of_conversations_cannot_have(fields: dict[str, Any], name: str) -> None:
    assert (await post(Scripted(), "/v1/chat/completions/batch", fields, 400))["error"]["param"] == name


async def test_invocations_are_what_their_fields_say() -> None:
    server = Scripted()
    chat = await post(server, "/invocations", {"messages": [USER]})
    assert (chat["object"], chat["choices"][0]["message"]["content"]) == ("chat.completion", "Hello you")
    text = await post(server, "/invocations", {"prompt": "a"})
    assert text["object"] == "text_completion"
    assert "messages (/v1/chat/completions)" in (await post(server, "/invocations", {"x": 1}, 400))["error"]["message"]
    assert (await post(server, "/invocations", {"prompt": "a", "n": 0}, 400))["error"]["param"] == "n"


async def test_information_needs_its_flags_and_tells_no_key() -> None:
    server = Scripted(ServerConfig(server_dev_mode=True, enable_tokenizer_info_endpoint=True, api_key=("s3cret",)))
    transport = httpx.ASGITransport(app=server.app)
    headers = {"Authorization": "Bearer s3cret"}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        text = (await client.get("/server_info")).json()
        found = (await client.get("/server_info?config_format=json")).json()
        assert isinstance(text["meshlm_config"], str)
        assert isinstance(text["vllm_config"], str)
        theirs = found["vllm_config"]  # what TRL's client and vLLM's own tests read
        assert theirs["model_config"]["logprobs_mode"] == "raw_logprobs"
        assert theirs["model_config"]["max_logprobs"] == 20
        assert theirs["parallel_config"]["data_parallel_size"] == 1
        assert theirs["weight_transfer_config"] is None
        assert found["meshlm_config"]["server"]["api_key"] == "***"
        assert "s3cret" not in json.dumps([text, found])
        assert (await client.get("/server_info?config_format=x")).status_code == 400
        assert (await client.get("/tokenizer_info")).json()["tokenizer_class"]
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=Scripted().app), base_url="http://localhost"
    ) as client:
        assert "--server-dev-mode" in (await client.get("/server_info")).text
        assert "--enable-tokenizer-info-endpoint" in (await client.get("/tokenizer_info")).text
