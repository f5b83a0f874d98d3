"""Tool calls are told from an answer the same, however its text is cut, whole and streamed."""

import json
from typing import Any

import pytest
from answering import LENGTH, STOP, Json, asking, body, chunks, give, streamed, whole
from hypothesis import given
from hypothesis import strategies as st
from parsing import asked, body_of

from meshlm.frontend.errors import HttpError
from meshlm.frontend.tool_calls import CLOSE, FINDERS, OPEN, Call
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.text_edge import Finished

BERN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bärn"}}\n</tool_call>'
TIME = '<tool_call>{"name":"time"}</tool_call>'
WEATHER, CLOCK = Call("weather", '{"city":"Bärn"}'), Call("time", "{}")
SAID: list[tuple[str, str, list[Call]]] = [
    ("Hello < you", "Hello < you", []),
    (BERN, "", [WEATHER]),
    (f"I look.\n{BERN}\n{TIME}\n", "I look.\n", [WEATHER, CLOCK]),
    (f"{TIME} and so on ", " and so on ", [CLOCK]),
    (BERN.removesuffix(CLOSE), "", [WEATHER]),  # the end is missing
    ('<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
    ("<tool_call>no JSON</tool_call> x", "<tool_call>no JSON</tool_call> x", []),
    ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [Call("f", '{"a": 1}')]),
    ("a <tool_ca", "a <tool_ca", []),
    ("", "", []),
]


def found(pieces: list[str], parser: str = "hermes") -> tuple[str, list[Call]]:
    finder, shown, calls = FINDERS[parser](), "", list[Call]()
    for piece in pieces:
        text, more = finder.push(piece)
        shown, calls = shown + text, calls + more
    text, more = finder.finish()
    return shown + text, calls + more


@pytest.mark.parametrize(("text", "content", "calls"), SAID)
def test_whole_and_by_letter(text: str, content: str, calls: list[Call]) -> None:
    assert found([text]) == found(list(text)) == (content, calls)


LLAMA: list[tuple[str, str, list[Call]]] = [
    ('{"name": "weather", "parameters": {"city": "Bärn"}}', "", [WEATHER]),
    ('\n<|python_tag|>{"name": "weather", "arguments": {"city": "Bärn"}}; {"name": "time"}\n', "", [WEATHER, CLOCK]),
    ('{"name": "time"}{"name": "time"}', "", [CLOCK, CLOCK]),
    ('{"name": "time"} and so on', '{"name": "time"} and so on', []),
    ('I say {"name": "time"}', 'I say {"name": "time"}', []),
    ('{"a": 1}', '{"a": 1}', []),
    ('{"name": "ti', '{"name": "ti', []),
    ("<|python", "<|python", []),
    ("<b>", "<b>", []),
    (" ", " ", []),
    ("", "", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), LLAMA)
def test_llamas_calls_whole_and_by_letter(text: str, content: str, calls: list[Call]) -> None:
    assert found([text], "llama3_json") == found(list(text), "llama3_json") == (content, calls)


def test_llamas_text_streams() -> None:
    assert [FINDERS["llama3_json"]().push("Hi")[0], FINDERS["llama3_json"]().push("{")[0]] == ["Hi", ""]


@pytest.mark.parametrize("parser", FINDERS)
@given(
    st.lists(st.sampled_from([OPEN, CLOSE, TIME, BERN, '{"name": "f"}', ";", "<", "tool", " ", "\n", "a"]), max_size=8),
    st.data(),
)
def test_cuts_change_nothing(parser: str, words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert found(pieces, parser) == found([text], parser)


def said(text: str, finished: Finished = STOP, **fields: object) -> Json:
    answer, _ = whole(asking(True, tool_call_parser="hermes", **fields))
    give(answer, 0, [7], text, finished)
    (choice,) = body(answer)["choices"]
    return dict(choice)


def test_whole_answers() -> None:
    choice = said(f"I look.{BERN}{TIME}")
    first, second = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "I look.", "refusal": None}
    assert first["function"] == {"name": "weather", "arguments": '{"city":"Bärn"}'}
    assert (second["type"], second["function"]["name"]) == ("function", "time")
    assert len({first["id"], second["id"]}) == 2
    assert choice["finish_reason"] == "tool_calls"


def test_whole_answers_without_calls() -> None:
    choice = said("Hello")
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert said(BERN, LENGTH)["finish_reason"] == "length"
    assert said(BERN)["message"]["content"] is None


def test_one_call_is_enough_where_they_may_not_be_parallel() -> None:
    (call,) = said(BERN + TIME, parallel_tool_calls=False)["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"


def test_reasoning_comes_before_calls() -> None:
    message = said(f"hm {TIME}</think>{BERN}", begins_with_reasoning=True)["message"]
    assert (message["reasoning"], message["content"]) == (f"hm {TIME}", None)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


def streamed_choices(pieces: list[str], **fields: object) -> list[dict[str, Any]]:
    answer, events, _ = streamed(asking(True, tool_call_parser="hermes", **fields))
    for piece in pieces:
        give(answer, 0, [7], piece)
    give(answer, 0, [2], "", STOP)
    return [chunk["choices"][0] for chunk in chunks(events, True)][1:]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_streamed_answers(size: int) -> None:
    text = f"I look.\n{BERN}\n{TIME}"
    choices = streamed_choices([text[at : at + size] for at in range(0, len(text), size)])
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "I look.\n"
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "weather"), (1, "time")]
    assert [call["id"] for call in calls] == [call["id"] for call in said(text)["message"]["tool_calls"]]
    assert [choice["finish_reason"] for choice in choices][-2:] == [None, "tool_calls"]


def test_nothing_is_sent_while_a_call_is_written() -> None:
    assert [choice["delta"] for choice in streamed_choices(["Hi", "<tool_", 'call>{"na', "x"])] == [
        {"content": "Hi"},
        {"content": '<tool_call>{"nax'},  # it was none
    ]


TOOLS: dict[str, object] = {"tools": [{"type": "function", "function": {"name": "weather"}}]}
READS = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")


@pytest.mark.parametrize(
    ("fields", "reads"),
    [
        ({}, False),
        (TOOLS, True),
        ({**TOOLS, "tool_choice": "auto"}, True),
        ({**TOOLS, "tool_choice": "none"}, False),
        ({"tools": [], "tool_choice": "auto"}, False),
    ],
)
def test_which_answers_may_have_calls(fields: dict[str, object], reads: bool) -> None:
    assert asked("chat", body_of("chat", fields), server=READS).tool_call_parser == ("hermes" if reads else "")


@pytest.mark.parametrize(
    ("fields", "server", "param", "text"),
    [
        (TOOLS, ServerConfig(), "tools", "--enable-auto-tool-choice"),
        (TOOLS, ServerConfig(tool_call_parser="hermes"), "tools", "--enable-auto-tool-choice"),
        ({"tools": [{"type": "function"}]}, READS, "tools", r"tools\[0\]"),
        ({**TOOLS, "tool_choice": "required"}, READS, "tool_choice", "only 'none' and 'auto'"),
    ],
)
def test_what_is_refused(fields: dict[str, object], server: ServerConfig, param: str, text: str) -> None:
    with pytest.raises(HttpError, match=text) as caught:
        asked("chat", body_of("chat", fields), server=server)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert json.loads(caught.value.body())["error"]["param"] == param
