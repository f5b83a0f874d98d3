"""What the client reads, whole and streamed, text and chat: logprobs, usage, token ids, echo, n > 1, errors."""

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from meshlm.frontend.answers import Answer, StreamAnswer, WholeAnswer
from meshlm.frontend.desk import Choice
from meshlm.frontend.parse import Ask
from meshlm.protocol.columns import pack_i32, unpack_i32
from meshlm.protocol.ids import ErrorKind, FinishReason, Handle, RequestId
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.text_edge import (
    Accepted,
    Finished,
    PositionLogprobs,
    Submit,
    TextParams,
    TextPrompt,
    TokenLogprob,
)

Json = dict[str, Any]
FRAME = {"id": "cmpl-1", "created": 1700000000, "model": "tiny"}
PROMPT_IDS, PROMPT_TEXT, PROMPT_STRINGS = [5, 6], "Hi you", ("Hi", " you")
STOP = Finished(0, FinishReason.STOP)
LENGTH = Finished(0, FinishReason.LENGTH)


def asking(is_chat: bool, **changes: object) -> Ask:
    """An Ask with nothing special, and these changes."""
    plain = Ask(
        prompts=[TextPrompt(PROMPT_TEXT)],
        sampling=SamplingParams(),
        seed=None,
        text=TextParams(),
        max_tokens=16,
        num_choices=1,
        num_returned=1,
        stream=False,
        include_usage=False,
        continuous_usage=False,
        echo=False,
        logprobs=-1,
        prompt_logprobs=-1,
        return_token_ids=False,
        priority=0,
        cache_salt="",
        timeout_s=0.0,
        is_chat=is_chat,
        unknown_fields=(),
    )
    return plain._replace(**changes)  # type: ignore[arg-type]


class Ends:
    """Counts the calls of on_end."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


Kind = TypeVar("Kind", bound=Answer)


def filled(answer: Kind, num_prompts: int = 1) -> Kind:
    """The answer with its choices, their prompts accepted; as server.py and desk.py do it."""
    n = answer.ask.num_choices
    for index in range(num_prompts * n):
        submit = Submit((Handle(index + 1),), (RequestId(str(index)),), TextPrompt(PROMPT_TEXT), SamplingParams())
        answer.choices.append(Choice(answer, index, index // n, submit, Handle(index + 1)))  # type: ignore[arg-type]
    for choice in answer.choices[::n]:
        answer.accepted(choice, Accepted((choice.handle,), 2, pack_i32(PROMPT_IDS), PROMPT_TEXT, PROMPT_STRINGS))
    return answer


def whole(ask: Ask, num_prompts: int = 1) -> tuple[WholeAnswer, Ends]:
    ends = Ends()
    return filled(WholeAnswer(ask, "cmpl-1", 1700000000, "tiny", ends), num_prompts), ends


def streamed(ask: Ask, num_prompts: int = 1) -> tuple[StreamAnswer, list[bytes], Ends]:
    ends, events = Ends(), list[bytes]()
    answer = StreamAnswer(ask._replace(stream=True), "cmpl-1", 1700000000, "tiny", ends, events.append)
    return filled(answer, num_prompts), events, ends


def give(
    answer: WholeAnswer | StreamAnswer,
    index: int,
    token_ids: Sequence[int],
    text: str,
    finished: Finished | None = None,
    logprobs: list[PositionLogprobs] | None = None,
    prompt_logprobs: list[PositionLogprobs | None] | None = None,
    num_cached: int | None = None,
) -> None:
    """One row of deltas, as desk.py hands it on."""
    choice = answer.choices[index]
    ids = unpack_i32(pack_i32(token_ids))
    choice.token_ids.extend(ids)
    if finished is None and logprobs is None and prompt_logprobs is None and num_cached is None:
        answer.text(choice, ids, text)
        return
    if finished is not None:
        choice.finished = finished
    answer.row(choice, ids, text, finished, logprobs, prompt_logprobs, num_cached)


def body(answer: WholeAnswer) -> Json:
    """The answer, in the form of OpenAI's own models."""
    found: Json = json.loads(answer.body())
    if answer.ask.is_chat:
        ChatCompletion.model_validate(found)
    elif not answer.ask.echo:  # of an echo's first token OpenAI answers null, which their model has no place for
        Completion.model_validate(found)
    return found


def chunks(events: Sequence[bytes], is_chat: bool) -> list[Json]:
    """The JSON of each event; the events are well-formed."""
    found: list[Json] = []
    for event in events:
        assert event.startswith(b"data: {")
        assert event.endswith(b"}\n\n")
        assert b"\n" not in event[:-2]
        chunk: Json = json.loads(event.removeprefix(b"data: "))
        if is_chat:
            ChatCompletionChunk.model_validate(chunk)
        assert {key: chunk[key] for key in FRAME} == FRAME
        assert chunk["object"] == ("chat.completion.chunk" if is_chat else "text_completion")
        found.append(chunk)
    return found


def usage(prompt: int, output: int, cached: int = 0) -> Json:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def logprob(token_id: int, value: float, text: str, rank: int = 1) -> TokenLogprob:
    return TokenLogprob(token_id, value, rank, text, text.encode())


HELLO = PositionLogprobs(logprob(7, -0.25, "Hé"), (logprob(7, -0.25, "Hé"), logprob(8, -1.5, "Oh", 2)))
WORLD = PositionLogprobs(logprob(9, -2.0, " w", 2), (logprob(3, -0.5, " x"), logprob(4, float("-inf"), " y", 2)))
OF_PROMPT: list[PositionLogprobs | None] = [
    None,
    PositionLogprobs(logprob(6, -3.0, " you", 4), (logprob(2, -0.5, " me"),)),
]
HELLO_CHAT = {
    "token": "Hé",
    "logprob": -0.25,
    "bytes": [72, 195, 169],
    "top_logprobs": [
        {"token": "Hé", "logprob": -0.25, "bytes": [72, 195, 169]},
        {"token": "Oh", "logprob": -1.5, "bytes": [79, 104]},
    ],
}
WORLD_CHAT = {
    "token": " w",
    "logprob": -2.0,
    "bytes": [32, 119],
    "top_logprobs": [
        {"token": " x", "logprob": -0.5, "bytes": [32, 120]},
        {"token": " y", "logprob": -9999.0, "bytes": [32, 121]},
    ],
}
BOTH_TEXT = {
    "tokens": ["Hé", " w"],
    "token_logprobs": [-0.25, -2.0],
    "top_logprobs": [{"Hé": -0.25, "Oh": -1.5}, {" x": -0.5, " y": -9999.0, " w": -2.0}],
    "text_offset": [0, 2],
}
PROMPT_JSON = [
    None,
    {
        "2": {"logprob": -0.5, "rank": 1, "decoded_token": " me"},
        "6": {"logprob": -3.0, "rank": 4, "decoded_token": " you"},
    },
]


# --- whole ---


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
                "message": {"role": "assistant", "content": "Hé w", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": usage(2, 3, 1),
        "system_fingerprint": None,
    }


def test_whole_text() -> None:
    answer, ends = whole(asking(False))
    give(answer, 0, [7, 9], "Hé w", LENGTH)
    assert ends.count == 1
    assert body(answer) == {
        **FRAME,
        "object": "text_completion",
        "choices": [{"index": 0, "text": "Hé w", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "usage": usage(2, 2),
        "system_fingerprint": None,
    }


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
        at = [PositionLogprobs(logprob(7, value, "a")), PositionLogprobs(logprob(7, value, "a"))]
        give(answer, index, [1, 2], str(index), LENGTH, logprobs=at)
    got = body(answer)
    assert [(choice["index"], choice["text"]) for choice in got["choices"]] == [(0, "1"), (1, "2"), (2, "5"), (3, "3")]
    assert {choice["logprobs"] for choice in got["choices"]} == {None}
    assert got["usage"] == usage(4, 12)


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


def echoed_logprobs() -> Json:
    answer, _ = whole(asking(False, echo=True, logprobs=1, prompt_logprobs=1))
    give(answer, 0, [7], "Hé", prompt_logprobs=OF_PROMPT, logprobs=[HELLO])
    give(answer, 0, [9], " w", STOP, logprobs=[WORLD])
    (choice,) = body(answer)["choices"]
    assert choice["text"] == "Hi youHé w"
    assert "prompt_logprobs" not in choice
    found: Json = choice["logprobs"]
    return found


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
    answer.accepted(answer.choices[0], Accepted((Handle(1),), 1, pack_i32([5]), "Hi", ("Hi",)))
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
    assert key not in got["choices"][0]


def test_nothing_unasked_for() -> None:
    answer, _ = whole(asking(True))
    give(answer, 0, [7], "Hé", STOP)
    got = body(answer)
    assert set(got) == {*FRAME, "object", "choices", "usage", "system_fingerprint"}
    assert set(got["choices"][0]) == {"index", "message", "logprobs", "finish_reason", "stop_reason"}


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


# --- streamed ---


def test_streamed_chat() -> None:
    answer, events, ends = streamed(asking(True))
    give(answer, 0, [7], "Hé", num_cached=1)
    give(answer, 0, [9], "")  # half a character
    give(answer, 0, [9], ' "w"\n')
    give(answer, 0, [2], "", Finished(0, FinishReason.STOP, 2))
    assert ends.count == 1
    role, *words, last = [chunk["choices"] for chunk in chunks(events, True)]
    nothing = {"logprobs": None, "finish_reason": None}
    assert role == [{"index": 0, "delta": {"role": "assistant", "content": ""}, **nothing}]
    assert words == [
        [{"index": 0, "delta": {"content": "Hé"}, **nothing}],
        [{"index": 0, "delta": {"content": ' "w"\n'}, **nothing}],
    ]
    assert last == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": 2}]
    assert answer.last_events() == b"data: [DONE]\n\n"


def test_streamed_text() -> None:
    answer, events, ends = streamed(asking(False))
    give(answer, 0, [7], "Hé")
    give(answer, 0, [9], " w", LENGTH)
    assert ends.count == 1
    nothing = {"logprobs": None, "finish_reason": None}
    assert [chunk["choices"] for chunk in chunks(events, False)] == [
        [{"index": 0, "text": "Hé", **nothing}],
        [{"index": 0, "text": " w", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
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
def test_streamed_usage_all_the_time(is_chat: bool) -> None:
    answer, events, _ = streamed(asking(is_chat, continuous_usage=True, include_usage=True))
    give(answer, 0, [7], "Hé", num_cached=1)
    give(answer, 0, [9], " w")
    give(answer, 0, [2], "", STOP)
    found = [chunk["usage"] for chunk in chunks(events, is_chat)[is_chat:]]
    assert found == [usage(2, 1, 1), usage(2, 2, 1), usage(2, 3, 1)]


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
    assert not any("prompt_token_ids" in {**chunk, **chunk["choices"][0]} for chunk in others)


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


def test_streamed_echo_with_logprobs_is_the_whole_one_in_parts() -> None:
    answer, events, _ = streamed(asking(False, echo=True, logprobs=1, prompt_logprobs=1))
    give(answer, 0, [7], "Hé", prompt_logprobs=OF_PROMPT, logprobs=[HELLO])
    give(answer, 0, [9], " w", STOP, logprobs=[WORLD])
    found = [chunk["choices"][0] for chunk in chunks(events, False)]
    assert [choice["text"] for choice in found] == ["Hi you", "Hé", " w"]
    expected = echoed_logprobs()
    assert {key: [item for choice in found for item in choice["logprobs"][key]] for key in expected} == expected
    assert not any("prompt_logprobs" in choice for choice in found)


def test_streamed_echo_with_logprobs_of_a_prompt_of_one_token() -> None:
    answer, events, _ = streamed(asking(False, echo=True, logprobs=1, prompt_logprobs=1))
    answer.accepted(answer.choices[0], Accepted((Handle(1),), 1, pack_i32([5]), "Hi", ("Hi",)))
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
