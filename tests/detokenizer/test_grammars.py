"""What a client asks of a text's form becomes a grammar of the library, or a 400 that names the field and what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from meshlm.detokenizer.grammar_cache import GrammarCache
from meshlm.detokenizer.grammars import Grammars
from meshlm.detokenizer.json_schemas import close_objects, has_end
from meshlm.protocol.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import RequestError
from meshlm.runtime.model_files import tokenizer_files
from meshlm.runtime.vocabulary import Vocabulary

pytestmark = pytest.mark.model
PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
CLOSED = {**PERSON, "additionalProperties": False}
TAG = {"begin": "<fn=a>", "end": "</fn>", "content": {"type": "json_schema", "json_schema": CLOSED}}
OLD_TAGS = {"triggers": ["<fn="], "structures": [{"begin": "<fn=a>", "schema": CLOSED, "end": "</fn>"}]}
TAGS = {"type": "triggered_tags", "triggers": ["<fn="], "tags": [TAG]}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> Vocabulary:
    return Vocabulary(tokenizer_files.load(smollm2), 49152, (2,))


@pytest.fixture(scope="module")
def grammars() -> GrammarCache:
    return GrammarCache(Grammars({"<|im_start|>": 1, "<|im_end|>": 2, "<file_sep>": 5}).translated)


def made(kind: str, text: Any, **options: Any) -> Grammar:
    return Grammar(GrammarKind(kind), text if isinstance(text, str) else json.dumps(text), "field.part", **options)


def reads(tokenizer: LLTokenizer, grammar: Grammar, text: str) -> str:
    """What the text is to the compiled grammar: "no", a "part" of what it allows, or "whole"."""
    assert grammar.kind is GrammarKind.COMPILED
    matcher = LLMatcher(tokenizer, grammar.text)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.tokenize_str(text, parse_special=True)
    taken = matcher.try_consume_tokens(ids)
    return "no" if taken < len(ids) else "whole" if matcher.is_accepting() else "part"


READ = [
    ("json_schema", CLOSED, {}, {'{"age": 3}': "whole", '{"age": ': "part", '{"age": "x"}': "no", "[1]": "no"}),
    ("json_schema", PERSON, {}, {'{"age": 3, "b": [null]}': "whole"}),
    ("json_schema", PERSON, {"additional_properties": False}, {'{"age": 3, "b": 1}': "no", '{"age":3}': "whole"}),
    ("json_schema", CLOSED, {"any_whitespace": False}, {'{"age": 3}': "no", '{"age":3}': "whole"}),
    ("json_schema", CLOSED, {"whitespace_pattern": " ?"}, {'{"age":  3}': "no", '{"age": 3}': "whole"}),
    ("json_schema", True, {}, {"[1, null]": "whole", "x": "no"}),
    ("json_schema", {**CLOSED, "not": {}}, {"strict": False}, {'{"age": 3}': "whole"}),
    ("json_schema", {"items": {"type": "string", "pattern": "(?=a)b", "maxLength": 3}, "type": "array"}, {"strict": False},
     {'["xyz"]': "whole", '["xyza': "no", "[1]": "no"}),
    ("json_schema", {"items": {"type": "string", "pattern": "^a+$"}, "type": "array", "contains": {}}, {"strict": False},
     {'["aa"]': "whole", '["b': "no"}),
    ("json_schema", {"type": "array", "items": {"type": "integer"}, "uniqueItems": False, "then": {}}, {}, {"[1, 1]": "whole"}),
    ("json_schema", {"type": "object", "propertyNames": {"type": "string"}, "if": {}}, {}, {'{"a": 1}': "whole", "[": "no"}),
    ("json_schema", {**NODE, "$defs": {"node": {"anyOf": [NODE, {"type": "null"}]}}}, {}, {'{"next": null}': "whole"}),
    ("json_object", "", {}, {'{"a": [1]}': "whole", "[1]": "no"}),
    ("regex", r"\d{2}/[a-c]", {}, {"12/b": "whole", "1": "part", "ab": "no"}),
    ("choice", ["yes", 'n"o', "né"], {}, {"yes": "whole", 'n"o': "whole", "né": "whole", "maybe": "no"}),
    ("grammar", 'root ::= "a" digit+\ndigit ::= [0-9]', {}, {"a12": "whole", "b": "no"}),
    ("grammar", 'start: "a" DIGIT+\nDIGIT: /[0-9]/', {}, {"a12": "whole", "b": "no"}),
    ("structural_tag", OLD_TAGS, {}, {"hi": "whole", 'x <fn=a>{"age": 1}</fn> y': "whole", "<fn=b": "no"}),
    ("structural_tag", {"format": {**TAGS, "at_least_one": True}}, {}, {"hi": "no", '<fn=a>{"age": 1}</fn>': "whole"}),
    (
        "structural_tag",
        {"format": {**TAGS, "at_least_one": True, "stop_after_first": True}},
        {},
        {'<fn=a>{"age": 1}</fn>': "whole", '<fn=a>{"age": 1}</fn>x': "no"},
    ),
    ("structural_tag", {"format": {**TAGS, "stop_after_first": True}}, {}, {"hi": "whole", 'x<fn=a>{"age": 1}</fn>': "whole"}),
    (
        "structural_tag",
        {"format": {"type": "tag", "begin": "<|im_start|>a", "content": {"type": "any_text"}, "end": "<file_sep>"}},
        {},
        {"<|im_start|>abc<file_sep>": "whole", "abc": "no"},
    ),
    (
        "structural_tag",
        {"format": {"type": "tags_with_separator", "tags": [{**TAG, "end": ["</fn>", ";"]}], "separator": ","}},
        {},
        {'<fn=a>{"age": 1}</fn>,<fn=a>{"age": 2};': "whole", "": "whole", "x": "no"},
    ),
    (
        "structural_tag",
        {
            "format": {
                "type": "sequence",
                "elements": [
                    {"type": "or", "elements": [{"type": "const_string", "value": "a"}, {"type": "regex", "pattern": "b/c"}]},
                    {"type": "optional", "content": {"type": "grammar", "grammar": 'root ::= "d"'}},
                    {"type": "repeat", "min": 1, "max": 2, "content": {"type": "const_string", "value": "e"}},
                    {"type": "star", "content": {"type": "const_string", "value": "f"}},
                    {"type": "plus", "content": {"type": "const_string", "value": "g"}},
                ],
            }
        },
        {},
        {"ade" "g": "whole", "b/ceeffgg": "whole", "aeee": "no", "ad": "part"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "options", "texts"), READ)
def test_texts_that_fit(
    grammars: GrammarCache, vocabulary: Vocabulary, kind: str, text: Any, options: dict[str, Any], texts: dict[str, str]
) -> None:
    compiled = grammars.compile(made(kind, text, **options))
    assert {each: reads(vocabulary.tokenizer, compiled, each) for each in texts} == texts


TAG = {"type": "tag", "begin": "a", "end": "b"}
UNIQUE = {"type": "array", "uniqueItems": True}
WRONG = [
    ("json_schema", '{"a"', "not valid JSON"),
    ("json_schema", 5, "must be an object"),
    ("json_schema", False, "no JSON fits"),
    ("json_schema", {"type": "objekt"}, "objekt"),
    ("json_schema", {"not": {"type": "string"}}, r"cannot be enforced: \[\"not\"\]"),
    ("json_schema", {"oneOf": [{"type": "string"}, {"minLength": 3}]}, "oneOf"),
    ("json_schema", {"$ref": "#"}, "without end"),
    ("json_schema", {**NODE, "$defs": {"node": NODE}}, "without end"),
    ("json_schema", {"$ref": "http://somewhere/x"}, "within the schema alone, and 'http://somewhere/x' is not there"),
    (
        "json_schema",
        {"type": "string", "format": "uri-reference"},
        "the format 'uri-reference' of the schema cannot be enforced",
    ),
    ("json_schema", {"type": "array", "uniqueItems": True}, r"cannot be enforced: \[\"uniqueItems\"\]"),
    ("json_schema", {"if": {"type": "string"}, "then": {"maxLength": 3}}, r"cannot be enforced: \[\"if\", \"then\"\]"),
    ("json_schema", {"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ("json_schema", {"type": "integer", "minimum": 3, "maximum": 1}, "minimum"),
    ("json_schema", '{"x": ' * 150 + "1" + "}" * 150, "recursion limit"),
    ("json_schema", '{"x": ' * 5000 + "1" + "}" * 5000, "nested too deeply"),
    ("regex", "(a", "unclosed group"),
    ("grammar", "root ::= nobody", "'nobody' not found"),
    ("grammar", "start: nobody", "nobody"),
    ("grammar", "%%%", "not understood|unexpected|at 1"),
    ("structural_tag", "[", "not valid JSON"),
    ("structural_tag", {"format": {"type": "qwen_xml_parameter"}}, "'qwen_xml_parameter' is not supported"),
    ("structural_tag", {"format": {**TAGS, "triggers": ["<other"]}}, "no trigger"),
    ("structural_tag", {"format": {**TAGS, "excludes": ["x"]}}, "excludes is not supported"),
    ("structural_tag", {"format": {**TAGS, "stop_after_first": "no"}}, "stop_after_first must be true or false"),
    (
        "structural_tag",
        {"triggers": ["a"], "structures": [{"begin": "a", "schema": False, "end": "b"}]},
        "no JSON fits",
    ),
    (
        "structural_tag",
        {"format": {**TAG, "content": {"type": "json_schema", "json_schema": UNIQUE}}},
        r"enforced: \[\"uniqueItems\"\]$",
    ),
    ("structural_tag", {"structures": [], "triggers": ["a"]}, "structures must be a list with one"),
    ("regex", "a" * (MAX_GRAMMAR_BYTES + 1), f"at most {MAX_GRAMMAR_BYTES}"),
]


@pytest.mark.parametrize(("kind", "text", "told"), WRONG, ids=range(len(WRONG)))
def test_what_is_no_grammar_is_refused_by_its_field(grammars: GrammarCache, kind: str, text: Any, told: str) -> None:
    asked = made(kind, text)
    for _ in range(2):  # the second time from the cache
        with pytest.raises(RequestError, match=told) as raised:
            grammars.compile(asked)
        assert (raised.value.kind, raised.value.param) == (ErrorKind.INVALID, "field")
        assert raised.value.message.startswith("field.part: ")
        with pytest.raises(RequestError, match=told):
            grammars.known(asked)


def test_a_model_without_an_end_has_no_grammars() -> None:
    with pytest.raises(RequestError, match="no end-of-sequence token"):
        GrammarCache(Grammars({}, may_end=False).translated).compile(made("regex", "a"))


def test_reasoning_that_may_stand_before(grammars: GrammarCache, vocabulary: Vocabulary) -> None:
    """It is part of the grammar where its opening text tells it; elsewhere it is the worker's to wait for its end."""
    compiled = grammars.compile(made("json_schema", CLOSED, opens_with="<think>", begins_after="</think>"))
    assert compiled.begins_after == ""
    texts = {'{"age": 1}': "whole", '<think>hm {</think>\n{"age": 1}': "whole", "<think>": "part", "hm": "no"}
    assert {text: reads(vocabulary.tokenizer, compiled, text) for text in texts} == texts
    assumed = grammars.compile(made("json_schema", CLOSED, begins_after="</think>"))
    assert assumed.begins_after == "</think>"
    assert reads(vocabulary.tokenizer, assumed, '{"age": 1}') == "whole"


def test_the_cache_forgets_what_was_used_longest_ago(grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshlm.detokenizer.grammar_cache.CACHED", 2)
    small = GrammarCache(Grammars({}).translated)
    one, two, three = (made("regex", text) for text in ("a", "b", "c"))
    for asked in (one, two, one, three):
        small.compile(asked)
    assert [small.known(asked) is not None for asked in (one, two, three)] == [True, False, True]


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, False),
        ({"type": "array", "minItems": 1, "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}}, True),
        ({"allOf": [{"type": "object"}, {"$ref": "#"}]}, False),
        ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, True),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, True),  # it need not be an object
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]}, False),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"enum": [1]}}, "$ref": "#/$defs/a"}, True),
        ({"$defs": {"a~/%": {"type": "null"}}, "$ref": "#/$defs/a~0~1%25"}, True),
        ({"$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(3000)}, "$ref": "#/$defs/d0"}, True),
    ],
)
def test_schemas_that_end(schema: dict[str, Any], ends: bool) -> None:
    assert has_end(schema) is ends


def test_objects_are_closed_where_they_say_nothing() -> None:
    schema = {
        "properties": {"properties": {"properties": {"a": {}}}, "free": {"type": "object"}},
        "$defs": {"x": {"properties": {}}},
    }
    close_objects(schema)
    inner = {"properties": {"a": {}}, "additionalProperties": False}
    assert schema == {
        "properties": {"properties": inner, "free": {"type": "object"}},
        "$defs": {"x": {"properties": {}, "additionalProperties": False}},
        "additionalProperties": False,
    }
