"""Strict tools as a mask: which texts a model may write with a parser."""

from typing import Any

import msgspec
from llguidance import LLMatcher

from meshlm.detokenizer import grammars as detokenizer
from meshlm.detokenizer.grammar_cache import GrammarCache
from meshlm.frontend.openai import tool_choice
from meshlm.frontend.openai.schema import ChatRequest
from meshlm.protocol.config import ServerConfig
from meshlm.runtime.vocabulary import Vocabulary

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "time"}},
]


def matcher(vocabulary: Vocabulary, parser: str, reasoning: str = "", **fields: Any) -> LLMatcher:
    server = ServerConfig(enable_auto_tool_choice=True, tool_call_parser=parser, reasoning_parser=reasoning)
    request = msgspec.convert({"messages": [], "tools": TOOLS, **fields}, ChatRequest)
    grammar = tool_choice.grammar(tool_choice.read(request), request, server)
    assert grammar is not None
    return LLMatcher(vocabulary.tokenizer, GrammarCache(detokenizer.Grammars({}).translated).compile(grammar).text)


def takes(made: LLMatcher, vocabulary: Vocabulary, text: str) -> bool:
    """Whether a model may write all of this text, and end it there."""
    tokens = vocabulary.tokens_of(text.encode())
    made.reset()
    return (
        made.validate_tokens(tokens) == len(tokens)
        and made.try_consume_tokens(tokens) == len(tokens)
        and made.is_accepting()
    )
