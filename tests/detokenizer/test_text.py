"""Decoding, stop strings and tokenizers: nothing is emitted half, and the whole is what the library decodes."""

import json
import threading
import time
from array import array
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from meshlm.detokenizer.batch import positions, prompt_logprobs_of
from meshlm.detokenizer.decode import TokenTable, _ByteDecoder
from meshlm.detokenizer.encode import Encoder
from meshlm.detokenizer.request_state import RequestState
from meshlm.detokenizer.stops import StopFinder
from meshlm.detokenizer.templates import ChatTemplate
from meshlm.protocol.edges.text import ChatPrompt, PromptLogprobs, Submit, TextPrompt
from meshlm.protocol.edges.token import LogprobColumns
from meshlm.protocol.logprobs import num_bytes_of_prompt, positions_of
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_f32, pack_i32
from meshlm.protocol.wire.ids import Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.errors import ProcessFatal, RequestError
from meshlm.runtime.model_files import tokenizer_files

TEXTS = [
    "Hello  world, it's 2024!",
    "\n\n  été 你好 🙂 👩‍👩‍👧",
    "def f(x):\n\treturn x**2",
    "<|im_start|>user\nhi<|im_end|>\n",
]


SUBMIT = Submit((Handle(1),), (RequestId("r"),), TextPrompt("a"), SamplingParams(logprobs=0))


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
        assert data.decode("utf-8", "replace").rstrip("\ufffd") == text.rstrip("\ufffd")


def shown(table: TokenTable, ids: list[int]) -> list[str]:
    """Each token's text, as logprobs name it."""
    return [table.show(token, table.pending(array("i", ids[max(0, at - 3) : at])))[0] for at, token in enumerate(ids)]


@pytest.mark.parametrize("text", [*TEXTS, "🦜🦜", "龍の🐉", "a🏴\U000e0067\U000e0062b", "𒀀𒀁 x"])
def test_the_texts_of_tokens_are_the_text(table: TokenTable, text: str) -> None:
    """A token that ends a character has all of it, the tokens before it nothing of it."""
    texts = shown(table, table.tokenizer.encode(text).ids)
    assert "".join(texts) == text
    assert not any("\ufffd" in part for part in texts)


def test_an_alternative_ends_the_same_character(table: TokenTable) -> None:
    *begin, last = table.tokenizer.encode("🦜").ids
    others = [token for token, data in table.cut.items() if token != last and 0x80 <= data[0] < 0xC0]
    texts = [table.show(token, table.pending(array("i", begin)))[0] for token in others[:40]]
    assert any(len(text) == 1 and text != "\ufffd" for text in texts)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_the_numbers_of_characters_are_the_texts(table: TokenTable, data: st.DataObject) -> None:
    """Of any tokens, with half characters and special ones, in rows of any width."""
    cut = st.sampled_from(sorted(table.cut))
    ids = data.draw(
        st.lists(st.integers(0, len(table) - 1) | cut | st.sampled_from(sorted(table.special)), max_size=20)
    )
    request = RequestState(SUBMIT, 0, Identity(Role.FRONTEND, 0), Incarnation(1), Handle(1), [])
    request.begin(table, array("i", [1]), SUBMIT.sampling, ())
    texts, sizes, at = list[str](), list[int](), 0
    while at < len(ids):
        row = ids[at : at + data.draw(st.integers(1, 4))]
        texts += [request.push(token) for token in row]
        sizes += request.num_chars(table, len(row))
        at += len(row)
    assert sizes == [len(text) for text in texts]


def test_logprobs_have_the_texts_and_the_numbers_of_characters(table: TokenTable) -> None:
    ids = array("i", table.tokenizer.encode("a🦜 b").ids)
    num = len(ids)
    top = pack_i32(ids)
    columns = LogprobColumns(1, pack_f32([-1.0] * num), pack_i32([1] * num), top, pack_f32([-1.0] * num))
    reader = table.decoder(skip_special_tokens=True)
    found = positions(columns, ids, [len(reader.push(token)) for token in ids], table)
    assert "".join(position.token.text for position in found) == "a🦜 b"
    assert [position.num_chars for position in found] == [len(position.token.text) for position in found]
    assert [position.top[0].text for position in found] == [position.token.text for position in found]
    assert b"".join(position.token.token_bytes for position in found).decode() == "a🦜 b"
    later = positions(columns, ids, [1], table, num - 1)  # the last row of several
    assert [position.token for position in later] == [found[-1].token]


def columns_of(tops: list[list[int]]) -> LogprobColumns:
    """Of one width; the values are those that float32 holds."""
    num, width = len(tops), len(tops[0])
    flat = pack_i32(token for top in tops for token in top)
    values = pack_f32(-0.25 * number for number in range(num * width))
    return LogprobColumns(width, pack_f32(-0.5 * number for number in range(num)), pack_i32(range(num)), flat, values)


@given(st.data())
def test_a_prompts_columns_become_the_entries_that_its_texts_give(table: TokenTable, data: st.DataObject) -> None:
    """With half characters, special tokens, ids past the vocabulary's texts, and fewer likeliest tokens than columns."""
    some = st.integers(0, len(table) + 3) | st.sampled_from(sorted(table.cut)) | st.sampled_from(sorted(table.special))
    prompt = array("i", data.draw(st.lists(some, min_size=2, max_size=20)))
    width = data.draw(st.integers(0, 4))
    row = st.lists(some | st.just(-1), min_size=width, max_size=width)
    columns = columns_of(data.draw(st.lists(row, min_size=len(prompt) - 1, max_size=len(prompt) - 1)))
    reader = table.decoder(skip_special_tokens=False)
    _, *sizes = (len(reader.push(token)) for token in prompt)
    sent = msgspec.msgpack.decode(
        msgspec.msgpack.encode(prompt_logprobs_of(columns, prompt, table)), type=PromptLogprobs
    )
    assert list(positions_of(sent)) == positions(columns, prompt, sizes, table)


@pytest.mark.parametrize("cut", [False, True])
def test_a_long_prompts_logprobs_are_small_and_take_little_time(table: TokenTable, cut: bool) -> None:
    """Beside a quarter of a million entries made one after the other: in time, and beside what those take in a message."""
    num, width = 12_000, 20
    prompt = array("i", sorted(table.cut)[:1] * num if cut else [place % len(table) for place in range(num)])
    columns = columns_of([[(place + rank) % len(table) for rank in range(width)] for place in range(num - 1)])
    sizes = [0] * (num - 1)
    begun = time.process_time()
    each = positions(columns, prompt, sizes, table)
    one_by_one = time.process_time() - begun
    begun = time.process_time()
    found = prompt_logprobs_of(columns, prompt, table)
    assert time.process_time() - begun < one_by_one / 4
    size = len(msgspec.msgpack.encode(found))
    assert size < len(msgspec.msgpack.encode(each)) / 2
    assert size < num_bytes_of_prompt(found) + 1000


def test_a_token_has_the_vocabularys_own_name(table: TokenTable) -> None:
    ids = table.tokenizer.encode("Hi the🦜").ids
    assert [table.name(token) for token in ids] == [table.tokenizer.id_to_token(token) for token in ids]
    assert "Ġthe" in [table.name(token) for token in ids]


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
        template.render(ChatPrompt(b""), [])
    assert error.value.param == "messages"


def test_continue_final_message_cuts_after_it() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    template = ChatTemplate(source, {})
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Once upon"}]
    text = template.render(ChatPrompt(b"", add_generation_prompt=False, continue_final_message=True), messages)
    assert text == "<user>x</s><assistant>Once upon"


def test_sandbox_holds() -> None:
    template = ChatTemplate("{{ ''.__class__.__mro__ }}", {})
    with pytest.raises(RequestError):
        template.render(ChatPrompt(b""), [])


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


@pytest.mark.parametrize("text", ['{"city": "Be', "[", "5", '"x"', "nul", "{" * 100_000])
def test_arguments_that_max_tokens_cut_are_shown_as_text(loaded: tokenizer_files.LoadedTokenizer, text: str) -> None:
    """What the server gave out, it takes as history: as an object, for which all templates are made."""
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": text}}]}
    show = "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    prompt = ChatPrompt(msgspec.json.encode([message]))
    assert Encoder(loaded, {"default": show}).render(prompt) == f"arguments={text}"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_empty_tool_calls_are_none_and_reasoning_has_the_names_that_templates_know(
    loaded: tokenizer_files.LoadedTokenizer, name: str
) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [], name: "so"}
    show = "{{ messages[0].tool_calls is defined }} {{ messages[0].reasoning_content }} {{ messages[0].reasoning }}"
    assert Encoder(loaded, {"default": show}).render(ChatPrompt(msgspec.json.encode([message]))) == "False so so"


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
            assert byte_level == isinstance(decoder, _ByteDecoder)
            if isinstance(decoder, _ByteDecoder):  # a table for each set of tags, not for each request
                again = table.decoder(True, keep)
                assert isinstance(again, _ByteDecoder)
                assert decoder.texts is again.texts
        whole = table.decoder(False, ())
        assert "".join(map(whole.push, ids)) + whole.finish() == "<|im_start|>a b<|im_end|>"
    finally:
        table.byte_level = True


@pytest.mark.parametrize(
    ("files", "special"),
    [
        ({}, {}),
        ({"tokenizer_config": {"bos_token": "<s>", "eos_token": None}}, {"bos_token": "<s>"}),
        ({"tokenizer_config": {"sep_token": {"content": "<sep>"}, "pad_token": None}}, {"sep_token": "<sep>"}),
        (
            {"tokenizer_config": {"bos_token": "a"}, "special_tokens_map": {"bos_token": "b", "eos_token": "e"}},
            {"bos_token": "b", "eos_token": "e"},
        ),
        (
            {
                "tokenizer_config": {"bos_token": "a", "added_tokens_decoder": {}},
                "special_tokens_map": {"bos_token": "b", "eos_token": "e"},
            },
            {"bos_token": "a"},
        ),
    ],
)
def test_special_tokens_as_transformers_finds_them(
    tmp_path: Path, files: dict[str, object], special: dict[str, str]
) -> None:
    """Templates name them: without its bos_token a prompt begins differently, and nobody is told."""
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert tokenizer_files.load(tmp_path).special_tokens == special


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_a_broken_tokenizer_config_is_named(tmp_path: Path, text: str) -> None:
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(ProcessFatal, match=r"tokenizer_config.json: "):
        tokenizer_files.load(tmp_path)
