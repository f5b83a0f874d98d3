"""Reasoning told from the answer: what a model writes before `</think>` or the like (--reasoning-parser). Pure.

Called by parse.py and reading.py. Where the reasoning of a text ends, runtime/parsers/splitter.py says.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from meshlm.protocol.config import ServerConfig
from meshlm.protocol.grammar import ThinkingBudget
from meshlm.runtime.parsers import registry


def tags(parser: str) -> tuple[str, ...]:
    """What may be special tokens of the model's, which its decoder must show."""
    return registry.reasoning_parser(parser).tags


def changes_content(parser: str) -> bool:
    """Whether content is not what the model writes there."""
    found = registry.reasoning_parser(parser) if parser else None
    return found is not None and bool(found.hides or found.begins_content)


def opened(parser: str, template_kwargs: Mapping[str, Any], goes_on: bool) -> bool:
    """Whether reasoning that an answer begins with has been opened before it."""
    return goes_on or registry.reasoning_parser(parser).opens_in_prompt(template_kwargs)


def budget(server: ServerConfig, num_tokens: int, is_opened: bool) -> ThinkingBudget:
    """The budget of an answer that begins with reasoning."""
    found = registry.reasoning_parser(server.reasoning_parser)
    return ThinkingBudget(num_tokens, found.close, "" if is_opened else found.open, found.assumed or is_opened)


def before_grammar(server: ServerConfig, is_opened: bool, goes_on: bool) -> tuple[str, str]:
    """What stands around the reasoning of an answer that begins with it: its grammar begins behind. No opening text where there is
    reasoning without one."""
    if server.structured_outputs.enable_in_reasoning:
        return "", ""
    found = registry.reasoning_parser(server.reasoning_parser)
    if found.channels:
        return "", "" if goes_on else found.close
    return "" if is_opened or found.assumed else found.open, found.close


def begins(
    parser: str, template_kwargs: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], goes_on: bool
) -> bool:
    """Whether an answer begins with reasoning, or may do so. `goes_on`: it is the rest of the last message."""
    if not parser:
        return False
    found = registry.reasoning_parser(parser)
    if goes_on and not found.channels:
        before = messages[-1].get("content")
        return isinstance(before, str) and found.open in before and found.close not in before
    return found.reasons(template_kwargs)


def fields(reasoning: str) -> dict[str, str]:
    """The reasoning by vLLM's name and by the older one, which many clients read."""
    return {"reasoning": reasoning, "reasoning_content": reasoning}
