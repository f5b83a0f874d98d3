"""Budgets of reasoning (`thinking_token_budget`): what a reasoning parser's texts make of a number of tokens. Pure.

Called by frontends and by `LLM`; the worker's matcher keeps the budget, as the closing text is forced behind it.
"""

from msgspec.structs import replace

from meshlm.protocol.grammar import Grammar, GrammarKind, ThinkingBudget
from meshlm.runtime.parsers import registry

NAME = "thinking_token_budget"


def why_none(parser: str) -> str:
    """Why reasoning cannot have a budget; "" where it can."""
    if not parser:
        return "the server tells no reasoning (--reasoning-parser)"
    found = registry.reasoning_parser(parser)
    if found.channels:
        return "gpt-oss' channels have none; reasoning_effort says how much the model thinks"
    return f"--reasoning-parser {parser} shows the reasoning as content" if found.begins_content else ""


def of_prompt(parser: str, num_tokens: int) -> ThinkingBudget:
    """The budget of an answer whose prompt nobody here has rendered: the detokenizer sees in its text whether reasoning is open."""
    found = registry.reasoning_parser(parser)
    return ThinkingBudget(num_tokens, found.close, found.open, assumed=False, in_prompt=True)


def seen(budget: ThinkingBudget, prompt: str) -> ThinkingBudget:
    """The budget behind this prompt."""
    if not budget.in_prompt:
        return budget
    is_open = prompt.rfind(budget.open) > prompt.rfind(budget.close)
    return ThinkingBudget(budget.num_tokens, budget.close, "" if is_open else budget.open, assumed=is_open)


def alone(budget: ThinkingBudget) -> Grammar:
    """Any text, whose reasoning has the budget."""
    return replace(Grammar(GrammarKind.FREE, "", NAME), thinking=budget)
