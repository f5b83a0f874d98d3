"""Decoding, stop strings and tokenizers: nothing is emitted half, and the whole is what the library decodes."""

import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.detokenizer import tokenizer_files
from meshlm.detokenizer.decode import TokenTable
from meshlm.detokenizer.encode import Encoder
from meshlm.detokenizer.stops import StopFinder
from meshlm.detokenizer.templates import ChatTemplate
from meshlm.protocol.text_edge import ChatPrompt, TextPrompt
from meshlm.runtime.errors import RequestError

TEXTS = [
    "Hello  world, it's 2024!",
    "\n\n  été 你好 🙂 👩‍👩‍👧",
    "def f(x):\n\treturn x**2",
    "<|im_start|>user\nhi<|im_end|>\n",
]


@pytest.fixture(scope="module")
def table(smollm2: Path) -> TokenTable:
    return TokenTable(tokenizer_files.load(smollm2))


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> tokenizer_files.LoadedTokenizer:
    return tokenizer_files.load(smollm2)


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_again(loaded: tokenizer_files.LoadedTokenizer, text: str) -> None:
    ids = loaded.tokenizer.encode(text).ids
    assert loaded.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_are_single_tokens(loaded: tokenizer_files.LoadedTokenizer) -> None:
    assert loaded.tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(17, 49151), max_size=60))
def test_piece_by_piece_is_the_whole(table: TokenTable, ids: list[int]) -> None:
    decoder = table.decoder(skip_special_tokens=True)
    pieces = [decoder.push(token) for token in ids] + [decoder.finish()]
    assert "".join(pieces) == table.tokenizer.decode(ids, skip_special_tokens=True)


def test_half_a_character_waits(table: TokenTable) -> None:
    ids = table.tokenizer.encode("🦜").ids
    assert len(ids) > 1
    decoder = table.decoder(skip_special_tokens=True)
    assert [decoder.push(token) for token in ids] == [""] * (len(ids) - 1) + ["🦜"]


def test_bytes_are_kept_of_cut_characters_alone(table: TokenTable) -> None:
    """A large vocabulary's would take as much memory as its texts."""
    assert set(table.cut) == {token for token, text in enumerate(table.text) if text is None}
    assert 0 < len(table.cut) < len(table) // 50
    for token in range(len(table)):
        text, data = table.show(token)
        assert data.decode("utf-8", "replace") == text


@given(
    st.lists(st.text("abc", max_size=4), max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_is_found_wherever_the_pieces_are_cut(pieces: list[str], stops: list[str]) -> None:
    finder = StopFinder(tuple(stops), include=False)
    shown = ""
    for piece in pieces:
        shown += finder.push(piece)
        if finder.matched is not None:
            break
    whole = "".join(pieces)
    ends = [at + len(stop) for stop in stops if (at := whole.find(stop)) >= 0]
    if not ends:
        assert finder.matched is None
        assert shown + finder.finish() == whole
    else:
        assert finder.matched is not None
        assert all(stop not in shown for stop in stops)
        assert whole.startswith(shown + finder.matched)


def test_include_shows_the_stop_string() -> None:
    finder = StopFinder(("END",), include=True)
    assert finder.push("one E") == "one "
    assert finder.push("ND two") == "END"


def test_template_error_names_messages() -> None:
    template = ChatTemplate("{{ raise_exception('no such role') }}", {})
    with pytest.raises(RequestError, match="no such role") as error:
        template.render([], None, {}, add_generation_prompt=True, continue_final_message=False)
    assert error.value.param == "messages"


def test_continue_final_message_cuts_after_it() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    template = ChatTemplate(source, {})
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Once upon"}]
    text = template.render(messages, None, {}, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>x</s><assistant>Once upon"


def test_sandbox_holds() -> None:
    template = ChatTemplate("{{ ''.__class__.__mro__ }}", {})
    with pytest.raises(RequestError):
        template.render([], None, {}, add_generation_prompt=True, continue_final_message=False)


SHOW = (
    "{% for m in messages %}[{{ m.content }}]"
    "{% for c in m.tool_calls or () %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"content": "a"}, "[a]"),
        ({"content": [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]}, "[a\nb\nc]"),
        ({"content": None}, "[]"),
        ({}, "[]"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": '{"city":"Bern"}'}}]}, "[]Bern"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": {"city": "Bern"}}}]}, "[]Bern"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": ""}}]}, "[]"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": None}}]}, "[]"),
        ({"tool_calls": [{"function": {"name": "f"}}]}, "[]"),
    ],
)
def test_messages_as_templates_expect_them(
    loaded: tokenizer_files.LoadedTokenizer, message: dict[str, object], shown: str
) -> None:
    prompt = ChatPrompt(msgspec.json.encode([{"role": "assistant", **message}]))
    assert Encoder(loaded, {"default": SHOW}).render(prompt) == shown


def test_arguments_that_are_no_json_are_refused(loaded: tokenizer_files.LoadedTokenizer) -> None:
    calls = [{"function": {"name": "weather", "arguments": "{"}}]
    prompt = ChatPrompt(msgspec.json.encode([{"role": "assistant", "tool_calls": calls}]))
    with pytest.raises(RequestError, match="arguments of 'weather'") as error:
        Encoder(loaded, {"default": SHOW}).render(prompt)
    assert error.value.param == "messages"


def test_empty_tool_calls_are_none_and_reasoning_has_the_name_that_templates_know(
    loaded: tokenizer_files.LoadedTokenizer,
) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [], "reasoning": "so"}
    show = "{{ messages[0].tool_calls is defined }} {{ messages[0].reasoning_content }}"
    assert Encoder(loaded, {"default": show}).render(ChatPrompt(msgspec.json.encode([message]))) == "False so"


def test_arguments_that_are_no_text_are_refused(loaded: tokenizer_files.LoadedTokenizer) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": 3}}]}
    with pytest.raises(RequestError, match="arguments of 'weather'"):
        Encoder(loaded, {"default": SHOW}).render(ChatPrompt(msgspec.json.encode([message])))


def test_other_threads_run_while_a_prompt_is_encoded(loaded: tokenizer_files.LoadedTokenizer) -> None:
    """Else a long prompt would stop all streams."""
    prompt = TextPrompt(" ".join(f"{number:x}" for number in range(100_000)))
    thread = threading.Thread(target=Encoder(loaded, {}).encode, args=(prompt,))
    turns = 0
    thread.start()
    while thread.is_alive():
        thread.join(0.001)
        turns += 1
    assert turns > 10


@pytest.mark.parametrize("byte_level", [True, False])
def test_tags_that_are_special_tokens_can_be_kept(table: TokenTable, byte_level: bool) -> None:
    """Else the frontend would never see that a call begins."""
    ids = table.tokenizer.encode("<|im_start|>a b<|im_end|>").ids
    table.byte_level = byte_level
    try:
        for keep, text in (((), "a b"), (("<|im_end|>", "<none>"), "a b<|im_end|>")):
            decoder = table.decoder(True, keep)
            assert "".join(map(decoder.push, ids)) + decoder.finish() == text
            assert decoder.texts is None or decoder.texts is table.decoder(True, keep).texts
        whole = table.decoder(False, ())
        assert "".join(map(whole.push, ids)) + whole.finish() == "<|im_start|>a b<|im_end|>"
    finally:
        table.byte_level = True
