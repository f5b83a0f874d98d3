"""Strict tools: what the mask lets through of each form is text, and calls whose arguments fit."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from meshlm.detokenizer import grammars as detokenizer
from meshlm.frontend import tool_choice
from meshlm.frontend.schema import ChatRequest
from meshlm.protocol.config import ServerConfig
from meshlm.runtime import tokenizer_files
from meshlm.runtime.parsers.registry import TOOL_PARSERS
from meshlm.workers.output.vocabulary import Vocabulary

pytestmark = pytest.mark.model
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
FORMS = [name for name, parser in TOOL_PARSERS.items() if parser.structure is not None]


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> Vocabulary:
    return Vocabulary(tokenizer_files.load(smollm2), 49152, (2,))


def matcher(vocabulary: Vocabulary, parser: str, reasoning: str = "", **fields: Any) -> LLMatcher:
    server = ServerConfig(enable_auto_tool_choice=True, tool_call_parser=parser, reasoning_parser=reasoning)
    request = msgspec.convert({"messages": [], "tools": TOOLS, **fields}, ChatRequest)
    grammar = tool_choice.grammar(tool_choice.read(request), request, server)
    assert grammar is not None
    return LLMatcher(vocabulary.tokenizer, detokenizer.Grammars({}).compile(grammar).text)


def takes(made: LLMatcher, vocabulary: Vocabulary, text: str) -> bool:
    """Whether a model may write all of this text, and end it there."""
    tokens = vocabulary.tokens_of(text.encode())
    made.reset()
    return (
        made.validate_tokens(tokens) == len(tokens)
        and made.try_consume_tokens(tokens) == len(tokens)
        and made.is_accepting()
    )


def call(parser: str, name: str, arguments: object) -> str:
    form = TOOL_PARSERS[parser].structure
    assert form is not None
    number = f"0{form.number_before}" if form.number_before else ""
    return f"{form.begin.replace('NAME', name)}{number}{json.dumps(arguments)}{form.end}"


@pytest.mark.parametrize("parser", FORMS)
def test_calls_keep_to_the_schema_and_text_is_free(vocabulary: Vocabulary, parser: str) -> None:
    made = matcher(vocabulary, parser)
    bern = call(parser, "weather", {"city": "Bern", "days": 3})
    for text in ("Hello < {", bern, f"I look.\n{bern}\n{bern} So.", call(parser, "time", {"any": [1]})):
        assert takes(made, vocabulary, text), text
    for text in (call(parser, "weather", {"city": "Paris"}), call(parser, "weather", {}), call(parser, "other", {})):
        assert not takes(made, vocabulary, f"I look.\n{text}"), text


def test_forced_calls_keep_to_the_schemas(vocabulary: Vocabulary) -> None:
    made = matcher(vocabulary, "", tool_choice="required")
    assert takes(
        made, vocabulary, '[{"name": "weather", "parameters": {"city": "Rome"}}, {"name": "time", "parameters": {}}]'
    )
    for text in ("[]", '[{"name": "other", "parameters": {}}]', '[{"name": "time", "parameters": {"a": 1}}]'):
        assert not takes(made, vocabulary, text)
    named = matcher(vocabulary, "", tool_choice={"type": "function", "function": {"name": "weather"}})
    assert takes(named, vocabulary, '{"city": "Rome"}')
    assert not takes(named, vocabulary, '{"city": "Paris"}')


def test_a_forced_call_of_gpt_oss(vocabulary: Vocabulary) -> None:
    """It stands in the model's own channels, with or without reasoning before it."""
    made = matcher(vocabulary, "openai", "openai_gptoss", tool_choice="required")
    head = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    thinks = "<|channel|>analysis<|message|>hm <b><|end|><|start|>assistant"
    for before in ("", thinks):
        assert takes(made, vocabulary, before + head + '{"city": "Bern"}')
        assert not takes(made, vocabulary, before + head + '{"city": "Paris"}')
        assert not takes(made, vocabulary, before + "<|channel|>final<|message|>Yes")
