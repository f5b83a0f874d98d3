"""`thinking_token_budget` of requests: the most tokens that reasoning has. Pure; HttpError names the field. Called by parse.py."""

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai import reasoning, structured
from meshlm.frontend.openai.schema import ChatRequest, Common, CompletionRequest
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.grammar import ThinkingBudget
from meshlm.runtime.parsers import budgets


def check(request: Common, server: ServerConfig) -> None:
    """Refuses a budget where nobody would keep it."""
    if request.thinking_token_budget in (None, -1):
        return
    if why := budgets.why_none(server.reasoning_parser):
        raise HttpError(400, f"{budgets.NAME}: not supported; {why}", budgets.NAME)


def of_completion(request: CompletionRequest, server: ServerConfig) -> ThinkingBudget | None:
    """The budget of a completion, whose prompt or answer may open reasoning. No other constraint knows where that ends."""
    if (num_tokens := request.thinking_token_budget) is None or num_tokens == -1:
        return None
    if request.use_beam_search or structured.grammar(request, server) is not None:
        name = "use_beam_search" if request.use_beam_search else "another constraint of a completion's text"
        raise HttpError(400, f"{budgets.NAME}: does not go with {name}", budgets.NAME)
    return budgets.of_prompt(server.reasoning_parser, num_tokens)


def of_chat(request: ChatRequest, server: ServerConfig, is_opened: bool) -> ThinkingBudget | None:
    """The budget of a chat's answer, which begins with reasoning."""
    if (num_tokens := request.thinking_token_budget) is None or num_tokens == -1:
        return None
    if request.use_beam_search:
        raise HttpError(400, f"{budgets.NAME}: does not go with use_beam_search", budgets.NAME)
    return reasoning.budget(server, num_tokens, is_opened)
