"""A vocabulary in which a token is a byte, for models that are too small for a real one; and a row's grammar."""

import numpy as np
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from meshlm.protocol.edges.step import StepPlan
from meshlm.protocol.extras import find_extra
from meshlm.protocol.grammar import Grammar, GrammarKind
from meshlm.runtime.model_files.tokenizer_files import LoadedTokenizer, byte_alphabet
from meshlm.runtime.vocabulary import Vocabulary
from meshlm.workers.output.grammars import Grammars

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


def apply_plan(grammars: Grammars, plan: StepPlan) -> None:
    """Rows go and come, as in an engine."""
    gone = np.frombuffer(plan.removed_rows, np.int32).tolist()
    for row in [*gone, *(new.row for new in plan.new_rows)]:
        grammars.remove_row(row)
    for new in plan.new_rows:
        if (grammar := find_extra(new.extras, Grammar)) is not None:
            grammars.add_row(new, grammar)


def of_regex(pattern: str) -> Grammar:
    return Grammar(GrammarKind.COMPILED, LLMatcher.grammar_from_regex(pattern), "guided_regex")
