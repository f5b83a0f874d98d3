"""Strict tools in forms that cannot write all of JSON: Python's calls and Gemma's."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from strict_calls import matcher, takes

from meshlm.frontend.http.errors import HttpError
from meshlm.runtime.model_files import tokenizer_files
from meshlm.runtime.parsers.calls import joined
from meshlm.runtime.parsers.registry import TOOL_PARSERS
from meshlm.runtime.vocabulary import Vocabulary

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def vocabulary(smollm2: Path) -> Vocabulary:
    return Vocabulary(tokenizer_files.load(smollm2), 49152, (2,))


def test_what_gemmas_form_cannot_hold_is_json_or_refused(vocabulary: Vocabulary) -> None:
    properties = {
        "a": {"type": "string", "pattern": "^b+$"},
        "c": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "d": {"type": "object", "additionalProperties": {"type": "integer"}},
    }

    def tools(schema: dict[str, Any]) -> list[dict[str, Any]]:
        function = {"name": "f", "parameters": {"type": "object", **schema}, "strict": True}
        return [{"type": "function", "function": function}]

    made = matcher(vocabulary, "gemma4", tools=tools({"properties": properties}))

    def written(arguments: str) -> str:
        return f"<|tool_call>call:f{{{arguments}}}<tool_call|>"

    for arguments in ("", 'a:"bb"', 'c:<|"|>x {<|"|>', "c:null", 'a:"b",d:{"e": 1}', 'a: "b", c: null'):
        assert takes(made, vocabulary, written(arguments)), arguments
        finder = TOOL_PARSERS["gemma4"].finder({"f": {}})
        _, (found,) = joined(finder.push(written(arguments)) + finder.finish())
        jsonschema.validate(json.loads(found.arguments), {"properties": properties})
    for arguments in ('a:<|"|>c<|"|>', 'a:"c"', "c:1", 'd:{"e": "x"}', "e:1", "c:null,"):
        assert not takes(made, vocabulary, written(arguments)), arguments
    for schema, said in (
        ({"properties": {"a b": {}}}, "the parameter name 'a b', of the tool 'f'"),
        ({"properties": {"a": {"enum": ['<|"|>']}}}, "the value"),
        ({"properties": {}, "required": ["b"]}, "required names 'b'"),
    ):
        with pytest.raises(HttpError, match=said):
            matcher(vocabulary, "gemma4", tools=tools(schema))


def test_texts_of_python_keep_to_their_patterns(vocabulary: Vocabulary) -> None:
    properties = {
        "a": {"type": "string", "pattern": "^b+$"},
        "c": {"type": "boolean"},
        "d": {"type": ["null", "integer"]},
    }
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}, "strict": True}
    made = matcher(vocabulary, "pythonic", tools=[{"type": "function", "function": function}])
    for text in ('f(a="bb")', "f()", "f(c=True, d=None)", "f( d=5 )", 'f(a="b", c=false)'):
        assert takes(made, vocabulary, f"[{text}]"), text
    for text in ('f(a="c")', "f(c=None)", "f(d=5, c=True)", "f(c=True d=5)", "f(c=True,)", "f(e=1)"):
        assert not takes(made, vocabulary, f"[{text}]"), text


@pytest.mark.parametrize(
    ("name", "schema", "said"),
    [
        ("a-b", {}, "the name of the tool 'a-b'"),
        ("f", {"properties": {"a-b": {}}}, "the parameter name 'a-b', of the tool 'f'"),
        ("f", {"anyOf": [{}]}, "anyOf of the parameters as a whole, of the tool 'f'"),
    ],
)
def test_calls_that_python_cannot_write_are_refused_by_name(
    vocabulary: Vocabulary, name: str, schema: dict[str, Any], said: str
) -> None:
    function = {"name": name, "parameters": {"type": "object", **schema}, "strict": True}
    with pytest.raises(HttpError, match=said):
        matcher(vocabulary, "pythonic", tools=[{"type": "function", "function": function}])
