"""Every parser of tool calls: by example, for any cut of the text, and without loss of text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_formats import FORMATS, SAME_AS, TOOLS

from meshlm.runtime.parsers.calls import Call
from meshlm.runtime.parsers.registry import TOOL_PARSERS

EXAMPLES = [(name, *example) for name, examples in FORMATS.items() for example in examples]
MARKS = ("%", "Bärn")  # of which none may be lost


def found(parser: str, pieces: list[str]) -> tuple[str, list[Call]]:
    finder, shown, calls = TOOL_PARSERS[parser].finder(TOOLS), "", list[Call]()
    for piece in pieces:
        text, more = finder.push(piece)
        shown, calls = shown + text, calls + more
    text, more = finder.finish()
    return shown + text, calls + more


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
    parts = [*own.tags, *(own.around or ()), "%", "<", "[", "{", '"', "\\", "}", "]", "\n", " ", "Bärn"]
    return st.lists(st.one_of(st.sampled_from(whole), cut, st.sampled_from(parts)), max_size=6).map("".join)


@pytest.mark.parametrize("parser", FORMATS)
@given(st.data())
def test_cuts_change_nothing_and_no_text_is_lost(parser: str, data: st.DataObject) -> None:
    text = data.draw(words_of(parser))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    shown, calls = found(parser, [text])
    assert found(parser, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]) == (shown, calls)
    said = shown + "".join(call.name + call.arguments for call in calls)
    assert [said.count(mark) for mark in MARKS] == [text.count(mark) for mark in MARKS]
    assert calls or shown == text
