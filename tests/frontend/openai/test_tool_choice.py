"""The schemas of forced calls hold what they must, and texts that fit them are read as calls."""

import json
from typing import Any

import jsonschema
import msgspec
import pytest
from answering import STOP, body, chunks, give, streamed, whole
from parsing import asked, body_of

from meshlm.detokenizer.grammar_cache import GrammarCache
from meshlm.detokenizer.grammars import Grammars
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai import tool_choice
from meshlm.frontend.openai.schema import ChatRequest
from meshlm.frontend.openai.tool_choice import ToolChoice
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.edges.text import ChatPrompt
from meshlm.protocol.extras import find_extra
from meshlm.protocol.grammar import Grammar, GrammarKind
from meshlm.runtime.parsers import forced_calls
from meshlm.runtime.parsers.calls import Call, Structure, ToolParser, joined
from meshlm.runtime.parsers.registry import TOOL_PARSERS

TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "leaf": {"$ref": "#/$defs/leaf"}, "const": {"type": "integer"}},
    "required": ["leaf"],
    "additionalProperties": False,
    "$defs": {"leaf": {"enum": ["#", {"$ref": "#"}]}},
}
TOOLS: dict[str, Any] = {
    "a/b~c": TREE,
    "weather": {"properties": {"city": {"type": "string"}}},
    "time": tool_choice.NO_PARAMETERS,
}
NAMED = {"type": "function", "function": {"name": "weather"}}
GOOD = [
    [{"name": "time", "parameters": {}}],
    [{"name": "weather", "parameters": {"city": "Bern"}}, {"name": "time", "parameters": {}}],
    [{"name": "a/b~c", "parameters": {"leaf": "#", "left": {"leaf": {"$ref": "#"}, "const": 1}}}],
]
BAD: list[Any] = [
    [],
    {"name": "time", "parameters": {}},
    [{"name": "other", "parameters": {}}],
    [{"name": "time", "parameters": {"x": 1}}],
    [{"name": "time"}],
    [{"name": "weather", "parameters": []}],
    [{"name": "weather", "parameters": {"city": 1}}],
    [{"name": "a/b~c", "parameters": {"leaf": "#", "left": {}}}],
    [{"name": "a/b~c", "parameters": {"leaf": "x"}}],
    [{"name": "a/b~c", "parameters": {"leaf": "#", "const": "x"}}],
]


def fits(schema: dict[str, Any], value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def test_the_schema_of_required_calls() -> None:
    choice = ToolChoice(TOOLS, required=True)
    schema = tool_choice.schema(choice)
    assert [fits(schema, value) for value in GOOD] == [True] * len(GOOD)
    assert [value for value in BAD if fits(schema, value)] == []
    one = tool_choice.schema(choice._replace(parallel=False))
    assert [fits(one, value) for value in GOOD] == [True, False, True]


def test_the_schema_of_a_named_function_is_its_own() -> None:
    schema = tool_choice.schema(ToolChoice(TOOLS, name="a/b~c"))
    assert fits(schema, {"leaf": "#"})
    assert not fits(schema, {})
    assert not fits(tool_choice.schema(ToolChoice(TOOLS, name="weather")), [])


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_a_deep_schema_is_refused(choice: object) -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"items": deep}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": deep, "strict": True}}]
    server = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")
    with pytest.raises(HttpError, match="nested"):
        asked("chat", body_of("chat", {"tools": tools, "tool_choice": choice}), server=server)


def found(parser: ToolParser, pieces: list[str]) -> tuple[str, list[Call]]:
    finder = parser.finder(TOOLS)
    return joined([part for piece in pieces for part in finder.push(piece)] + finder.finish())


@pytest.mark.parametrize("value", GOOD)
def test_required_calls_are_read(value: list[dict[str, Any]]) -> None:
    text = json.dumps(value)
    calls = [Call(call["name"], json.dumps(call["parameters"])) for call in value]
    assert found(forced_calls.REQUIRED, [text]) == found(forced_calls.REQUIRED, list(text)) == ("", calls)


def test_a_required_call_that_is_cut_is_no_content() -> None:
    """Wherever max_tokens cuts the list: what is no call yet is not shown, what is one is."""
    text = json.dumps(GOOD[1])
    for end in range(len(text)):
        for pieces in ([text[:end]], list(text[:end])):
            content, calls = found(forced_calls.REQUIRED, pieces)
            assert content == "", text[:end]
            assert [call.name for call in calls] == ["weather", "time"][: len(calls)]
            assert all(call.arguments in text for call in calls)


def test_a_named_call_is_read() -> None:
    text = ' {"city": "Bern"}'
    named = forced_calls.named("weather")
    assert found(named, [text]) == found(named, list(text)) == ("", [Call("weather", '{"city": "Bern"}')])
    assert found(named, [" "]) == ("", [])


@pytest.mark.parametrize(
    "name", [name for name, parser in TOOL_PARSERS.items() if isinstance(parser.structure, Structure)]
)
def test_a_tag_of_strict_calls_is_what_the_parser_reads(name: str) -> None:
    """The tag's text around any arguments is a call of that tool, and the trigger begins it."""
    parser = TOOL_PARSERS[name]
    assert isinstance(parser.structure, Structure)
    tag = tool_choice.structural_tag(parser.structure, ToolChoice(TOOLS), {"a/b~c"})
    begin, content, end = (tag["format"]["tags"][1][key] for key in ("begin", "content", "end"))
    assert begin.startswith(tag["format"]["triggers"][0])
    middle = "0" + content["elements"][1]["value"] if content["type"] == "sequence" else ""
    shown, (call,) = found(parser, [f"{begin}{middle}{{}}{end}"])
    assert (shown, call.name, call.arguments) == ("", "weather", "{}")
    schemas = [
        content.get("json_schema", content.get("elements", [{}])[-1].get("json_schema")) for content in [content]
    ]
    assert schemas == [{"type": "object"}]


ASKS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, (["weather", "time"], False, "")),
        ("auto", (["weather", "time"], False, "")),
        ("none", ([], False, "")),
        ("required", (["weather", "time"], True, "")),
        (NAMED, (["weather", "time"], False, "weather")),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, (["weather"], True, "")),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}, (["weather"], False, "")),
    ],
)
def test_choices(choice: object, expected: tuple[list[str], bool, str]) -> None:
    request = msgspec.convert({"messages": [], **ASKS, "tool_choice": choice}, ChatRequest)
    read = tool_choice.read(request)
    assert (list(read.tools), read.required, read.name) == expected


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
STRICT = {"tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}]}
PLAIN = ServerConfig()  # without a parser of the model's own calls
QWEN3 = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")


def grammar_of(server: ServerConfig, **fields: object) -> Grammar | None:
    return find_extra(asked("chat", body_of("chat", {**STRICT, **fields}), server=server).mesh.extras, Grammar)


def test_a_forced_choice_is_a_grammar_and_needs_no_parser() -> None:
    named = grammar_of(PLAIN, tool_choice=NAMED, response_format={"type": "json_object"})
    assert named is not None
    assert (named.kind, json.loads(named.text), named.param) == (GrammarKind.JSON_SCHEMA, SCHEMA, "tools")
    required = grammar_of(QWEN3, tool_choice="required", parallel_tool_calls=False)
    assert required is not None
    assert json.loads(required.text)["maxItems"] == 1
    assert (required.opens_with, required.begins_after) == ("", "</think>")


def test_workers_know_which_calls_end_the_reasoning() -> None:
    """As readers of the answer do, so that a budget closes no reasoning in a call, and a constraint does not wait for ever."""
    budget = grammar_of(QWEN3, thinking_token_budget=9)
    assert budget is not None
    assert (budget.calls, budget.tools) == ("hermes", ("weather",))
    forced = grammar_of(QWEN3, tool_choice="required")  # whose calls are JSON, behind the reasoning
    assert forced is not None
    assert (forced.calls, forced.begins_after) == ("", "</think>")
    fields: dict[str, object] = {"response_format": {"type": "json_object"}}
    form = find_extra(asked("chat", body_of("chat", fields), server=QWEN3).mesh.extras, Grammar)
    assert form is not None
    assert (form.calls, form.tools) == ("", ())


def test_a_strict_tool_is_a_structural_tag() -> None:
    tag = grammar_of(QWEN3)
    assert tag is not None
    assert (tag.kind, tag.begins_after) == (GrammarKind.STRUCTURAL_TAG, "</think>")
    assert json.loads(tag.text)["format"]["tags"][0]["content"] == {"type": "json_schema", "json_schema": SCHEMA}
    assert grammar_of(QWEN3, tool_choice="none") is None
    assert grammar_of(QWEN3, **ASKS) is None


def test_a_form_that_holds_nothing_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in's, say: all of MeshLM's own hold calls to their schemas."""
    assert all(parser.structure is not None for parser in TOOL_PARSERS.values())
    monkeypatch.setitem(TOOL_PARSERS, "mine", ToolParser(TOOL_PARSERS["hermes"].finder))
    with pytest.raises(HttpError, match="strict: calls in the form of --tool-call-parser mine are not held"):
        grammar_of(msgspec.structs.replace(QWEN3, tool_call_parser="mine"))


def test_a_strict_tool_of_gpt_oss_has_the_reasoning_in_its_grammar() -> None:
    server = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="openai", reasoning_parser="openai_gptoss")
    tag = grammar_of(server)
    assert tag is not None
    assert (tag.kind, tag.opens_with, tag.begins_after) == (GrammarKind.STRUCTURAL_TAG, "", "")
    assert json.loads(tag.text)["format"]["type"] == "beginning_or"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "said", "finish_reason"),
    [
        ("required", '[{"name": "weather", "parameters": {"city": "Bern"}}]', "tool_calls"),
        (NAMED, '{"city": "Bern"}', "stop"),
    ],
)
def test_answers_to_a_forced_choice(choice: object, said: str, finish_reason: str, stream: bool) -> None:
    """As with OpenAI the end of a named function's call is "stop"; reasoning may stand before either."""
    for server, before in ((PLAIN, ""), (QWEN3, "hm</think>\n")):
        ask = asked("chat", body_of("chat", {**STRICT, "tool_choice": choice, "stream": stream}), server=server)
        text = before + said
        if stream:
            answer, events, _ = streamed(ask)
            for letter in text:
                give(answer, 0, [7], letter)
            give(answer, 0, [2], "", STOP)
            found = [chunk["choices"][0] for chunk in chunks(events, True)]
            assert "".join(one["delta"].get("content") or "" for one in found).strip() == ""
            calls = [call for one in found for call in one["delta"].get("tool_calls", ())]
            name, arguments = calls[0]["function"]["name"], "".join(call["function"]["arguments"] for call in calls)
            end = found[-1]["finish_reason"]
        else:
            whole_answer, _ = whole(ask)
            give(whole_answer, 0, [7], text, STOP)
            (entry,) = body(whole_answer)["choices"]
            (call,) = entry["message"]["tool_calls"]
            name, arguments, end = call["function"]["name"], call["function"]["arguments"], entry["finish_reason"]
        assert (name, arguments, end) == ("weather", '{"city": "Bern"}', finish_reason)


def test_the_library_takes_the_grammars_of_calls() -> None:
    grammars = GrammarCache(Grammars({"<tool_call>": 5, "</tool_call>": 6}).translated)
    for server, choice in ((PLAIN, "required"), (PLAIN, NAMED), (QWEN3, "auto")):
        grammar = grammar_of(server, tool_choice=choice)
        assert grammar is not None
        assert grammars.compile(grammar).text


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_model_is_shown_the_tools_that_are_allowed(mode: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}
    (prompt,) = asked("chat", body_of("chat", {**ASKS, "tool_choice": choice}), server=QWEN3).mesh.prompts
    assert isinstance(prompt, ChatPrompt)
    assert json.loads(prompt.tools_json) == ASKS["tools"][:1]


@pytest.mark.parametrize(
    ("choice", "excludes", "is_shown"), [("none", True, False), ("none", False, True), ("auto", True, True)]
)
def test_the_tools_of_a_request_without_calls_may_be_left_out(choice: str, excludes: bool, is_shown: bool) -> None:
    server = ServerConfig(
        enable_auto_tool_choice=True, tool_call_parser="hermes", exclude_tools_when_tool_choice_none=excludes
    )
    (prompt,) = asked("chat", body_of("chat", {**ASKS, "tool_choice": choice}), server=server).mesh.prompts
    assert isinstance(prompt, ChatPrompt)
    assert bool(prompt.tools_json) is is_shown


@pytest.mark.parametrize(("choice", "finish_reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_forced_call_of_gpt_oss_is_read_from_its_channels(choice: object, finish_reason: str) -> None:
    server = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="openai", reasoning_parser="openai_gptoss")
    ask = asked("chat", body_of("chat", {**STRICT, "tool_choice": choice}), server=server)
    grammar = find_extra(ask.mesh.extras, Grammar)
    assert grammar is not None
    assert (grammar.kind, grammar.begins_after) == (GrammarKind.STRUCTURAL_TAG, "")
    answer, _ = whole(ask)
    head = "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    give(answer, 0, [7], "<|channel|>analysis<|message|>hm<|end|>" + head + '{"city": "Bern"}', STOP)
    (entry,) = body(answer)["choices"]
    assert (entry["message"]["reasoning"], entry["finish_reason"]) == ("hm", finish_reason)
    assert [call["function"]["arguments"] for call in entry["message"]["tool_calls"]] == ['{"city": "Bern"}']
