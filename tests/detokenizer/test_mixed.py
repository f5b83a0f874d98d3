"""Chats with vectors in them: where the vectors stand among the tokens, and what is left of them when the prompt is cut."""

from array import array

import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from meshlm.detokenizer.admission import left_extras
from meshlm.detokenizer.encode import Encoder
from meshlm.protocol.edges.text import ChatPrompt, MediaPrompt, Submit, TextParams, TextPrompt
from meshlm.protocol.extras import find_extra
from meshlm.protocol.prompt_embeds import PromptEmbeds, mark
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import RequestId
from meshlm.runtime.errors import RequestError
from meshlm.runtime.model_files.tokenizer_files import LoadedTokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} end {% endfor %}"
LAST_FIRST = "{% for m in messages | reverse %}{{ m.role }} {{ m.content }} end {% endfor %}"
WORDS = ("user", "end", "a", "b", "c", ":", "<", ">", "prompt_embeds", "0")


def vectors(*ids: int) -> PromptEmbeds:
    """As many vectors as ids, of one number of four bytes each."""
    data = b"".join(bytes([token] * 4) for token in ids)
    return PromptEmbeds("float32", ((0, len(ids)),), data, array("i", ids).tobytes())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="a"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return found


def encoder_of(tokenizer: Tokenizer, template: str = TEMPLATE) -> Encoder:
    return Encoder(LoadedTokenizer(tokenizer, {}, frozenset(), False), {"default": template})


def chat(*contents: str, embeds: tuple[PromptEmbeds, ...]) -> MediaPrompt:
    messages = [{"role": "user", "content": content} for content in contents]
    return MediaPrompt(ChatPrompt(msgspec.json.encode(messages)), embeds)


def test_vectors_stand_where_their_parts_do(tokenizer: Tokenizer) -> None:
    prompt = chat(f"a {mark(0)} b", f"{mark(1)} c", embeds=(vectors(7, 8), vectors(9)))
    ids, embeds = encoder_of(tokenizer).encode_mixed(prompt)
    assert list(ids) == [0, 2, 7, 8, 3, 1, 0, 9, 4, 1]
    assert embeds == PromptEmbeds("float32", ((2, 2), (7, 1)), bytes([7] * 4 + [8] * 4 + [9] * 4))


def test_a_template_may_move_messages(tokenizer: Tokenizer) -> None:
    prompt = chat(f"a {mark(0)}", f"b {mark(1)}", embeds=(vectors(7, 8), vectors(9)))
    ids, embeds = encoder_of(tokenizer, LAST_FIRST).encode_mixed(prompt)
    assert list(ids) == [0, 3, 9, 1, 0, 2, 7, 8, 1]
    assert (embeds.spans, embeds.data) == (((2, 1), (6, 2)), bytes([9] * 4 + [7] * 4 + [8] * 4))
    digests = chat(f"a {mark(0)}", f"b {mark(1)}", embeds=(vectors(7, 8).with_digests(), vectors(9).with_digests()))
    _, made = encoder_of(tokenizer, LAST_FIRST).encode_mixed(digests)
    assert made.digests == embeds.with_digests().digests, "each vector's own goes with it"


def test_elsewhere_the_placeholder_is_text(tokenizer: Tokenizer) -> None:
    encoder = encoder_of(tokenizer)
    encoder.encode_mixed(chat(mark(0), embeds=(vectors(7),)))
    assert list(encoder.encode(TextPrompt("<prompt_embeds>"))) == [6, 8, 7]


@pytest.mark.parametrize(
    ("template", "content"),
    [
        (TEMPLATE, f"{mark(0)} {mark(0)}"),  # a client that writes a mark
        (TEMPLATE, f"{mark(0)} {mark(1)}"),
        (TEMPLATE, f"{mark(0)} <prompt_embeds>"),
        ("{{ messages[0].role }}", mark(0)),
    ],
)
def test_vectors_are_neither_lost_nor_doubled(tokenizer: Tokenizer, template: str, content: str) -> None:
    with pytest.raises(RequestError) as caught:
        encoder_of(tokenizer, template).encode_mixed(chat(content, embeds=(vectors(7),)))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("keep", "side", "spans", "data"),
    [
        (10, "left", ((2, 3), (7, 1)), b"abcd"),
        (6, "left", ((0, 1), (3, 1)), b"cd"),
        (4, "right", ((2, 2),), b"ab"),
        (2, "right", None, None),
    ],
)
def test_a_cut_prompt_keeps_its_vectors_in_their_places(
    keep: int, side: str, spans: tuple[tuple[int, int], ...] | None, data: bytes | None
) -> None:
    embeds = PromptEmbeds("float32", ((2, 3), (7, 1)), b"".join(bytes([letter] * 4) for letter in b"abcd"))
    text = TextParams(truncate_prompt_tokens=keep, truncation_side=side)
    submit = Submit((), (RequestId("r"),), TextPrompt("a"), SamplingParams(), text)
    left = find_extra(left_extras((embeds,), 10, keep, submit), PromptEmbeds)
    assert (left.spans if left else None) == spans
    assert (left.data[::4] if left else None) == data
