"""What compiles a grammar in a process that may die of it: with the vocabulary, as workers do, and with some of its masks.

`make` runs once in the fork server of grammar_cache.py: it loads the vocabulary, which takes a second or more and no process of the
mesh waits for. Each child then compiles one grammar. What passes is what a worker is given: it compiled within limits narrower than the
worker's, and the masks of a text that was drawn from it were made in time.
"""

from pathlib import Path

import msgspec
import numpy as np

from meshlm.detokenizer.decode import TokenTable
from meshlm.detokenizer.grammar_threads import GrammarChild
from meshlm.detokenizer.grammars import Grammars
from meshlm.detokenizer.spelling import Spelling
from meshlm.protocol.grammar import Grammar
from meshlm.runtime.grammars import first_matcher
from meshlm.runtime.model_files import tokenizer_files
from meshlm.runtime.sandbox.fork_server import Handle, answering
from meshlm.runtime.vocabulary import Vocabulary

NUM_DRAWN = 24  # tokens of a text, whose masks are made


def make(argument: bytes) -> Handle:
    model = msgspec.msgpack.decode(argument, type=GrammarChild)
    loaded = tokenizer_files.load(Path(model.tokenizer_path))
    table = TokenTable(loaded)
    special = {table.text[token] or "": token for token in table.special if token < len(table)}
    spelling = Spelling(table)
    spelling.can_write("\u00e9")  # gathers its bytes
    grammars = Grammars(special, may_end=bool(model.eos), can_write=spelling.can_write)
    vocabulary = Vocabulary(loaded, model.vocab_size, model.eos) if model.eos else None

    def translated(job: bytes) -> bytes:
        text, error = grammars.translated(msgspec.msgpack.decode(job, type=Grammar))
        if not error and vocabulary is not None:
            error = tried(vocabulary, text)
        return msgspec.msgpack.encode(("" if error else text, error))

    return answering(translated)


def tried(vocabulary: Vocabulary, text: str) -> str:
    """Compiles it for the vocabulary and draws the beginning of a text from it; what is wrong with that. An early end is in order."""
    matcher, error = first_matcher(vocabulary, text)
    if error:
        return error
    dice = np.random.default_rng(0)
    words = np.empty(vocabulary.num_words, np.int32)
    for _ in range(NUM_DRAWN):
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if matcher.is_error() or not len(allowed) or not matcher.consume_token(int(dice.choice(allowed))):
            break  # a text may meet a limit when some of it is there; then its request ends with an error
        if matcher.is_stopped():
            break
    return ""
