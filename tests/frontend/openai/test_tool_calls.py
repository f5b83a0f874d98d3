"""Tool calls are told from an answer the same, however its text is cut, whole and streamed."""

import re
import time
from collections import Counter
from typing import Any

import pytest
from answering import LENGTH, SAID_NOTHING, STOP, Json, asking, body, chunks, give, streamed, whole
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from meshlm.frontend.openai.reading import Reader, Said
from meshlm.protocol.edges.text import Finished
from meshlm.runtime.parsers.calls import Call, joined
from meshlm.runtime.parsers.reasoning import ReasoningParser
from meshlm.runtime.parsers.registry import TOOL_PARSERS
from meshlm.runtime.parsers.splitter import Splitter
from meshlm.runtime.parsers.tools.json_objects import CLOSE, OPEN

BERN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bärn"}}\n</tool_call>'
TIME = '<tool_call>{"name":"time", "arguments": {}}</tool_call>'
WEATHER, CLOCK = Call("weather", '{"city": "Bärn"}'), Call("time", "{}")
TOOLS: dict[str, Json] = {"weather": {}, "time": {}}
SAID: list[tuple[str, str, list[Call]]] = [
    ("Hello < you", "Hello < you", []),
    (BERN, "", [WEATHER]),
    (f"I look.\n{BERN}\n{TIME}\n", "I look.\n", [WEATHER, CLOCK]),
    (f"{TIME} and so on ", " and so on ", [CLOCK]),
    (BERN.removesuffix(CLOSE), "", [WEATHER]),  # the end is missing
    ('<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
    ("<tool_call>no JSON</tool_call> x", "<tool_call>no JSON</tool_call> x", []),
    ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    (
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        [],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>!',
        "!",
        [Call("f", '{"a": 1}')],
    ),  # a bracket is missing
    ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>!', "", [Call("f", '{"a": "</tool_call>!')]),
    ('<tool_call>{"name": "f", "arguments": {"a": </tool_call>!', "!", [Call("f", '{"a": ')]),
    (f'<tool_call>{{"arguments": {{"a": 1}}, "name": "f"}}{CLOSE}', "", [Call("f", '{"a": 1}')]),
    (
        '<tool_call>{"name": "f", "arguments": "3"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "3"}</tool_call>',
        [],
    ),
    (
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        [],
    ),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [Call("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", [Call("f", '{"a": 1}')]),
    (
        '<tool_call>{"name": "f", "arguments": {"n": 12345678901234567890123, "x": 1.10}}</tool_call>',
        "",
        [Call("f", '{"n": 12345678901234567890123, "x": 1.10}')],
    ),
    (f"A <tool_call> is: {BERN}", "A <tool_call> is: ", [WEATHER]),  # the first tag is only spoken of
    (TIME.removesuffix(CLOSE) + BERN, "", [CLOCK, WEATHER]),  # the first one's end is missing
    (f"{TIME}</tool_call>{BERN}", "</tool_call>", [CLOCK, WEATHER]),
    (
        '<tool_call>{"name": "f", "arguments": {"a": "<tool_call>"}}</tool_call>',
        "",
        [Call("f", '{"a": "<tool_call>"}')],
    ),
    ("a <tool_ca", "a <tool_ca", []),
    ("", "", []),
]


def found(pieces: list[str], parser: str = "hermes") -> tuple[str, list[Call]]:
    finder = TOOL_PARSERS[parser].finder(TOOLS)
    return joined([part for piece in pieces for part in finder.push(piece)] + finder.finish())


@pytest.mark.parametrize(("text", "content", "calls"), SAID)
def test_whole_and_by_letter(text: str, content: str, calls: list[Call]) -> None:
    assert found([text]) == found(list(text)) == (content, calls)


NOW = '{"name": "time", "parameters": {}}'
LLAMA: list[tuple[str, str, list[Call]]] = [
    ('{"name": "weather", "parameters": {"city": "Bärn"}}', "", [WEATHER]),
    (f'\n<|python_tag|>{{"name": "weather", "arguments": {{"city": "Bärn"}}}}; {NOW}\n', "", [WEATHER, CLOCK]),
    (NOW + NOW, "", [CLOCK, CLOCK]),
    (f"{NOW} and so on", " and so on", [CLOCK]),
    ('{"name": "time", "parameters": {"name": "a"}}', "", [Call("time", '{"name": "a"}')]),
    (f"I say {NOW} so.", "I say  so.", [CLOCK]),
    ('So: {"name": "Alice", "parameters": {}}', 'So: {"name": "Alice", "parameters": {}}', []),
    ('{"type": "function", "name": "time", "parameters": {}}', "", [CLOCK]),
    ('{"name": "time"}', '{"name": "time"}', []),
    ('{"name": "Alice", "age": 30}', '{"name": "Alice", "age": 30}', []),
    ('{"name": "Alice", "parameters": {"age": 30}}', '{"name": "Alice", "parameters": {"age": 30}}', []),
    (f'{NOW};{{"name": "Alice", "parameters": {{}}}}', ';{"name": "Alice", "parameters": {}}', [CLOCK]),
    ('{"name": "time", "parameters": 1}', '{"name": "time", "parameters": 1}', []),
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
    assert [TOOL_PARSERS["llama3_json"].finder(TOOLS).push(text) for text in ("Hi", "{")] == [["Hi"], []]


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
@given(
    st.lists(
        st.sampled_from([OPEN, CLOSE, TIME, BERN, NOW, '{"name": "f"}', ";", "<", "tool", " ", "\n", "a"]), max_size=8
    ),
    st.data(),
)
def test_cuts_change_nothing(parser: str, words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert found(pieces, parser) == found([text], parser)


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
@given(st.lists(st.sampled_from([OPEN, CLOSE, TIME, NOW, '{"name": "f"}', ";", "<", "%"]), max_size=8))
def test_no_text_is_lost(parser: str, words: list[str]) -> None:
    """What is shown is the text without its calls, and each call was a whole one."""
    text = "".join(words)
    shown, calls = found([text], parser)
    assert set(calls) <= {CLOCK}
    assert shown.count("%") == text.count("%")
    assert shown.count('{"name": "f"}') == text.count('{"name": "f"}')
    assert len(text) - len(shown) <= len(calls) * len(f"{OPEN}{NOW}{CLOSE};")
    assert (shown == text) == (not calls)


def test_the_work_is_linear() -> None:
    """A call of 300,000 pieces took a minute and more; one of 300 takes as long for each of them."""
    pieces = [OPEN, '{"name": "f", "arguments": {"text": "', *["abcdefgh "] * 300_000, '"}}', CLOSE]
    started = time.process_time()
    assert len(found(pieces)[1][0].arguments) > 2_700_000
    assert found([OPEN * 100_000 + CLOSE]) == (OPEN * 100_000 + CLOSE, [])
    assert len(found([NOW * 50_000], "llama3_json")[1]) == 50_000
    held = "".join([OPEN, '{"arguments": {"text": "', *["abcdefgh "] * 300_000, '"}, "name": "f"}', CLOSE])
    assert found([held]) == found([held[at : at + 9] for at in range(0, len(held), 9)]) == (held, [])
    assert time.process_time() - started < 10


def said(text: str, finished: Finished = STOP, **fields: object) -> Json:
    answer, _ = whole(asking(True, **{"tool_call_parser": "hermes", **fields}))
    give(answer, 0, [7], text, finished)
    (choice,) = body(answer)["choices"]
    return dict(choice)


def test_whole_answers() -> None:
    choice = said(f"I look.{BERN}{TIME}")
    first, second = choice["message"].pop("tool_calls")
    assert choice["message"] == {**SAID_NOTHING, "role": "assistant", "content": "I look."}
    assert first["function"] == {"name": "weather", "arguments": '{"city": "Bärn"}'}
    assert (second["type"], second["function"]["name"]) == ("function", "time")
    assert len({first["id"], second["id"]}) == 2
    assert choice["finish_reason"] == "tool_calls"


def test_whole_answers_without_calls() -> None:
    choice = said("Hello")
    assert choice["message"] == {**SAID_NOTHING, "role": "assistant", "content": "Hello"}
    assert choice["finish_reason"] == "stop"
    assert said(BERN, LENGTH)["finish_reason"] == "length"
    assert said(BERN)["message"]["content"] is None


def test_one_call_is_enough_where_they_may_not_be_parallel() -> None:
    (call,) = said(BERN + TIME, parallel_tool_calls=False)["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"


THOUGHT: list[tuple[str, str, str | None, list[str]]] = [
    (f"hm</think>{BERN}", "hm", None, ["weather"]),
    (f"hm {TIME}", "hm ", None, ["time"]),  # a call ends the reasoning
    (f"<think>hm {TIME}</think>{BERN}", "hm ", None, ["time", "weather"]),
    (f"hm {TIME}\n</think>\nSo.", "hm ", "\n\nSo.", ["time"]),
    (f"hm {TIME.removesuffix(CLOSE)}", "hm ", None, ["time"]),
    (f"I could use <tool_call> here {TIME}", "I could use <tool_call> here ", None, ["time"]),
    ("I could use <tool_call>.</think>Yes", "I could use <tool_call>.", "Yes", []),
    ("no <tool_call>x</tool_call> call</think>Yes", "no <tool_call>x</tool_call> call", "Yes", []),
    ("a <tool_call>{", "a <tool_call>{", None, []),
]


@pytest.mark.parametrize(("text", "reasoning", "content", "names"), THOUGHT)
def test_a_call_that_begins_in_the_reasoning_ends_it(
    text: str, reasoning: str, content: str | None, names: list[str]
) -> None:
    choice = said(text, begins_with_reasoning=True)
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == (reasoning, content)
    assert [call["function"]["name"] for call in message.get("tool_calls", ())] == names
    assert choice["finish_reason"] == ("tool_calls" if names else "stop")
    for size in (1, 7):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        choices = streamed_choices(pieces, begins_with_reasoning=True)
        assert "".join(choice["delta"].get("reasoning", "") for choice in choices) == reasoning
        assert "".join(choice["delta"].get("content", "") for choice in choices) == (content or "")
        assert [call["function"]["name"] for call in put_together(choices)] == names
        assert choices[-1]["finish_reason"] == ("tool_calls" if names else "stop")


def test_without_a_parser_of_calls_the_reasoning_goes_on() -> None:
    choice = said(f"hm {TIME}</think>Yes", begins_with_reasoning=True, tool_call_parser="")
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (f"hm {TIME}", "Yes")


@given(
    st.lists(
        st.sampled_from([OPEN, CLOSE, TIME, "</think>", "<think>", '{"name": "f"}', "<", "tool", "%"]), max_size=8
    ),
    st.data(),
)
def test_cuts_change_nothing_of_reasoning_with_calls(words: list[str], data: st.DataObject) -> None:
    def split(pieces: list[str]) -> tuple[str, str, list[Call]]:
        splitter = Splitter(ReasoningParser(), TOOL_PARSERS["hermes"], TOOLS)
        said = [*(splitter.push(piece) for piece in pieces), splitter.finish()]
        content, calls = joined([part for thought in said for part in thought.parts])
        return "".join(thought.reasoning for thought in said), content + "".join(t.rest for t in said), calls

    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    reasoning, content, calls = split(pieces)
    assert (reasoning, content, calls) == split([text])
    assert (reasoning + content).count("%") == text.count("%")
    assert (reasoning + content).count("f") == text.count("f")


def streamed_choices(pieces: list[str], parser: str = "hermes", **fields: object) -> list[dict[str, Any]]:
    answer, events, _ = streamed(asking(True, **{"tool_call_parser": parser, **fields}))
    for piece in pieces:
        give(answer, 0, [7], piece)
    give(answer, 0, [2], "", STOP)
    return [chunk["choices"][0] for chunk in chunks(events, True)][1:]


def put_together(choices: list[dict[str, Any]]) -> list[Json]:
    """The calls of a stream, as OpenAI's clients put them together: each part goes to the call of its index."""
    calls = list[Json]()
    for part in (part for choice in choices for part in choice["delta"].get("tool_calls", ())):
        if part["index"] == len(calls):
            assert set(part) == {"index", "id", "type", "function"}
            assert set(part["function"]) == {"name", "arguments"}
            calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
        else:
            assert part == {"index": len(calls) - 1, "function": {"arguments": part["function"]["arguments"]}}
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return calls


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_streamed_answers(size: int) -> None:
    text = f"I look.\n{BERN}\n{TIME}"
    choices = streamed_choices([text[at : at + size] for at in range(0, len(text), size)])
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "I look.\n"
    assert put_together(choices) == said(text)["message"]["tool_calls"]
    assert [choice["finish_reason"] for choice in choices][-2:] == [None, "tool_calls"]


def test_the_official_clients_helper_puts_a_stream_together() -> None:
    """Its state takes each chunk as it comes; ids, names and arguments are those of the whole answer."""
    text = f"hm</think>I look.\n{BERN}\n{TIME}"
    answer, events, _ = streamed(asking(True, tool_call_parser="hermes", begins_with_reasoning=True))
    state = ChatCompletionStreamState()
    for at in range(0, len(text), 3):
        give(answer, 0, [7], text[at : at + 3])
    give(answer, 0, [2], "", STOP)
    for chunk in chunks(events, True):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    (choice,) = state.get_final_completion().choices
    expected = said(text, begins_with_reasoning=True)["message"]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", expected["content"])
    found = [
        (call.id, call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()
    ]
    assert found == [
        (call["id"], call["type"], call["function"]["name"], call["function"]["arguments"])
        for call in expected["tool_calls"]
    ]
    assert re.fullmatch("chatcmpl-tool-[0-9a-f]{16}", found[0][0]), "vLLM's form"


def test_reasoning_can_be_left_out_beside_calls() -> None:
    message = said(f"hm {BERN}", begins_with_reasoning=True, include_reasoning=False)["message"]
    assert not message.get("reasoning")
    assert message["content"] is None
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


def test_arguments_are_sent_as_they_come() -> None:
    """The name and the id first, then each part of the arguments, also where the model writes parameters between tags."""

    def parts(pieces: list[str], parser: str) -> list[Any]:
        deltas = [choice["delta"] for choice in streamed_choices(pieces, parser=parser)]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [set(call) for call in calls] == [{"index", "id", "type", "function"}] + [{"index", "function"}] * (
            len(calls) - 1
        )
        return [tuple(call["function"].values()) for call in calls]

    pieces = ['<tool_call>{"name": "weather", "arguments"', ': {"ci', 'ty": "B', 'ärn"', "}}", "</tool_call>"]
    assert parts(pieces, "hermes") == [("weather", '{"ci'), ('ty": "B',), ('ärn"',), ("}",)]
    pieces = ["<function=weather>\n", "<parameter=city>\nB", "är", "n\n", "</parameter>\n", "</function>"]
    assert parts(pieces, "qwen3_coder") == [("weather", '{"city":"B'), ("är",), ("n",), ('"}',)]


def test_nothing_is_sent_while_it_is_not_known_to_be_a_call() -> None:
    assert [choice["delta"] for choice in streamed_choices(["Hi", "<tool_", 'call>{"na', "x"])] == [
        {"content": "Hi"},
        {"content": '<tool_call>{"nax'},  # it was none
    ]


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
def test_what_a_stream_has_brought_is_the_same_however_its_rows_were_cut(parser: str) -> None:
    """So a stream that is taken up again at any token repeats nothing and loses nothing, also within a call."""
    text = f"hm </think>I look.{BERN}\n<function=time>\n<parameter=a>\nx\n\n</parameter></function> So."
    ask = asking(True, tool_call_parser=parser, begins_with_reasoning=True, tools=TOOLS)
    by_letter, said = Reader(ask, "id", 0), Counter[str]()
    for place, letter in enumerate(text, 1):
        said.update(shown(by_letter.push(letter, last=False)))
        at_once = Counter(shown(Reader(ask, "id", 0).push(text[:place], last=False)))
        assert said == at_once, text[:place]


def shown(said: Said) -> str:
    """All letters that were given out."""
    functions = [call["function"] for call in said.calls]
    return said.reasoning + said.content + "".join(f.get("name", "") + f["arguments"] for f in functions)
