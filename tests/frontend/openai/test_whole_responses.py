"""What the client reads at once, text and chat: logprobs, token ids, echo, n > 1, best_of, errors."""

import pytest
from answer_keys import CHAT_ANSWER, COMPLETION_ANSWER, COMPLETION_CHOICE
from answering import (
    BOTH_TEXT,
    FRAME,
    HELLO,
    HELLO_CHAT,
    LENGTH,
    OF_PROMPT,
    PROMPT_IDS,
    PROMPT_JSON,
    SAID_NOTHING,
    STOP,
    WORLD,
    WORLD_CHAT,
    asking,
    body,
    echoed_logprobs,
    give,
    logprob,
    of_prompt,
    whole,
    whole_usage,
)

from meshlm.protocol.edges.text import Accepted, Finished, PositionLogprobs
from meshlm.protocol.edges.token import First
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle


def test_whole_chat() -> None:
    answer, ends = whole(asking(True))
    give(answer, 0, [7], "Hé", num_cached=1)
    give(answer, 0, [9], " w")
    assert ends.count == 0
    give(answer, 0, [2], "", STOP)
    assert ends.count == 1
    assert answer.error is None
    assert body(answer) == {
        **FRAME,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {**SAID_NOTHING, "role": "assistant", "content": "Hé w"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
                "routed_experts": None,
            }
        ],
        "usage": whole_usage(2, 3, 1),
        **dict.fromkeys(CHAT_ANSWER - {*FRAME, "object", "choices", "usage"}),
    }


def test_whole_text() -> None:
    answer, ends = whole(asking(False))
    give(answer, 0, [7, 9], "Hé w", LENGTH)
    assert ends.count == 1
    assert body(answer) == {
        **FRAME,
        "object": "text_completion",
        "choices": [{**dict.fromkeys(COMPLETION_CHOICE), "index": 0, "text": "Hé w", "finish_reason": "length"}],
        "usage": whole_usage(2, 2),
        **dict.fromkeys(COMPLETION_ANSWER - {*FRAME, "object", "choices", "usage"}),
    }


@pytest.mark.parametrize("is_chat", [False, True])
def test_whole_tells_its_times_where_that_is_wanted(is_chat: bool) -> None:
    answer, _ = whole(asking(is_chat))
    give(answer, 0, [7], "H")
    give(answer, 0, [9, 9], "é", LENGTH)
    (choice,) = answer.choices
    choice.first, choice.first_at, choice.last_at = First(0, queued_us=500, prefill_us=2000), 10.0, 10.004
    assert body(answer)["metrics"] is None
    answer.tells_times = True
    assert body(answer)["metrics"] == {
        "time_to_first_token_ms": 2.0,
        "generation_time_ms": pytest.approx(4.0),
        "queue_time_ms": 0.5,
        "mean_itl_ms": pytest.approx(2.0),
        "tokens_per_second": pytest.approx(500.0),
    }
    choice.num_told = 3
    assert set(body(answer)["metrics"].values()) == {None}, "they had come on another connection"


def test_whole_answers_of_several_choices_have_no_times() -> None:
    answer, _ = whole(asking(False, num_choices=2, num_returned=2))
    for index in (0, 1):
        give(answer, index, [7], "H", LENGTH)
    answer.tells_times = True
    assert body(answer)["metrics"] is None


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("reason", [None, "###", 2])
def test_whole_says_what_stopped_it(is_chat: bool, reason: str | int | None) -> None:
    answer, _ = whole(asking(is_chat))
    give(answer, 0, [], "", Finished(0, FinishReason.STOP, reason))
    assert body(answer)["choices"][0]["stop_reason"] == reason


def test_whole_chat_logprobs() -> None:
    answer, _ = whole(asking(True, logprobs=2))
    give(answer, 0, [7], "Hé", logprobs=[HELLO])
    give(answer, 0, [9], " w", LENGTH, logprobs=[WORLD])
    assert body(answer)["choices"][0]["logprobs"] == {"content": [HELLO_CHAT, WORLD_CHAT]}


def test_whole_text_logprobs() -> None:
    answer, _ = whole(asking(False, logprobs=2))
    give(answer, 0, [7], "Hé", logprobs=[HELLO])
    give(answer, 0, [9], " w", LENGTH, logprobs=[WORLD])
    assert body(answer)["choices"][0]["logprobs"] == BOTH_TEXT


@pytest.mark.parametrize("is_chat", [False, True])
def test_whole_choices_in_order_whatever_comes_first(is_chat: bool) -> None:
    answer, ends = whole(asking(is_chat, num_choices=2, num_returned=2), num_prompts=2)
    for index in (3, 0, 2, 1):
        give(answer, index, [index], f"<{index}", num_cached=index)
    for index in (1, 3, 0, 2):
        assert ends.count == 0
        give(answer, index, [9], f"{index}>", STOP if index % 2 else LENGTH)
    assert ends.count == 1
    got = body(answer)
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2, 3]
    texts = [choice["message"]["content"] if is_chat else choice["text"] for choice in got["choices"]]
    assert texts == ["<00>", "<11>", "<22>", "<33>"]
    assert [choice["finish_reason"] for choice in got["choices"]] == ["length", "stop"] * 2
    assert (got["usage"]["prompt_tokens"], got["usage"]["completion_tokens"]) == (4, 8)


def test_whole_best_of_returns_the_likeliest_and_counts_all() -> None:
    answer, _ = whole(asking(False, num_choices=3, num_returned=2), num_prompts=2)
    for index, value in enumerate((-3.0, -1.0, -2.0, -0.5, -9.0, -0.1)):
        at = [PositionLogprobs(logprob(7, value, "a"), 1), PositionLogprobs(logprob(7, value, "a"), 1)]
        give(answer, index, [1, 2], str(index), LENGTH, logprobs=at)
    got = body(answer)
    assert [(choice["index"], choice["text"]) for choice in got["choices"]] == [(0, "1"), (1, "2"), (2, "5"), (3, "3")]
    assert {choice["logprobs"] for choice in got["choices"]} == {None}
    assert got["usage"] == whole_usage(4, 12)


def test_whole_best_of_with_logprobs() -> None:
    answer, _ = whole(asking(False, num_choices=2, num_returned=1, logprobs=2))
    give(answer, 0, [7, 9], "Hé w", LENGTH, logprobs=[HELLO, WORLD])
    give(answer, 1, [9, 9], " w w", LENGTH, logprobs=[WORLD, WORLD])
    assert body(answer)["choices"][0]["logprobs"] == BOTH_TEXT


def test_whole_echo() -> None:
    answer, _ = whole(asking(False, echo=True, num_choices=2, num_returned=2))
    give(answer, 0, [7], " a", STOP)
    give(answer, 1, [8], " b", STOP)
    assert [choice["text"] for choice in body(answer)["choices"]] == ["Hi you a", "Hi you b"]


def test_whole_echo_with_logprobs_begins_with_the_prompts() -> None:
    found = echoed_logprobs()
    assert found["tokens"] == ["Hi", " you", "Hé", " w"]
    assert found["token_logprobs"] == [None, -3.0, -0.25, -2.0]
    assert found["top_logprobs"][:2] == [None, {" me": -0.5, " you": -3.0}]
    assert found["top_logprobs"][2:] == BOTH_TEXT["top_logprobs"]


def test_whole_echo_offsets_point_into_the_text() -> None:
    assert echoed_logprobs()["text_offset"] == [0, 2, 6, 8]


def test_whole_echo_with_logprobs_of_a_prompt_of_one_token() -> None:
    answer, _ = whole(asking(False, echo=True, logprobs=1, prompt_logprobs=1))
    answer.accepted(answer.choices[0], Accepted((Handle(1),), 1, pack_i32([5]), "Hi", "Hi"))
    give(answer, 0, [7], "Hé", STOP, logprobs=[HELLO])
    (choice,) = body(answer)["choices"]
    assert choice["text"] == "HiHé"
    assert choice["logprobs"]["tokens"] == ["Hi", "Hé"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25]


def test_whole_text_prompt_logprobs() -> None:
    answer, _ = whole(asking(False, prompt_logprobs=1))
    give(answer, 0, [7], "Hé", LENGTH, prompt_logprobs=OF_PROMPT)
    assert body(answer)["choices"][0]["prompt_logprobs"] == PROMPT_JSON


def test_whole_echo_with_prompt_logprobs_only() -> None:
    answer, _ = whole(asking(False, echo=True, prompt_logprobs=1))
    give(answer, 0, [7], "Hé", LENGTH, prompt_logprobs=OF_PROMPT)
    assert body(answer)["choices"][0]["prompt_logprobs"] == PROMPT_JSON


def test_whole_text_token_ids() -> None:
    answer, _ = whole(asking(False, return_token_ids=True))
    give(answer, 0, [7], "Hé")
    give(answer, 0, [9, 2], " w", STOP)
    (choice,) = body(answer)["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([7, 9, 2], [5, 6])


def test_whole_chat_token_ids() -> None:
    answer, _ = whole(asking(True, return_token_ids=True))
    give(answer, 0, [7, 2], "Hé", STOP)
    assert body(answer)["choices"][0]["token_ids"] == [7, 2]


@pytest.mark.parametrize("key", ["prompt_token_ids", "prompt_logprobs"])
def test_whole_chat_prompt_stands_beside_the_choices(key: str) -> None:
    answer, _ = whole(asking(True, return_token_ids=True, prompt_logprobs=1))
    give(answer, 0, [7], "Hé", STOP, prompt_logprobs=OF_PROMPT)
    got = body(answer)
    assert got.get(key) == {"prompt_token_ids": PROMPT_IDS, "prompt_logprobs": PROMPT_JSON}[key]
    assert got["choices"][0].get(key) is None


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_prompt_of_one_token_has_prompt_logprobs_too(is_chat: bool) -> None:
    answer, _ = whole(asking(is_chat, prompt_logprobs=1))
    give(answer, 0, [7], "Hé", STOP)
    got = body(answer)
    assert (got if is_chat else got["choices"][0])["prompt_logprobs"] == [None]


def test_an_echo_shows_as_many_logprobs_of_the_prompt_as_of_the_answer() -> None:
    """prompt_logprobs may ask for more; they have a place of their own."""
    many = PositionLogprobs(logprob(6, -3.0, " you", 4), 4, (logprob(2, -0.5, " me"), logprob(3, -0.75, " us")))
    answer, _ = whole(asking(False, echo=True, logprobs=1, prompt_logprobs=2))
    give(answer, 0, [7], "Hé", STOP, prompt_logprobs=of_prompt(5, many), logprobs=[HELLO])
    (choice,) = body(answer)["choices"]
    assert list(choice["logprobs"]["top_logprobs"][1].items()) == [(" you", -3.0), (" me", -0.5)]
    assert list(choice["prompt_logprobs"][1]) == ["6", "2", "3"]


def test_the_sampled_token_is_the_first_of_the_likeliest() -> None:
    answer, _ = whole(asking(False, logprobs=2))
    give(answer, 0, [9], " w", STOP, logprobs=[WORLD])
    (top,) = body(answer)["choices"][0]["logprobs"]["top_logprobs"]
    assert list(top) == [" w", " x", " y"]


def test_of_tokens_with_the_same_text_the_sampled_one_and_the_likeliest_stay() -> None:
    same = PositionLogprobs(
        logprob(9, -3.0, "", 3), 0, (logprob(3, -0.5, ""), logprob(4, -1.0, "a"), logprob(5, -2, "a"))
    )
    answer, _ = whole(asking(False, logprobs=3))
    give(answer, 0, [9], "", STOP, logprobs=[same])
    assert body(answer)["choices"][0]["logprobs"]["top_logprobs"] == [{"": -3.0, "a": -1.0}]


def test_offsets_count_what_the_text_has_whatever_tokens_are_called() -> None:
    """A special token that is skipped brings nothing to the text, and half a character neither."""
    half, end = PositionLogprobs(logprob(1, -1.0, ""), 0), PositionLogprobs(logprob(2, -1.0, "<|eot|>"), 0)
    for tokens_as_ids in (False, True):
        answer, _ = whole(asking(False, logprobs=0, tokens_as_ids=tokens_as_ids))
        give(answer, 0, [7, 1, 2, 9, 9], "Hé w w", STOP, logprobs=[HELLO, half, end, WORLD, WORLD])
        assert body(answer)["choices"][0]["logprobs"]["text_offset"] == [0, 2, 2, 2, 4]


def test_return_prompt_text() -> None:
    answer, _ = whole(asking(True, return_prompt_text=True))
    give(answer, 0, [7], "Hé", STOP)
    assert body(answer)["prompt_text"] == "Hi you"


@pytest.mark.parametrize(
    ("kind", "status"), [(ErrorKind.INVALID, 400), (ErrorKind.OVERLOADED, 503), (ErrorKind.TIMEOUT, 504)]
)
def test_the_first_failure_is_the_answers_error(kind: ErrorKind, status: int) -> None:
    answer, ends = whole(asking(False, num_choices=2, num_returned=2))
    answer.failed(answer.choices[0], kind, "too long", "prompt")
    assert ends.count == 0
    answer.failed(answer.choices[1], ErrorKind.INTERNAL, "later", "")
    assert ends.count == 1
    assert answer.error is not None
    assert (answer.error.status, answer.error.message, answer.error.param) == (status, "too long", "prompt")
    assert answer.error.kind == kind.value
    assert answer.error.headers() == ({"Retry-After": "1"} if status == 503 else {})


def test_an_end_by_error_is_the_answers_error() -> None:
    answer, ends = whole(asking(True))
    give(answer, 0, [7], "Hé", Finished(0, FinishReason.ERROR, None, 1, "its scheduler died 5 times"))
    assert ends.count == 1
    assert answer.error is not None
    assert (answer.error.status, answer.error.message) == (500, "its scheduler died 5 times")


def test_max_tokens_of_zero_shows_the_prompt_alone() -> None:
    answer, _ = whole(asking(False, echo=True, prompt_only=True, logprobs=1, prompt_logprobs=1, return_token_ids=True))
    give(answer, 0, [7], "Hé", LENGTH, logprobs=[HELLO], prompt_logprobs=OF_PROMPT)
    found = body(answer)
    (choice,) = found["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("Hi you", [], "length")
    assert choice["logprobs"]["tokens"] == ["Hi", " you"]
    assert found["usage"] == whole_usage(2, 0)


def test_tokens_are_named_by_id_where_asked_for() -> None:
    answer, _ = whole(asking(True, logprobs=1, tokens_as_ids=True))
    give(answer, 0, [7], "Hé", STOP, logprobs=[HELLO])
    (token,) = body(answer)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in (token, *token["top_logprobs"])] == ["token_id:7", "token_id:7", "token_id:8"]
    assert token["bytes"] == HELLO_CHAT["bytes"]
    answer, _ = whole(asking(False, echo=True, logprobs=1, prompt_logprobs=1, tokens_as_ids=True))
    give(answer, 0, [7], "Hé", STOP, logprobs=[HELLO], prompt_logprobs=OF_PROMPT)
    (choice,) = body(answer)["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:7"]
    assert choice["logprobs"]["text_offset"] == [0, 2, 6]
    assert choice["text"] == "Hi youHé"


def test_a_chat_with_echo_begins_with_the_message_that_it_continues() -> None:
    answer, _ = whole(asking(True, begins_with="So"))
    give(answer, 0, [7], " be it", STOP)
    assert body(answer)["choices"][0]["message"]["content"] == "So be it"
