"""Strict tools: what the mask lets through of each form is text, and calls whose arguments fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from llguidance import LLMatcher
from strict_calls import TOOLS, matcher, takes

from meshlm.detokenizer import grammars as detokenizer
from meshlm.detokenizer.grammar_cache import GrammarCache
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai import tool_choice
from meshlm.frontend.openai.schema import ChatRequest
from meshlm.protocol.config import ServerConfig
from meshlm.runtime.errors import RequestError
from meshlm.runtime.model_files import tokenizer_files
from meshlm.runtime.parsers.calls import Structure, joined
from meshlm.runtime.parsers.registry import TOOL_PARSERS
from meshlm.runtime.parsers.structures import ParameterStructure
from meshlm.runtime.vocabulary import Vocabulary

pytestmark = pytest.mark.model
FORMS = [name for name, parser in TOOL_PARSERS.items() if isinstance(parser.structure, Structure)]
OF_PARAMETERS = [name for name, parser in TOOL_PARSERS.items() if isinstance(parser.structure, ParameterStructure)]


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> Vocabulary:
    return Vocabulary(tokenizer_files.load(smollm2), 49152, (2,))


def call(parser: str, name: str, arguments: object) -> str:
    form = TOOL_PARSERS[parser].structure
    assert isinstance(form, Structure)
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


def in_tags(parser: str, name: str, arguments: dict[str, Any], blank: str = "\n") -> str:
    form = TOOL_PARSERS[parser].structure
    assert isinstance(form, ParameterStructure)
    found = form.begin.replace("NAME", name)
    for key, value in arguments.items():
        opens = form.parameter_of_text or form.parameter if isinstance(value, str) else form.parameter
        text = value if isinstance(value, str) else json.dumps(value)
        found += blank + opens.replace("KEY", key) + text + form.parameter_close
    return f"{found}{blank}{form.end}"


LARGE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Rome", None, 7]},
        "text": {"type": "string", "description": "Anything."},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "where": {"$ref": "#/$defs/place"},
        "kind": {"$ref": "#/$defs/kind"},
        "flags": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "kind": {"enum": ["a b", "c"]},
    },
}
FIT: list[dict[str, Any]] = [
    {"city": "Bern", "days": 3},
    {"city": None, "text": "two\nlines <b> and </b>", "maybe": "no", "days": 9},
    {"city": 7, "text": "", "days": 1, "where": {"x": -1.5}, "kind": "a b", "flags": [True, False]},
]
NO_FIT: list[dict[str, Any]] = [
    {"city": "Bern"},
    {"city": "Paris", "days": 3},
    {"city": "Bern", "days": 10},
    {"city": "Bern", "days": "some"},
    {"city": "Bern", "days": 3, "where": {"x": "y"}},
    {"city": "Bern", "days": 3, "where": {}},
    {"city": "Bern", "days": 3, "kind": "b"},
    {"city": "Bern", "days": 3, "flags": [1]},
    {"city": "Bern", "days": 3, "other": 5},
]


@pytest.mark.parametrize("parser", OF_PARAMETERS)
def test_parameters_between_tags_keep_to_the_schema_and_are_read(vocabulary: Vocabulary, parser: str) -> None:
    """What the mask lets through, the parser reads as arguments that fit."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": LARGE, "strict": True}}, TOOLS[1]]
    made = matcher(vocabulary, parser, tools=tools)
    assert takes(made, vocabulary, f"Hello. {in_tags(parser, 'time', {'any': [1], 'b': 'c'})}")
    for arguments in FIT:
        for blank in ("\n", ""):
            text = in_tags(parser, "weather", arguments, blank)
            assert takes(made, vocabulary, f"I look.\n{text}\n{text} So."), text
            finder = TOOL_PARSERS[parser].finder({"weather": LARGE, "time": {}})
            shown, (call,) = joined(finder.push(text) + finder.finish())
            assert shown == ""
            assert json.loads(call.arguments) == arguments
            jsonschema.validate(json.loads(call.arguments), LARGE)
    for arguments in NO_FIT:
        assert not takes(made, vocabulary, in_tags(parser, "weather", arguments)), arguments
    assert not takes(made, vocabulary, in_tags(parser, "other", {}))


REFERRED: dict[str, Any] = {  # as pydantic and others write it
    "$ref": "#/$defs/Args",
    "$defs": {
        "Args": {
            "type": "object",
            "properties": {
                "color": {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]},
                "count": {"allOf": [{"$ref": "#/$defs/Count"}], "description": "How many."},
                "exact": {"const": 5},
                "either": {"oneOf": [{"$ref": "#/$defs/Color"}, {"$ref": "#/$defs/Place"}]},
                "where": {"$ref": "#/$defs/Alias"},
                "same": {"$ref": "#/$defs/Args/properties/count"},
            },
            "required": ["count"],
            "additionalProperties": False,
        },
        "Color": {"type": "string", "enum": ["red", "green"]},
        "Count": {"type": "integer", "minimum": 1, "maximum": 9},
        "Alias": {"$ref": "#/$defs/Place"},
        "Place": {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/Count"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("parser", OF_PARAMETERS)
def test_what_stands_behind_references_is_held_and_read(vocabulary: Vocabulary, parser: str) -> None:
    """The grammar and the parser read one schema alike."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": REFERRED, "strict": True}}]
    made = matcher(vocabulary, parser, tools=tools)
    for arguments in (
        {"color": "red", "count": 3, "exact": 5, "either": "green", "where": {"x": 2}, "same": 9},
        {"color": None, "count": 1, "either": {"x": 2}},
    ):
        text = in_tags(parser, "weather", arguments)
        assert takes(made, vocabulary, text), text
        finder = TOOL_PARSERS[parser].finder({"weather": REFERRED})
        _, (call,) = joined(finder.push(text) + finder.finish())
        assert json.loads(call.arguments) == arguments
        jsonschema.validate(json.loads(call.arguments), REFERRED)
    for wrong in ({"count": 10}, {"count": 1, "color": "blue"}, {"count": 1, "exact": 6}, {"count": 1, "where": {}}):
        assert not takes(made, vocabulary, in_tags(parser, "weather", wrong)), wrong


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "b+"}}}, "pattern of the parameter 'a'"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}}}, "maxLength of"),
        ({"properties": {"a": {"enum": ["x", "<b>"]}}}, "the value '<b>' of the parameter 'a'"),
        ({"properties": {"a": {"enum": ["5", 5]}}}, "the value '5' of the parameter 'a'"),
        ({"properties": {"a>": {"type": "string"}}}, "the parameter name 'a>'"),
        ({"properties": {}, "required": ["b"]}, "required names 'b'"),
        ({"anyOf": [{"properties": {}}, {"properties": {"a": {}}}]}, "anyOf of the parameters"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
    ],
)
def test_what_cannot_be_held_between_tags_is_refused_by_name(
    vocabulary: Vocabulary, schema: dict[str, Any], said: str
) -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": "weather", "parameters": {"type": "object", **schema}, "strict": True},
        }
    ]
    with pytest.raises((HttpError, RequestError), match=said) as raised:
        matcher(vocabulary, "qwen3_coder", tools=tools)
    assert getattr(raised.value, "param", "") == "tools"


# How each form writes several calls, or one: the arguments are JSON, or Python's.
def as_json(calls: list[tuple[str, dict[str, Any]]]) -> str:
    return json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def as_python(
    calls: list[tuple[str, dict[str, Any]]], write: Callable[[object], str] = repr, between: str = ", "
) -> str:
    texts = [f"{name}({', '.join(f'{key}={write(value)}' for key, value in given.items())})" for name, given in calls]
    return between.join(texts)


def named(calls: list[tuple[str, dict[str, Any]]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls)


def in_channels(calls: list[tuple[str, dict[str, Any]]]) -> str:
    ((name, given),) = calls
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(given)}"


def as_gemma(calls: list[tuple[str, dict[str, Any]]], opens: str, closes: str, escape: str) -> str:
    def write(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{write(one)}" for key, one in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(write, value)) + "]"
        return f"{escape}{value}{escape}" if isinstance(value, str) else json.dumps(value)

    return "".join(f"{opens}call:{name}{write(given)}{closes}" for name, given in calls)


def of_functiongemma(calls: list[tuple[str, dict[str, Any]]]) -> str:
    return as_gemma(calls, "<start_function_call>", "<end_function_call>", "<escape>")


def of_gemma4(calls: list[tuple[str, dict[str, Any]]]) -> str:
    return as_gemma(calls, "<|tool_call>", "<tool_call|>", '<|"|>')


def of_cohere(calls: list[tuple[str, dict[str, Any]]]) -> str:
    listed = [
        {"tool_call_id": str(number), "tool_name": name, "parameters": given}
        for number, (name, given) in enumerate(calls)
    ]
    return f"<|START_ACTION|>{json.dumps(listed, indent=1)}<|END_ACTION|>"


def of_gigachat(calls: list[tuple[str, dict[str, Any]]]) -> str:
    ((name, given),) = calls
    return f"function call<|role_sep|>\n{json.dumps({'name': name, 'arguments': given})}"


LISTS: dict[str, tuple[Callable[[list[tuple[str, dict[str, Any]]]], str], str]] = {  # with what may stand before
    "mistral": (lambda calls: f"[TOOL_CALLS]{as_json(calls)}", "I look."),
    "mistral named": (named, "I look."),
    "jamba": (lambda calls: f"<tool_calls>{as_json(calls)}</tool_calls>", "I look."),
    "granite": (lambda calls: f"<|tool_call|>{as_json(calls)}", ""),
    "phi4_mini_json": (lambda calls: f"functools{as_json(calls)}", ""),
    "pythonic": (lambda calls: f"[{as_python(calls)}]", ""),
    "pythonic JSON": (lambda calls: f"[{as_python(calls, json.dumps, ' , ')}]", ""),
    "llama4_pythonic": (lambda calls: f"[{as_python(calls)}]", ""),
    "llama4_pythonic tags": (lambda calls: f"<|python_start|>[{as_python(calls)}]<|python_end|>", "I look."),
    "lfm2": (lambda calls: f"<|tool_call_start|>[{as_python(calls)}]<|tool_call_end|>", "I look."),
    "xlam": (as_json, ""),
    "xlam tags": (lambda calls: f"<tool_call>{as_json(calls)}</tool_call>", "I look."),
    "xlam code": (lambda calls: f"```json\n{as_json(calls)}\n```", "I look.\n```python\n[1]\n```\nSo:\n"),
    "xlam plain code": (lambda calls: f"```{as_json(calls)}```", "I look."),
    "olmo3 python": (
        lambda calls: f"<function_calls>\n{as_python(calls, between=chr(10))}\n</function_calls>",
        "I look.",
    ),
    "gemma": (of_functiongemma, "I look."),
    "gemma python": (
        lambda calls: f"```tool_code\n{as_python(calls, between=chr(10))}\n```",
        "I look.\n```\n[1]\n```\n",
    ),
    "functiongemma": (of_functiongemma, "I look."),
    "gemma4": (of_gemma4, "I look."),
    "apertus": (
        lambda calls: f"<|tools_prefix|>{json.dumps([{name: given} for name, given in calls])}<|tools_suffix|>",
        "I look.",
    ),
    "cohere_command3": (of_cohere, "I look."),
    "gigachat3": (of_gigachat, "I look."),
    "openai": (in_channels, "<|channel|>analysis<|message|>to=functions.other<|end|><|start|>assistant"),
}
FIT_LISTS: list[dict[str, Any]] = [
    {"city": "Bern", "days": 3},
    {"city": None, "text": 'a "b" \\ c)]', "days": 9, "flags": [True, False]},
    {"city": 7, "days": 1, "where": {"x": -1.5}, "kind": "a b"},
]


@pytest.mark.parametrize("form", LISTS)
def test_listed_calls_keep_to_the_schema_and_are_read(vocabulary: Vocabulary, form: str) -> None:
    """What the mask lets through, the parser reads as arguments that fit; what does not fit is not let through."""
    parser, (write, before) = form.split()[0], LISTS[form]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": LARGE, "strict": True}}, TOOLS[1]]
    made = matcher(vocabulary, parser, "openai_gptoss" if parser == "openai" else "", tools=tools)
    for free in ("Hello [1] and (2).", "[x] So.", "{}"):
        assert takes(made, vocabulary, free), free
    one_alone = parser in ("openai", "gigachat3")
    python = "python" in form or form == "lfm2"
    for arguments in FIT_LISTS:
        if python and "JSON" not in form:
            arguments = {key: value for key, value in arguments.items() if key not in ("text", "flags", "where")}
        several = [("weather", arguments)] if one_alone else [("weather", arguments), ("time", {"any": "b"})]
        for calls in (several, several[:1], several[::-1]):
            text = before + write(calls)
            assert takes(made, vocabulary, text), text
            finder = TOOL_PARSERS[parser].finder({"weather": LARGE, "time": {}})
            _, found = joined(finder.push(text) + finder.finish())
            assert [(call.name, json.loads(call.arguments)) for call in found] == calls
            jsonschema.validate(json.loads(found[[name for name, _ in calls].index("weather")].arguments), LARGE)
    for arguments in NO_FIT:
        assert not takes(made, vocabulary, before + write([("weather", arguments)])), arguments
        if not one_alone:
            assert not takes(made, vocabulary, before + write([("time", {}), ("weather", arguments)])), arguments


@pytest.mark.parametrize("parser", ["pythonic", "llama4_pythonic"])
def test_a_list_behind_reasoning_is_at_its_beginning_too(vocabulary: Vocabulary, parser: str) -> None:
    """Also where the reasoning may be left out, so that its tag might be taken for the free text that no call begins."""
    server = ServerConfig(enable_auto_tool_choice=True, tool_call_parser=parser, reasoning_parser="mistral")
    request = msgspec.convert({"messages": [], "tools": TOOLS}, ChatRequest)
    grammar = tool_choice.grammar(tool_choice.read(request), request, server)
    assert grammar is not None
    grammar = msgspec.structs.replace(grammar, opens_with="[THINK]", begins_after="[/THINK]")
    made = LLMatcher(vocabulary.tokenizer, GrammarCache(detokenizer.Grammars({}).translated).compile(grammar).text)
    for before in ("", "[THINK]hm[/THINK]", "\n[THINK][/THINK]\n"):
        assert takes(made, vocabulary, f'{before}[weather(city="Bern")]'), before
        assert not takes(made, vocabulary, f'{before}[weather(city="Paris")]'), before
        assert takes(made, vocabulary, f"{before}Hello"), before


def test_a_call_of_gpt_oss_may_name_its_function_first(vocabulary: Vocabulary) -> None:
    made = matcher(vocabulary, "openai", "openai_gptoss")
    for head in (" to=functions.weather<|channel|>commentary json<|message|>", "to=functions.weather<|message|>"):
        assert takes(made, vocabulary, head + '{"city": "Bern"}')
        assert not takes(made, vocabulary, head + '{"city": "Paris"}')
    again = "<|start|>assistant to=functions.weather<|channel|>commentary<|message|>"
    assert takes(made, vocabulary, f'<|channel|>final<|message|>So.<|end|>{again}{{"city": "Bern"}}')
    assert not takes(made, vocabulary, f'<|channel|>final<|message|>So.<|end|>{again}{{"city": "Bern"}} and on')


def test_code_is_no_call_of_xlam(vocabulary: Vocabulary) -> None:
    """A block of code that begins as a list of calls is one, any other is free, also at the answer's end."""
    made = matcher(vocabulary, "xlam")
    for text in ("```json\n[1, 2]\n```\n", "```\nx = {}\n```", "So:\n```python\nprint({})\n```\nand {}"):
        assert takes(made, vocabulary, text), text
    for before, after in (("```json\n", "\n```"), ("```", "```"), ("<tool_call>", "</tool_call>")):
        assert takes(made, vocabulary, before + json.dumps({"name": "weather", "arguments": {"city": "Bern"}}) + after)
        for wrong in ({"name": "weather", "arguments": {"city": "Paris"}}, {"arguments": {}, "name": "weather"}):
            for text in (json.dumps(wrong), json.dumps([wrong])):
                assert not takes(made, vocabulary, before + text + after), text


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


def test_forced_calls_of_schemas_with_names_of_their_own(vocabulary: Vocabulary) -> None:
    """A schema's $id and $anchor name the same things where it is a part of a larger one."""
    parameters = {
        "$id": "https://a.example/tool",
        "type": "object",
        "properties": {"n": {"$ref": "#count"}, "c": {"$ref": "color"}},
        "required": ["n", "c"],
        "$defs": {"x": {"$anchor": "count", "type": "integer"}, "y": {"$id": "color", "enum": ["red"]}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for choice, write in (
        ("required", '[{"name": "f", "parameters": %s}]'),
        ({"type": "function", "function": {"name": "f"}}, "%s"),
    ):
        made = matcher(vocabulary, "", tools=tools, tool_choice=choice)
        assert takes(made, vocabulary, write % '{"n": 5, "c": "red"}')
        for wrong in ('{"n": "5", "c": "red"}', '{"n": 5, "c": "blue"}'):
            assert not takes(made, vocabulary, write % wrong)


def test_a_forced_call_of_gpt_oss(vocabulary: Vocabulary) -> None:
    """It stands in the model's own channels, with or without reasoning before it."""
    made = matcher(vocabulary, "openai", "openai_gptoss", tool_choice="required")
    head = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    thinks = "<|channel|>analysis<|message|>hm <b><|end|><|start|>assistant"
    for before in ("", thinks):
        assert takes(made, vocabulary, before + head + '{"city": "Bern"}')
        assert not takes(made, vocabulary, before + head + '{"city": "Paris"}')
        assert not takes(made, vocabulary, before + "<|channel|>final<|message|>Yes")
