"""Reasoning told from the answer: what a model writes before `</think>` or the like (--reasoning-parser), and its budget. Pure.

Called by parse.py and responses.py; HttpError names the field. Where the reasoning of a text ends, runtime/parsers/splitter.py says."""

from collections.abc import Mapping, Sequence
from typing import Any

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai import structured
from meshlm.frontend.openai.schema import ChatRequest, Common, CompletionRequest
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.grammar import ThinkingBudget
from meshlm.runtime.parsers import budgets, registry


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


def check_budget(request: Common, server: ServerConfig) -> None:
    """Refuses a budget where nobody would keep it."""
    if request.thinking_token_budget in (None, -1):
        return
    if why := budgets.why_none(server.reasoning_parser):
        raise HttpError(400, f"{budgets.NAME}: not supported; {why}", budgets.NAME)


def budget_of_completion(request: CompletionRequest, server: ServerConfig) -> ThinkingBudget | None:
    """The budget of a completion, whose prompt or answer may open reasoning. No other constraint knows where that ends."""
    if (num_tokens := request.thinking_token_budget) is None or num_tokens == -1:
        return None
    if request.use_beam_search or structured.grammar(request, server) is not None:
        name = "use_beam_search" if request.use_beam_search else "another constraint of a completion's text"
        raise HttpError(400, f"{budgets.NAME}: does not go with {name}", budgets.NAME)
    return budgets.of_prompt(server.reasoning_parser, num_tokens)


def budget_of_chat(request: ChatRequest, server: ServerConfig, is_opened: bool) -> ThinkingBudget | None:
    """The budget of a chat's answer, which begins with reasoning."""
    if (num_tokens := request.thinking_token_budget) is None or num_tokens == -1:
        return None
    if request.use_beam_search:
        raise HttpError(400, f"{budgets.NAME}: does not go with use_beam_search", budgets.NAME)
    return budget(server, num_tokens, is_opened)
