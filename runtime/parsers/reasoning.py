"""How models write their reasoning before an answer. Pure data; frontend/reasoning.py reads with it."""

from msgspec import Struct


class ReasoningParser(Struct, frozen=True):
    """Reasoning between two texts: what --reasoning-parser names, and what an entry point of `meshlm.reasoning_parsers` gives."""

    open: str = "<think>"
    close: str = "</think>"
    assumed: bool = (
        True  # an answer begins with reasoning, also where the opening text is the prompt's; else only behind it
    )
    switchable: bool = True  # a request's chat_template_kwargs can switch reasoning off


def between(name: str) -> ReasoningParser | None:
    """The parser that `--reasoning-parser '<a>...</a>'` spells out: reasoning stands between these two texts."""
    begin, dots, end = (part.strip() for part in name.partition("..."))
    return ReasoningParser(begin, end, assumed=False) if dots and begin and end and begin not in end else None
