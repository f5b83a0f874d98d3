"""What the client reads as events, text and chat: logprobs, usage, token ids, echo, n > 1, errors."""

import json

import pytest
from answer_keys import COMPLETION_CHUNK_CHOICE
from answering import (
    BOTH_TEXT,
    HELLO,
    HELLO_CHAT,
    LENGTH,
    OF_PROMPT,
    PROMPT_IDS,
    STOP,
    WORLD,
    WORLD_CHAT,
    Json,
    asking,
    body,
    chunks,
    echoed_logprobs,
    give,
    logprob,
    streamed,
    usage,
    whole,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.protocol.edges.text import Accepted, Finished, PositionLogprobs
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle


def test_streamed_chat() -> None:
    answer, events, ends = streamed(asking(True))
    give(answer, 0, [7], "Hé", num_cached=1)
    give(answer, 0, [9], "")  # half a character
    give(answer, 0, [9], ' "w"\n')
    give(answer, 0, [2], "", Finished(0, FinishReason.STOP, 2))
    assert ends.count == 1
    role, *words, last = [chunk["choices"] for chunk in chunks(events, True)]
    nothing = {"logprobs": None, "finish_reason": None, "token_ids": None}
    assert role == [{"index": 0, "delta": {"role": "assistant", "content": ""}, **nothing}]
    assert words == [
        [{"index": 0, "delta": {"content": "Hé"}, **nothing}],
        [{"index": 0, "delta": {"content": ""}, **nothing}],  # a token came
        [{"index": 0, "delta": {"content": ' "w"\n'}, **nothing}],
    ]
    assert last == [{"index": 0, "delta": {}, **nothing, "finish_reason": "stop", "stop_reason": 2}]
    assert answer.last_events() == b"data: [DONE]\n\n"


def test_streamed_text() -> None:
    answer, events, ends = streamed(asking(False))
    give(answer, 0, [7], "Hé")
    give(answer, 0, [9], " w", LENGTH)
    assert ends.count == 1
    nothing = dict.fromkeys(COMPLETION_CHUNK_CHOICE - {"index", "text"})
    assert [chunk["choices"] for chunk in chunks(events, False)] == [
        [{"index": 0, "text": "Hé", **nothing}],
        [{"index": 0, "text": " w", **nothing, "finish_reason": "length"}],
    ]


def test_streamed_chat_ends_with_its_last_words() -> None:
    answer, events, _ = streamed(asking(True))
    give(answer, 0, [7], "Hé", LENGTH)
    role, last = [chunk["choices"][0] for chunk in chunks(events, True)]
    assert role["delta"] == {"role": "assistant", "content": ""}
    assert (last["delta"], last["finish_reason"]) == ({"content": "Hé"}, "length")


@pytest.mark.parametrize("is_chat", [False, True])
def test_streamed_usage_at_the_end(is_chat: bool) -> None:
    answer, events, _ = streamed(asking(is_chat, include_usage=True, num_choices=2, num_returned=2))
    for index in (0, 1):
        give(answer, index, [7], "Hé", num_cached=1)
        give(answer, index, [9], "", LENGTH)
    assert all("usage" not in chunk for chunk in chunks(events, is_chat))
    last, done = answer.last_events().split(b"\n\n")[:-1]
    assert done == b"data: [DONE]"
    (chunk,) = chunks([last + b"\n\n"], is_chat)
    assert (chunk["choices"], chunk["usage"]) == ([], usage(2, 4, 1))


@pytest.mark.parametrize("is_chat", [False, True])
def test_streamed_times_come_with_the_usage(is_chat: bool) -> None:
    answer, events, _ = streamed(asking(is_chat, include_usage=True))
    answer.tells_times = True
    give(answer, 0, [7], "Hé", num_cached=1)
    give(answer, 0, [9], "", LENGTH)
    assert not any("metrics" in chunk for chunk in chunks(events, is_chat))
    last, _ = answer.last_events().split(b"\n\n")[:-1]
    (chunk,) = chunks([last + b"\n\n"], is_chat)
    assert "mean_itl_ms" in chunk["metrics"]


@pytest.mark.parametrize("is_chat", [False, True])
def test_streamed_usage_all_the_time(is_chat: bool) -> None:
    answer, events, _ = streamed(asking(is_chat, continuous_usage=True, include_usage=True))
    give(answer, 0, [7], "Hé", num_cached=1)
    give(answer, 0, [9], " w")
    give(answer, 0, [2], "", STOP)
    found = [chunk["usage"] for chunk in chunks(events, is_chat)]
    assert [used["completion_tokens"] for used in found] == [*([0] if is_chat else []), 1, 2, 3]
    assert {(used["prompt_tokens"], used["total_tokens"] - used["completion_tokens"]) for used in found} == {(2, 2)}


def test_streamed_usage_of_a_chunk_is_its_choices() -> None:
    answer, events, _ = streamed(
        asking(False, continuous_usage=True, include_usage=True, num_choices=2, num_returned=2), num_prompts=2
    )
    for index in range(4):
        give(answer, index, [7, 8], "Hé")
        give(answer, index, [2], "", STOP)
    found = [chunk["usage"] for chunk in chunks(events, False)]
    assert [(used["prompt_tokens"], used["completion_tokens"]) for used in found] == [(2, 2), (2, 3)] * 4


@pytest.mark.parametrize("is_chat", [False, True])
def test_streamed_choices_do_not_mix(is_chat: bool) -> None:
    answer, events, ends = streamed(asking(is_chat, num_choices=2, num_returned=2), num_prompts=2)
    for index in (3, 0, 3, 2, 1, 0):
        give(answer, index, [index], f"{index},")
    for index in (1, 3, 0, 2):
        assert ends.count == 0
        give(answer, index, [9], f"{index}.", STOP)
    assert ends.count == 1
    texts, roles, reasons = dict.fromkeys(range(4), ""), list[int](), list[int]()
    for chunk in chunks(events, is_chat):
        (choice,) = chunk["choices"]
        if "role" in choice.get("delta", {}):
            assert texts[choice["index"]] == ""
            roles.append(choice["index"])
        texts[choice["index"]] += choice["delta"].get("content", "") if is_chat else choice["text"]
        if choice["finish_reason"]:
            reasons.append(choice["index"])
    assert texts == {0: "0,0,0.", 1: "1,1.", 2: "2,2.", 3: "3,3,3."}
    assert sorted(roles) == (list(range(4)) if is_chat else [])
    assert reasons == [1, 3, 0, 2]


def test_streamed_chat_logprobs() -> None:
    answer, events, _ = streamed(asking(True, logprobs=2))
    give(answer, 0, [7], "", logprobs=[HELLO])  # the text waits, the token does not
    give(answer, 0, [9], "Hé w", LENGTH, logprobs=[WORLD])
    _, first, last = [chunk["choices"][0] for chunk in chunks(events, True)]
    assert (first["delta"], first["logprobs"]) == ({"content": ""}, {"content": [HELLO_CHAT]})
    assert (last["delta"], last["logprobs"]) == ({"content": "Hé w"}, {"content": [WORLD_CHAT]})


def test_streamed_text_logprobs_are_the_whole_ones_in_parts() -> None:
    answer, events, _ = streamed(asking(False, logprobs=2))
    give(answer, 0, [7], "Hé", logprobs=[HELLO])
    give(answer, 0, [9], " w", LENGTH, logprobs=[WORLD])
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks(events, False)]
    assert {key: [item for part in found for item in part[key]] for key in BOTH_TEXT} == BOTH_TEXT


@pytest.mark.parametrize("is_chat", [False, True])
def test_streamed_token_ids(is_chat: bool) -> None:
    answer, events, _ = streamed(asking(is_chat, return_token_ids=True))
    give(answer, 0, [7], "")
    give(answer, 0, [9], "Hé")
    give(answer, 0, [2], "", STOP)
    first, *others = chunks(events, is_chat)
    place = first if is_chat else first["choices"][0]
    assert place["prompt_token_ids"] == PROMPT_IDS
    assert first["choices"][0]["token_ids"] == []
    assert [chunk["choices"][0]["token_ids"] for chunk in others] == [[7], [9], [2]]
    assert not any({**chunk, **chunk["choices"][0]}.get("prompt_token_ids") for chunk in others)


def test_streamed_echo_gives_each_choice_the_prompt_once() -> None:
    answer, events, _ = streamed(asking(False, echo=True, num_choices=2, num_returned=2))
    for index in (0, 1):
        give(answer, index, [7], " a", num_cached=0)
        give(answer, index, [9], " b", STOP)
    found = [chunk["choices"][0] for chunk in chunks(events, False)]
    for index in (0, 1):
        assert [c["text"] for c in found if c["index"] == index] == ["Hi you", " a", " b"]


def test_streamed_echo_offsets_point_into_the_text() -> None:
    answer, events, _ = streamed(asking(False, echo=True, logprobs=2))
    give(answer, 0, [7], "Hé", LENGTH, logprobs=[HELLO])
    assert chunks(events, False)[-1]["choices"][0]["logprobs"]["text_offset"] == [6]


@pytest.mark.parametrize("rows", [(1, 1, 1), (2, 1), (1, 2), (3,)])
def test_offsets_do_not_depend_on_how_many_tokens_a_row_brings(rows: tuple[int, ...]) -> None:
    """A stream that is taken up again gets its tokens in other rows. Tokens of parts of a character show nothing by themselves."""
    part, rest = PositionLogprobs(logprob(7, -0.25, ""), 0), PositionLogprobs(logprob(7, -0.25, "é"), 1)
    answer, events, _ = streamed(asking(False, logprobs=0))
    at = 0
    for count in rows:
        give(
            answer,
            0,
            [7, 7, 9][at : at + count],
            "é w" if at + count == 3 else "",
            logprobs=[part, rest, WORLD][at : at + count],
        )
        at += count
    found = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks(events, False)]
    assert [offset for offsets in found for offset in offsets] == [0, 0, 1]


def test_streamed_echo_with_logprobs_is_the_whole_one_in_parts() -> None:
    answer, events, _ = streamed(asking(False, echo=True, logprobs=2, prompt_logprobs=2))
    give(answer, 0, [7], "Hé", prompt_logprobs=OF_PROMPT, logprobs=[HELLO])
    give(answer, 0, [9], " w", STOP, logprobs=[WORLD])
    found = [chunk["choices"][0] for chunk in chunks(events, False)]
    assert [choice["text"] for choice in found] == ["Hi you", "Hé", " w"]
    expected = echoed_logprobs()
    assert {key: [item for choice in found for item in choice["logprobs"][key]] for key in expected} == expected
    assert not any("prompt_logprobs" in choice for choice in found)


def test_streamed_echo_with_logprobs_of_a_prompt_of_one_token() -> None:
    answer, events, _ = streamed(asking(False, echo=True, logprobs=1, prompt_logprobs=1))
    answer.accepted(answer.choices[0], Accepted((Handle(1),), 1, pack_i32([5]), "Hi", "Hi"))
    give(answer, 0, [7], "Hé", STOP, logprobs=[HELLO])
    prompt, output = [chunk["choices"][0]["logprobs"] for chunk in chunks(events, False)]
    assert prompt == {"tokens": ["Hi"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
    assert (output["tokens"], output["text_offset"]) == (["Hé"], [2])


@pytest.mark.parametrize("is_chat", [False, True])
def test_streamed_error_is_an_event_of_its_own(is_chat: bool) -> None:
    answer, events, ends = streamed(asking(is_chat, include_usage=True))
    give(answer, 0, [7], "Hé")
    before = len(events)
    give(answer, 0, [], "", Finished(0, FinishReason.ERROR, None, 1, "gone", ErrorKind.TIMEOUT))
    assert ends.count == 1
    assert len(events) == before
    error, done = answer.last_events().split(b"\n\n")[:-1]
    assert json.loads(error.removeprefix(b"data: ")) == {
        "error": {"message": "gone", "type": "timeout_error", "param": None, "code": 504}
    }
    assert done == b"data: [DONE]"


@pytest.mark.parametrize("is_chat", [False, True])
def test_streamed_failure_before_the_first_token_writes_nothing(is_chat: bool) -> None:
    """So that it still has its HTTP status."""
    answer, events, ends = streamed(asking(is_chat, echo=not is_chat))
    give(answer, 0, [], "", Finished(0, FinishReason.ERROR, None, 0, "too large", ErrorKind.INVALID))
    assert (events, ends.count) == ([], 1)
    assert answer.error is not None
    assert answer.error.status == 400


def test_streamed_refusal_writes_nothing() -> None:
    """So that it still has its HTTP status."""
    answer, events, ends = streamed(asking(True))
    answer.failed(answer.choices[0], ErrorKind.INVALID, "too long", "messages")
    assert (events, ends.count) == ([], 1)
    assert answer.error is not None
    assert answer.error.status == 400


@settings(max_examples=60, deadline=None)
@given(
    st.booleans(),
    st.sampled_from([{}, {"return_token_ids": True}, {"continuous_usage": True}]),
    st.lists(st.tuples(st.text(max_size=8), st.booleans()), max_size=8),
)
def test_any_text_arrives_as_it_was(is_chat: bool, more: Json, parts: list[tuple[str, bool]]) -> None:
    """Whether a row goes the short way or the general one, streamed or whole."""
    ask = asking(is_chat, **more)
    (answer, events, _), (all_at_once, _) = streamed(ask), whole(ask)
    for number, (text, counted) in enumerate(parts):
        give(answer, 0, [number], text, num_cached=3 if counted else None)
        give(all_at_once, 0, [number], text, num_cached=3 if counted else None)
    give(answer, 0, [], "", STOP)
    give(all_at_once, 0, [], "", STOP)
    found = [chunk["choices"][0] for chunk in chunks(events, is_chat)]
    got = "".join(choice["delta"].get("content", "") if is_chat else choice["text"] for choice in found)
    assert got == "".join(text for text, _ in parts)
    (choice,) = body(all_at_once)["choices"]
    assert (choice["message"]["content"] if is_chat else choice["text"]) == got


def test_streamed_max_tokens_of_zero_shows_the_prompt_alone() -> None:
    answer, events, _ = streamed(asking(False, echo=True, prompt_only=True, include_usage=True))
    give(answer, 0, [7], "Hé", LENGTH)
    echo, last = [chunk["choices"][0] for chunk in chunks(events, False)]
    assert (echo["text"], last["text"], last["finish_reason"]) == ("Hi you", "", "length")
    assert json.loads(answer.last_events().split(b"\n\n")[0].removeprefix(b"data: "))["usage"] == usage(2, 0)


def test_streamed_tokens_are_named_by_id_where_asked_for() -> None:
    answer, events, _ = streamed(asking(True, logprobs=1, tokens_as_ids=True))
    give(answer, 0, [7], "Hé", STOP, logprobs=[HELLO])
    assert chunks(events, True)[-1]["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:7"


def test_streamed_chat_with_echo_begins_with_the_message_that_it_continues() -> None:
    answer, events, _ = streamed(asking(True, begins_with="So"))
    give(answer, 0, [7], " be it", STOP)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks(events, True)] == ["So", " be it"]
