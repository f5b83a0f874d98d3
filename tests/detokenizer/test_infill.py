"""Prompts for filling in the middle, by tokenizers with the tokens of each format."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from meshlm.detokenizer.encode import Encoder
from meshlm.detokenizer.infill import FORMATS
from meshlm.protocol.edges.text import TextPrompt
from meshlm.runtime.errors import RequestError
from meshlm.runtime.model_files.tokenizer_files import LoadedTokenizer

WORDS = ("<s>", "a", "b", "c", "d")


def encoder(*special: str) -> tuple[Encoder, Tokenizer]:
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, "a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", *special)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Encoder(LoadedTokenizer(tokenizer, {}, frozenset(), True), {}), tokenizer


@pytest.mark.parametrize("wanted", FORMATS, ids=lambda one: one.prefix)
def test_each_format_puts_the_texts_in_its_order(wanted: tuple[str, str, str, bool]) -> None:
    prefix, suffix, middle, suffix_first = wanted
    encode, tokenizer = encoder(*filter(None, (prefix, suffix, middle)))
    found = encode.encode(TextPrompt("a b", True, "c d"))
    parts = [prefix, "a", "b", suffix, "c", "d"]
    expected = ["<s>", *(parts[3:] + parts[:3] if suffix_first else parts), *filter(None, (middle,))]
    assert [tokenizer.id_to_token(token) for token in found] == expected
    assert list(encode.encode(TextPrompt("a b", False, "c d"))) == list(found)[1:]


def test_a_tokenizer_without_such_tokens_is_a_400_that_says_so() -> None:
    encode, _ = encoder("<fim_prefix>")
    with pytest.raises(RequestError, match=r"no tokens for filling in the middle") as caught:
        encode.encode(TextPrompt("a", True, "b"))
    assert caught.value.param == "suffix"
