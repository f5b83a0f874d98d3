"""Reasoning is told from the answer the same, however the text is cut, whole and streamed."""

import json
from typing import Any

import pytest
from answering import LENGTH, SAID_NOTHING, STOP, asking, body, chunks, give, logprob, streamed, whole
from hypothesis import given
from hypothesis import strategies as st
from parsing import USER, asked, body_of

from meshlm.protocol.config import ServerConfig
from meshlm.protocol.edges.text import PositionLogprobs
from meshlm.runtime.parsers.reasoning import ReasoningParser
from meshlm.runtime.parsers.splitter import Splitter

OPEN, CLOSE = "<think>", "</think>"

SAID = [
    ("<think>\nso\n</think>\n\nYes.", "\nso\n", "\n\nYes."),
    ("so</think>Yes.", "so", "Yes."),  # the prompt had the opening tag
    ("\n<think>so</think>", "so", ""),
    ("<think>cut sho", "cut sho", ""),
    ("<think>a < b </thin", "a < b </thin", ""),
    ("a</think>b</think>c", "a", "b</think>c"),
    ("<think></think>x", "", "x"),
    ("<think>", "", ""),
    ("<thi", "<thi", ""),
    ("", "", ""),
]


def split(pieces: list[str]) -> tuple[str, str]:
    splitter = Splitter(ReasoningParser())
    said = [*(splitter.push(piece) for piece in pieces), splitter.finish()]
    return "".join(thought.reasoning for thought in said), "".join(thought.rest for thought in said)


@pytest.mark.parametrize(("text", "reasoning", "content"), SAID)
def test_whole_and_by_letter(text: str, reasoning: str, content: str) -> None:
    assert split([text]) == split(list(text)) == (reasoning, content)


@given(st.lists(st.sampled_from([OPEN, CLOSE, "<", "</", "think", ">", " ", "a"]), max_size=8), st.data())
def test_cuts_change_nothing(words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert split(pieces) == split([text])


@pytest.mark.parametrize(("text", "reasoning", "content"), SAID)
def test_whole_answers(text: str, reasoning: str, content: str) -> None:
    answer, _ = whole(asking(True, begins_with_reasoning=True))
    give(answer, 0, [7], text, STOP)
    message = body(answer)["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"]) == (reasoning, reasoning)
    assert message["content"] == (content or None)


def deltas(asking_for: dict[str, object], pieces: list[str]) -> list[dict[str, Any]]:
    answer, events, _ = streamed(asking(True, begins_with_reasoning=True, **asking_for))
    for piece in pieces:
        give(answer, 0, [7], piece)
    give(answer, 0, [2], "", LENGTH)
    role, *rest = [chunk["choices"][0]["delta"] for chunk in chunks(events, True)]
    assert role == {"role": "assistant", "content": ""}
    return rest


@pytest.mark.parametrize(("text", "reasoning", "content"), SAID)
def test_streamed_answers(text: str, reasoning: str, content: str) -> None:
    found = deltas({}, list(text))
    assert "".join(delta.get("reasoning", "") for delta in found) == reasoning
    assert [delta.get("reasoning") for delta in found] == [delta.get("reasoning_content") for delta in found]
    assert "".join(delta.get("content", "") for delta in found) == content


def test_nothing_is_sent_for_a_piece_of_a_tag() -> None:
    assert deltas({}, ["<think>", "a", "</", "think>", "b", "c"]) == [
        {"reasoning": "a", "reasoning_content": "a"},
        {"content": "b"},
        {"content": "c"},
        {},
    ]


def test_reasoning_can_be_left_out() -> None:
    assert deltas({"include_reasoning": False}, ["a", "</think>", "b"]) == [{"content": "b"}, {}]
    answer, _ = whole(asking(True, begins_with_reasoning=True, include_reasoning=False))
    give(answer, 0, [7], "a</think>b", STOP)
    assert body(answer)["choices"][0]["message"] == {**SAID_NOTHING, "role": "assistant", "content": "b"}


def test_reasoning_that_is_left_out_is_told_by_no_logprobs_and_ids() -> None:
    ask = asking(True, begins_with_reasoning=True, include_reasoning=False, logprobs=0, return_token_ids=True)
    at = [PositionLogprobs(logprob(7, -1.0, "a"), 1)]
    answer, _ = whole(ask)
    give(answer, 0, [7], "a</think>b", STOP, logprobs=at)
    (choice,) = body(answer)["choices"]
    assert (choice["logprobs"], choice["token_ids"]) == (None, None)
    stream, events, _ = streamed(ask)
    give(stream, 0, [7], "a", logprobs=at)
    give(stream, 0, [8], "</think>b", STOP, logprobs=at)
    found = [choice for chunk in chunks(events, True) for choice in chunk["choices"]]
    assert [choice["delta"].get("content") for choice in found] == ["", "b"]
    assert not any(choice["logprobs"] or choice["token_ids"] for choice in found)


def test_logprobs_of_a_held_piece_are_sent() -> None:
    answer, events, _ = streamed(asking(True, begins_with_reasoning=True, logprobs=0))
    give(answer, 0, [7], "</thi", logprobs=[PositionLogprobs(logprob(7, -1.0, "</thi"), 0)])
    held = chunks(events, True)[-1]["choices"][0]
    assert (held["delta"], held["logprobs"]["content"][0]["token"]) == ({}, "</thi")


def test_choices_think_each_for_itself() -> None:
    answer, events, _ = streamed(asking(True, begins_with_reasoning=True, num_choices=2, num_returned=2))
    give(answer, 0, [7], "a</think>")
    give(answer, 1, [7], "b")
    give(answer, 0, [7], "c")
    found = [(choice["index"], choice["delta"]) for chunk in chunks(events, True) for choice in chunk["choices"]]
    assert found[-2:] == [(1, {"reasoning": "b", "reasoning_content": "b"}), (0, {"content": "c"})]


HALF = {"role": "assistant", "content": "<think>so"}
DONE = {"role": "assistant", "content": "<think>so</think>Yes"}


@pytest.mark.parametrize(
    ("parser", "fields", "begins"),
    [
        ("", {}, False),
        ("qwen3", {}, True),
        ("deepseek_r1", {}, True),
        ("qwen3", {"chat_template_kwargs": {"enable_thinking": False}}, False),
        ("deepseek_r1", {"chat_template_kwargs": {"enable_thinking": False}}, True),
        ("qwen3", {"messages": [USER, HALF], "continue_final_message": True}, True),
        ("qwen3", {"messages": [USER, DONE], "continue_final_message": True}, False),
        ("qwen3", {"messages": [USER, USER], "continue_final_message": True}, False),
    ],
)
def test_which_answers_begin_with_reasoning(parser: str, fields: dict[str, object], begins: bool) -> None:
    server = ServerConfig(reasoning_parser=parser)
    assert asked("chat", body_of("chat", fields), server=server).answer.begins_with_reasoning == begins
    assert not asked("text", json.dumps({"prompt": "x"}).encode(), server=server).answer.begins_with_reasoning


def test_the_server_may_switch_it_off_for_all() -> None:
    server = ServerConfig(reasoning_parser="qwen3", default_chat_template_kwargs='{"enable_thinking": false}')
    assert not asked("chat", body_of("chat", {}), server=server).answer.begins_with_reasoning
    fields: dict[str, object] = {"chat_template_kwargs": {"enable_thinking": True}}
    assert asked("chat", body_of("chat", fields), server=server).answer.begins_with_reasoning
