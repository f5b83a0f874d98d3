"""bad_words: no text shows the word at a word's begin, in whatever tokens it is written there."""

import random
from array import array
from pathlib import Path

import pytest
from journal_bench import F0, LETTERS, Bench, admitted
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from meshlm.detokenizer.admission import producible
from meshlm.detokenizer.encode import Encoder
from meshlm.detokenizer.events import Encode, Encoded
from meshlm.protocol.edges.text import Submit, TextParams, TokenPrompt
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Handle, RequestId
from meshlm.runtime import bad_words
from meshlm.runtime.model_files import tokenizer_files

TEXT = """
Paris unhappily president cat electrocardiogram Trump Donald sex fuck zebra Wolfgang mozzarella isn't 2024 naïve 北京 Kubernetes SQL
Harry Potter Rumpelstiltskin the I qwertyuiop CamelCase xylophone anthropology 🙂 İstanbul well-known C++ .NET
"""
WORDS = TEXT.split()
BEFORE = ("", "So it is", "\n", 'He said "', "It is (", "**", "A:\n- ", "see http://")


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> tokenizer_files.LoadedTokenizer:
    return tokenizer_files.load(smollm2)


def bans(banned: tuple[tuple[int, ...], ...], ids: list[int]) -> bool:
    """Whether these tokens have one of the sequences in them."""
    return any(tuple(ids[at : at + len(word)]) == word for word in banned for at in range(len(ids)))


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("before", BEFORE)
def test_a_word_is_banned_wherever_a_text_has_it(
    loaded: tokenizer_files.LoadedTokenizer, word: str, before: str
) -> None:
    """As the tokenizer itself writes it: with a space only, it may be one token where without it is several."""
    space = " " if before.endswith("is") else ""
    ids = loaded.tokenizer.encode(f"{before}{space}{word} or so", add_special_tokens=False).ids
    assert bans(Encoder(loaded, {}).bad_words([word]), ids)


@pytest.mark.parametrize("word", ["Paris", "president", "zebra", "Donald Trump"])
def test_a_word_behind_a_space_is_banned_in_other_cuts_too(loaded: tokenizer_files.LoadedTokenizer, word: str) -> None:
    """A model that may not take a word's token takes two shorter ones."""
    banned = Encoder(loaded, {}).bad_words([word])
    text, seen = f"Ġ{word.replace(' ', 'Ġ')}", 0
    for place in range(1, len(text)):
        known = [loaded.tokenizer.token_to_id(part) for part in (text[:place], text[place:])]
        ids = [token for token in known if token is not None]
        if len(ids) == len(known):
            seen += 1
            assert bans(banned, ids), (text[:place], text[place:])
    assert seen >= 1 or " " in word
    assert len(banned) > 4


def test_other_words_may_come(loaded: tokenizer_files.LoadedTokenizer) -> None:
    banned = Encoder(loaded, {}).bad_words(["the", "cat", "Paris"])
    for text in ("We bathe in a lake", " bought a category", "parish", "A concept of location.", "he's  there"):
        ids = loaded.tokenizer.encode(text, add_special_tokens=False).ids
        assert not bans(banned, ids) or text == " bought a category", text


def test_a_contraction_is_not_its_letters(loaded: tokenizer_files.LoadedTokenizer) -> None:
    (apostrophe_s,) = loaded.tokenizer.encode("'s", add_special_tokens=False).ids
    assert (apostrophe_s,) not in Encoder(loaded, {}).bad_words(["s"])


def test_a_tokenizer_that_puts_a_space_before_texts() -> None:
    """As SentencePiece's do: the word's token in the middle of a text has no space, the one at its begin has."""
    vocab = {
        token: at for at, token in enumerate(["<unk>", "▁", "▁Pa", "Pa", "ris", "▁Paris", "Paris", "\n", "a", "▁a"])
    }
    tokenizer = Tokenizer(models.WordLevel(vocab, "<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Metaspace(prepend_scheme="never")]
    )
    found = Encoder(tokenizer_files.LoadedTokenizer(tokenizer, {}, frozenset(), False), {}).bad_words(["Paris"])
    written = {tuple(map(tokenizer.id_to_token, ids)) for ids in found}
    assert {("▁Paris",), ("Paris",), ("▁Pa", "ris")} <= written


@pytest.mark.parametrize("num_words", [1, 40, 1024])
def test_a_request_takes_no_more_than_frontends_count(loaded: tokenizer_files.LoadedTokenizer, num_words: int) -> None:
    dice = random.Random(0)
    words = tuple("".join(dice.choices("etaoinshr ", k=dice.randrange(1, 60))).strip() + "x" for _ in range(num_words))
    found = Encoder(loaded, {}).bad_words(words)
    assert sum(map(len, found)) <= bad_words.num_ids(words)
    assert bad_words.num_ids(words) <= 900 * num_words


def test_words_that_the_model_has_no_logits_for_are_left_out(loaded: tokenizer_files.LoadedTokenizer) -> None:
    """A tokenizer may have added tokens beyond the model's vocabulary; an id of one would be an index outside the logits."""
    tokenizer = Tokenizer.from_str(loaded.tokenizer.to_str())
    tokenizer.add_tokens([AddedToken("<beyond>")])
    beyond = tokenizer.token_to_id("<beyond>")
    assert beyond is not None
    encoder = Encoder(loaded._replace(tokenizer=tokenizer), {})
    banned = encoder.bad_words(["<beyond>", "Paris"])
    assert any(beyond in word for word in banned)
    assert all(max(word) < beyond for word in producible(banned, beyond))
    bench, most = Bench(), len(LETTERS)
    submit = Submit(
        (Handle(1),), (RequestId("r"),), TokenPrompt(pack_i32([1])), SamplingParams(), TextParams(bad_words=("x",)), 9
    )
    (encode,) = bench.says(F0, submit)
    assert isinstance(encode, Encode)
    words = ((0,), (most,), (0, most - 1), (most + 7, 0))
    _, admit = bench.event(Encoded(encode.job, array("i", [1]), bad_words=words))
    assert admitted([admit]).work.sampling.bad_words_token_ids == ((0,), (0, most - 1))
