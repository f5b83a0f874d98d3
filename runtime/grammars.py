"""The limits within which llguidance compiles grammars and computes masks, the same for detokenizers and workers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# Each bounds work, so a grammar takes no longer than these allow: about 20 ms for the first, 7 and 5 ms of one mask for the next two.
INITIAL_LEXER_FUEL = 1_000_000
STEP_LEXER_FUEL = 100_000
STEP_MAX_ITEMS = 20_000
MAX_GRAMMAR_SIZE = 500_000  # symbols


def limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )
