"""The limits within which llguidance compiles grammars and computes masks, the same wherever it does, and the compiling itself.

Called where it may end the process: in children of the sandbox (runtime/sandbox/), never in a process of the mesh.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

    from meshlm.runtime.vocabulary import Vocabulary

# Each bounds work, so a grammar takes no longer than these allow: about 20 ms for the first, 7 and 12 ms of one mask for the next
# two. The time of items grows faster than their number: 20,000 of a grammar with very many readings are 350 ms.
INITIAL_LEXER_FUEL = 1_000_000
STEP_LEXER_FUEL = 100_000
STEP_MAX_ITEMS = 6_000
MAX_GRAMMAR_SIZE = 500_000  # symbols
MAX_LEXER_STATES = 50_000  # a KiB or two each, in one row


def limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )


def first_matcher(vocabulary: "Vocabulary", text: str) -> "tuple[LLMatcher, str]":
    """A matcher at the text's beginning, and why no text of the model can be of the grammar; "" where some can."""
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary.tokenizer, text, limits=limits(), log_level=0)
    words = np.empty(vocabulary.num_words, np.int32)
    first = matcher.deep_copy()
    first.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    error = (
        told(matcher.get_error())
        or vocabulary.lack(matcher.deep_copy().compute_ff_bytes())
        or told(first.get_error())
        or ("" if words.any() else "no text fits it")
    )
    return matcher, error


def told(error: str) -> str:
    """A matcher's words, for a client. It forces bytes that no token has, and then takes no other."""
    if "forced bytes: got" in error:
        return f"this model's vocabulary has no token for what must come next ({error.partition('; ')[2]})"[:300]
    return error.removesuffix("<non-verbose/>").strip()[:300]
