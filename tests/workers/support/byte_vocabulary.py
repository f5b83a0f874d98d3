"""A vocabulary in which a token is a byte, for models that are too small for a real one; and a row's grammar."""

from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from meshlm.protocol.grammar import Grammar, GrammarKind
from meshlm.runtime.model_files.tokenizer_files import LoadedTokenizer, byte_alphabet
from meshlm.runtime.vocabulary import Vocabulary

EOS = 2


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    size = min(vocab_size, 256)
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(size)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_vocabulary(vocab_size: int) -> Vocabulary:
    tokenizer = byte_tokenizer(vocab_size)
    return Vocabulary(LoadedTokenizer(tokenizer, {}, frozenset({EOS}), True), vocab_size, (EOS,))


def of_regex(pattern: str) -> Grammar:
    return Grammar(GrammarKind.COMPILED, LLMatcher.grammar_from_regex(pattern), "guided_regex")
