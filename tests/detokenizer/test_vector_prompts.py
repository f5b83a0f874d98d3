"""Prompts of Pool tasks: cut texts keep the tokens around them, pairs are put together as transformers does it."""

from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.detokenizer.encode import Encoder
from meshlm.detokenizer.events import Truncation
from meshlm.protocol.edges.text import JoinedPrompt, PairPrompt, TextPrompt, TokenPrompt
from meshlm.protocol.wire.columns import pack_i32
from meshlm.runtime.model_files import tokenizer_files

WORDS = st.lists(st.sampled_from(["a", "dog", "unbelievable", "naïve", "Seven", "x1", "."]), max_size=14).map(" ".join)


@pytest.fixture(scope="module")
def encoder(minilm: Path) -> Encoder:
    return Encoder(tokenizer_files.load(minilm), {}, types=True)


@pytest.fixture(scope="module")
def theirs(minilm: Path) -> object:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(minilm)


@settings(max_examples=60, deadline=None)
@given(text=WORDS, keep=st.integers(2, 12), side=st.sampled_from(["left", "right"]))
def test_a_cut_text(encoder: Encoder, theirs: object, text: str, keep: int, side: str) -> None:
    theirs.truncation_side = side  # type: ignore[attr-defined]
    expected = theirs(text, truncation=True, max_length=keep)["input_ids"]  # type: ignore[operator]
    found, second = encoder.encode_whole(TextPrompt(text), Truncation(keep, side))
    assert found.tolist() == expected
    assert second == 0


@settings(max_examples=60, deadline=None)
@given(first=WORDS, second=WORDS.filter(bool), keep=st.integers(3, 20))
def test_a_cut_pair(encoder: Encoder, theirs: object, first: str, second: str, keep: int) -> None:
    theirs.truncation_side = "right"  # type: ignore[attr-defined]
    expected = theirs(first, second, truncation=True, max_length=keep)  # type: ignore[operator]
    found, at = encoder.encode_whole(PairPrompt(first, second), Truncation(keep, "right"))
    types = [int(place >= at) for place in range(len(found))]
    assert (found.tolist(), types) == (expected["input_ids"], expected["token_type_ids"])


def test_texts_of_a_pair_are_cut_alone(encoder: Encoder) -> None:
    found, at = encoder.encode_whole(PairPrompt("one two three", "four five six", max_first=1, max_second=2), None)
    whole, _ = encoder.encode_whole(PairPrompt("one", "four five"), None)
    assert found == whole
    assert at == 3


def test_texts_and_ids_that_are_joined_are_tokenized_apart(encoder: Encoder) -> None:
    parts = (TextPrompt("one two"), TokenPrompt(pack_i32([5, 6])), TextPrompt("three", False))
    found = encoder.encode(JoinedPrompt(parts))
    assert found == sum((encoder.encode(part) for part in parts), array("i"))
    assert encoder.encode_whole(JoinedPrompt(parts), Truncation(2, "right"))[0] == found  # the core cuts it


def test_joined_texts_are_one(encoder: Encoder) -> None:
    """Models that write text take a pair as one text, cut at the side that is asked for."""
    found, at = encoder.encode_whole(PairPrompt("one ", "two", joined=True), None)
    assert (found, at) == encoder.encode_whole(TextPrompt("one two"), None)
    short, _ = encoder.encode_whole(PairPrompt("one two", "three four", joined=True, max_first=1, max_second=1), None)
    assert short == encoder.encode(TextPrompt("one three", False))
    left, _ = encoder.encode_whole(PairPrompt("one ", "two", joined=True), Truncation(2, "left"))
    assert left == found[-2:]


def test_lower_case(minilm: Path) -> None:
    """sentence-transformers' do_lower_case is for tokenizers that tell cases apart."""
    loaded = tokenizer_files.load(minilm)
    loaded.tokenizer.normalizer = None
    plain, lower = Encoder(loaded, {}), Encoder(loaded, {}, lower_case=True)
    assert (
        lower.encode(TextPrompt("The DOG"))
        == plain.encode(TextPrompt("the dog"))
        != plain.encode(TextPrompt("The DOG"))
    )
