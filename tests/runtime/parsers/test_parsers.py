"""Every parser of tool calls: by example, for any cut of the text, and without loss of text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_formats import DS, DS_CALL, DS_CLOSE, DS_END, DS_SEP, FORMATS, KIMI, KIMI_END, SAME_AS, TOOLS

from meshlm.runtime.parsers.calls import Call, joined
from meshlm.runtime.parsers.registry import TOOL_PARSERS

EXAMPLES = [(name, *example) for name, examples in FORMATS.items() for example in examples]
MARKS = ("%", "Bärn")  # of which none may be lost


def found(parser: str, pieces: list[str]) -> tuple[str, list[Call]]:
    finder = TOOL_PARSERS[parser].finder(TOOLS)
    return joined([part for piece in pieces for part in finder.push(piece)] + finder.finish())


def test_each_parser_has_examples() -> None:
    assert {*FORMATS, *SAME_AS} == set(TOOL_PARSERS)
    assert all(TOOL_PARSERS[name] is TOOL_PARSERS[other] for name, other in SAME_AS.items())


@pytest.mark.parametrize(("parser", "text", "content", "calls"), EXAMPLES)
def test_examples_whole_and_by_letter(parser: str, text: str, content: str, calls: list[Call]) -> None:
    assert found(parser, [text]) == (content, calls)
    assert found(parser, list(text)) == (content, calls)


def words_of(parser: str) -> st.SearchStrategy[str]:
    """Parts of what the parser's models write: whole and broken calls, tags, and text between."""
    whole = [text for text, _, _ in FORMATS[parser] if len(text) < 1000]
    cut = st.tuples(st.sampled_from(whole), st.integers(0, 200), st.integers(0, 200)).map(
        lambda drawn: drawn[0][drawn[1] : drawn[1] + drawn[2]]
    )
    own = TOOL_PARSERS[parser]
    parts = [*own.tags, "%", "<", "[", "{", '"', "\\", "}", "]", "\n", " ", "Bärn"]
    return st.lists(st.one_of(st.sampled_from(whole), cut, st.sampled_from(parts)), max_size=6).map("".join)


# Not of "openai", where the heads of messages are nobody's text: test_harmony.py has its own.
@pytest.mark.parametrize("parser", sorted(set(FORMATS) - {"openai"}))
@given(st.data())
def test_cuts_change_nothing_and_no_text_is_lost(parser: str, data: st.DataObject) -> None:
    text = data.draw(words_of(parser))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    shown, calls = found(parser, [text])
    assert found(parser, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]) == (shown, calls)
    if cuts:  # what was given out before a cut, too
        one, other = (TOOL_PARSERS[parser].finder(TOOLS) for _ in range(2))
        parts = [part for a, b in zip([0, *cuts], cuts) for part in one.push(text[a:b])]
        assert joined(parts) == joined(other.push(text[: cuts[-1]]))
    said = shown + "".join(call.name + call.arguments for call in calls)
    assert [said.count(mark) for mark in MARKS] == [text.count(mark) for mark in MARKS]
    assert calls or shown == text


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
# How each form that holds JSON writes a call of "weather" with these arguments.
IN_JSON = {
    "hermes": '<tool_call>{{"name": "weather", "arguments": {0}}}</tool_call>',
    "jamba": '<tool_calls>[{{"arguments": {0}, "name": "weather"}}]</tool_calls>',
    "llama3_json": '{{"name": "weather", "parameters": {0}}}',
    "mistral": "[TOOL_CALLS]weather[ARGS]{0}",
    "deepseek_v3": f"{DS}{DS_CALL}function{DS_SEP}weather\n```json\n{{0}}\n```{DS_CLOSE}{DS_END}",
    "kimi_k2": f"{KIMI}<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{{0}}<|tool_call_end|>{KIMI_END}",
}


@pytest.mark.parametrize("parser", IN_JSON)
@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=5), ANY_JSON, max_size=3), st.booleans(), st.booleans(), st.data())
def test_any_arguments_in_json(
    parser: str, arguments: dict[str, object], ascii_only: bool, as_text: bool, data: st.DataObject
) -> None:
    """Whatever the model's JSON holds, and also where it writes the arguments as a string of JSON, they arrive as they are."""
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    as_text = as_text and "arguments" in IN_JSON[parser]
    text = IN_JSON[parser].format(json.dumps(written, ensure_ascii=ascii_only) if as_text else written)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    shown, (call,) = found(parser, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])])
    assert (shown, call.name, call.arguments) == ("", "weather", written)


@pytest.mark.parametrize("parser", ["qwen3_coder", "minimax_m2", "glm45", "functiongemma", "pythonic"])
@settings(max_examples=50)
@given(st.text(max_size=30), st.data())
def test_any_text_as_an_argument(parser: str, value: str, data: st.DataObject) -> None:
    """Text in the forms that are not JSON arrives as JSON means it, whatever it holds."""
    text = {
        "qwen3_coder": f"<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>",
        "minimax_m2": f'<invoke name="weather"><parameter name="city">\n{value}\n</parameter></invoke>',
        "glm45": f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{value}</arg_value></tool_call>",
        "functiongemma": f"<start_function_call>call:weather{{city:<escape>{value}<escape>}}<end_function_call>",
        "pythonic": f"[weather(city={value!r})]",
    }[parser]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    shown, (call,) = found(parser, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])])
    assert (shown, call.name, json.loads(call.arguments)) == ("", "weather", {"city": value})
