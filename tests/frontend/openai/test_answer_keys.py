"""Answers have the keys of vLLM's, null or not, whole and streamed; OpenAI's client reads them without an AttributeError."""

import answer_keys
import pytest
from answering import HELLO, STOP, Json, asking, body, chunks, give, streamed, whole
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from parsing import RESOLVED

from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.response_fields import model_card

# Ours alone: the older name of reasoning, and the calls that vLLM leaves out where there are none.
OF_CALLS = {"tool_calls"}


def answered(ask: ParsedRequest) -> Json:
    answer, _ = whole(ask)
    give(answer, 0, [7], "Hé", STOP, logprobs=[HELLO] if ask.answer.logprobs >= 0 else None)
    return body(answer)


@pytest.mark.parametrize("more", [{}, {"logprobs": 1, "return_token_ids": True, "prompt_logprobs": 0}])
def test_a_whole_chat(more: Json) -> None:
    found = answered(asking(True, **more))
    (choice,) = found["choices"]
    assert set(found) == answer_keys.CHAT_ANSWER
    assert set(choice) == answer_keys.CHAT_CHOICE
    assert set(choice["message"]) == answer_keys.CHAT_MESSAGE - OF_CALLS
    assert set(found["usage"]) == answer_keys.USAGE
    assert set(found["usage"]["prompt_tokens_details"]) == answer_keys.PROMPT_DETAILS


@pytest.mark.parametrize("more", [{}, {"logprobs": 1, "return_token_ids": True, "prompt_logprobs": 0}])
def test_a_whole_completion(more: Json) -> None:
    found = answered(asking(False, **more))
    assert set(found) == answer_keys.COMPLETION_ANSWER
    assert set(found["choices"][0]) == answer_keys.COMPLETION_CHOICE


def test_what_code_made_for_vllm_reads_is_there_for_openais_client() -> None:
    answer = ChatCompletion.model_validate(answered(asking(True)), strict=True)
    message = answer.choices[0].message
    nothing = [message.refusal, message.annotations, message.audio, message.function_call, message.tool_calls]
    nothing += [answer.service_tier, answer.system_fingerprint]
    for holder, names in (
        (message, ["reasoning"]),
        (answer.choices[0], ["token_ids", "stop_reason"]),
        (answer, ["prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params"]),
    ):
        nothing += [getattr(holder, name) for name in names]
    assert nothing == [None] * len(nothing)
    text = Completion.model_validate(answered(asking(False)), strict=True).choices[0]
    for name in ("prompt_logprobs", "prompt_token_ids", "token_ids", "stop_reason"):
        assert getattr(text, name) is None


def test_a_streamed_chat() -> None:
    answer, events, _ = streamed(asking(True, include_usage=True))
    for text in ("Hé", " w"):
        give(answer, 0, [7], text)
    give(answer, 0, [9], "", STOP)
    first, *others, last = chunks(events, True)
    assert set(first) == answer_keys.CHAT_FIRST_CHUNK
    assert set(first["choices"][0]) == answer_keys.CHAT_FIRST_CHUNK_CHOICE | {"token_ids"}
    assert len(others) == 2
    for chunk in others:
        assert set(chunk) == answer_keys.CHAT_CHUNK
        assert set(chunk["choices"][0]) == answer_keys.CHAT_CHUNK_CHOICE
    assert set(last) == answer_keys.CHAT_CHUNK
    assert set(last["choices"][0]) == answer_keys.CHAT_LAST_CHUNK_CHOICE
    (usage,) = chunks([answer.last_events().partition(b"\n\n")[0] + b"\n\n"], True)
    assert set(usage) == answer_keys.USAGE_CHUNK
    seen = [ChatCompletionChunk.model_validate(chunk, strict=True).choices[0] for chunk in (first, *others, last)]
    assert [choice.token_ids for choice in seen] == [None] * 4  # type: ignore[attr-defined]


def test_a_streamed_completion() -> None:
    answer, events, _ = streamed(asking(False, include_usage=True))
    give(answer, 0, [7], "Hé")
    give(answer, 0, [9], " w", STOP)
    for chunk in chunks(events, False):
        assert set(chunk) == answer_keys.COMPLETION_CHUNK
        assert set(chunk["choices"][0]) == answer_keys.COMPLETION_CHUNK_CHOICE


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("include_usage", [False, True])
def test_the_fingerprint_comes_with_whole_answers_and_last_chunks(is_chat: bool, include_usage: bool) -> None:
    answer, _ = whole(asking(is_chat))
    answer.fingerprint = "fp"
    give(answer, 0, [7], "Hé", STOP)
    assert body(answer)["system_fingerprint"] == "fp"
    stream, events, _ = streamed(asking(is_chat, include_usage=include_usage))
    stream.fingerprint = "fp"
    give(stream, 0, [7], "Hé")
    give(stream, 0, [9], " w", STOP)
    usage = [event + b"\n\n" for event in stream.last_events().split(b"\n\n") if b"usage" in event]
    found = [chunk.get("system_fingerprint") for chunk in chunks([*events, *usage], is_chat)]
    assert (found[-1], set(found[:-1])) == ("fp", {None})


def test_return_prompt_text_comes_with_the_first_chunk() -> None:
    answer, events, _ = streamed(asking(True, return_prompt_text=True))
    give(answer, 0, [7], "Hé", STOP)
    assert [chunk.get("prompt_text") for chunk in chunks(events, True)] == ["Hi you", None]


def test_a_model_card() -> None:
    card = model_card("tiny", RESOLVED)
    assert set(card) == answer_keys.MODEL_CARD
    (permission,) = card["permission"]
    assert set(permission) == answer_keys.MODEL_PERMISSION
    assert Model.model_validate(card, strict=True).id == "tiny"
    assert (card["root"], card["max_model_len"]) == (RESOLVED.model_path, RESOLVED.max_model_len)
