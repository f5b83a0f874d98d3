"""How strict calls are held to their schemas: in forms of tagged parameters, in lists as JSON or Python, in gpt-oss' channels.

Pure; see `Structure` in calls.py. The formats are those of structural tags, and what else detokenizer/structural_tags.py knows:
`joined`, `beginning_or`, and `patterns` beside triggers.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from meshlm.runtime.parsers import grammar_nodes as nodes
from meshlm.runtime.parsers import typed_values
from meshlm.runtime.parsers.grammar_nodes import Json
from meshlm.runtime.schema_reader import MAX_DEPTH, SAYS_NOTHING, SchemaReader

_BLANKS: Json = nodes.regex(r"\s{0,3}")
_OF_TEXT = SAYS_NOTHING | {"type", "anyOf", "oneOf", "nullable"}  # what may be said of free text
_OF_THE_WHOLE = (
    "patternProperties", "minProperties", "maxProperties", "anyOf", "oneOf", "allOf", "not", "if", "$ref",
)  # fmt: skip


def properties_of(reader: SchemaReader) -> tuple[dict[str, Any], list[str]]:
    """The schemas of a tool's parameters, and the names of those that must be there. ValueError: what cannot be held of them all."""
    given = reader.resolved(reader.root)
    properties, required = given.get("properties") or {}, given.get("required") or []
    if not isinstance(properties, dict):
        raise ValueError("properties must be an object")
    for keyword in _OF_THE_WHOLE:
        if keyword in given:
            raise ValueError(f"{keyword} of the parameters as a whole")
    if unknown := [name for name in required if name not in properties]:
        raise ValueError(f"required names {unknown[0]!r}, which is no property")
    return properties, required


class ParameterStructure(Struct, frozen=True):
    """KEY is the name of a parameter, NAME the tool's. `parameter_of_text`: opens one that is a string, where that differs.

    The parameters come in the order of the schema. A value that is no text is JSON by its own schema; a text is free up to the closing
    tag, or one of the texts of its `enum`. What else the schema asks of a text cannot be held in these forms and is refused."""

    trigger: str
    begin: str
    end: str
    parameter: str
    parameter_close: str
    parameter_of_text: str = ""

    def content(self, given: Mapping[str, Any] | None) -> Json:
        """What stands between begin and end, as a format of a structural tag; any text for a tool that is not strict. ValueError names
        what of a schema cannot be held."""
        if given is None:
            return nodes.ANY_TEXT
        reader = SchemaReader(given)
        (properties, required), elements = properties_of(reader), [_BLANKS]
        for key, schema in properties.items():
            if any(mark in key for mark in "<>\"'\n"):
                raise ValueError(f"the parameter name {key!r}")
            both = nodes.sequence(self._parameter(key, schema, reader), _BLANKS)
            elements.append(both if key in required else nodes.optional(both))
        reader.check()
        return nodes.sequence(*elements)

    def _parameter(self, key: str, schema: Any, reader: SchemaReader) -> Json:
        kinds, branches = reader.kinds(schema), reader.branches(schema)
        reader.check()
        listed = [reader.values(branch) for branch in branches]
        others = [branch for branch, values in zip(branches, listed, strict=True) if values is None]
        if any("string" in reader.kinds(branch) for branch in others):
            for branch in branches:
                _check_text(key, branch, reader)
            return nodes.tag(self._opens_text(key), nodes.ANY_TEXT, self.parameter_close)
        if others and "string" not in kinds:
            return self._json(key, reader.alone(schema))
        ways = [self._value(key, value, kinds) for values in listed for value in values or ()]
        ways += [self._json(key, reader.alone(branch)) for branch in others]
        if not ways:
            raise ValueError(f"the parameter {key!r}, which no value fits,")
        return nodes.any_of(ways)

    def _json(self, key: str, schema: Any) -> Json:
        """A value that is written as JSON."""
        opens = nodes.const(self.parameter.replace("KEY", key))
        closes = nodes.const(self.parameter_close)
        return nodes.sequence(opens, nodes.json_schema(schema), closes)

    def _opens_text(self, key: str) -> str:
        return (self.parameter_of_text or self.parameter).replace("KEY", key)

    def _value(self, key: str, value: Any, kinds: set[str]) -> Json:
        """One value of an enum, which the parser reads as this one."""
        is_text = isinstance(value, str)
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        read = typed_values.quoted(text) if is_text and self.parameter_of_text else typed_values.typed(text, kinds)
        if json.loads(read) != value or "<" in text or text != text.strip():
            raise ValueError(f"the value {value!r} of the parameter {key!r}")
        opens = self._opens_text(key) if is_text else self.parameter.replace("KEY", key)
        return nodes.const(f"{opens}{text}{self.parameter_close}")


def _check_text(key: str, schema: Any, reader: SchemaReader, depth: int = 0) -> None:
    """ValueError for keywords that would have to be held within a text."""
    schema = reader.resolved(schema)
    if not isinstance(schema, Mapping):
        return
    if (wrong := sorted(schema.keys() - _OF_TEXT)) or depth > MAX_DEPTH:
        raise ValueError(f"{(wrong or ['a union'])[0]} of the parameter {key!r}, which may be text")
    for name in ("anyOf", "oneOf"):
        for branch in schema.get(name) or ():
            _check_text(key, branch, reader, depth + 1)


Tools = Mapping[str, Mapping[str, Any] | None]  # the schema of each strict tool by its name; None: any arguments
_COMMA: Json = nodes.regex(r"\s{0,3},\s{0,3}")
_COMMA_OR_LINE: Json = nodes.regex(r"\s{0,3}[,\n]\s{0,3}")
_END: Json = nodes.regex(r"\s{0,3}\}")
_OPENS: Json = nodes.regex(r"\s{0,2}\[\s{0,3}")
_CLOSES: Json = nodes.regex(r"\s{0,3}\]")
_ANY_ARGUMENTS: Json = nodes.regex(r"""([^()"']|"(\\.|[^"\\\n])*"|'(\\.|[^'\\\n])*')*""")
_TEXT: Json = nodes.regex(r'"([^"\\\x00-\x1f]|\\["\\bfnrt])*"')  # JSON and Python read it alike
_OF_PYTHON = re.compile(r"[\w.]+")
_SPELLINGS = {"null": ("None", "null"), "boolean": ("True", "False", "true", "false")}


class ListStructure(Struct, frozen=True):
    """Behind one of the texts `opens` a list of objects with a name and arguments, and `close`. `also`: a text with NAME that may stand
    there instead, before the arguments of one call alone."""

    opens: tuple[str, ...]
    close: str = ""
    also: tuple[Json, ...] = ()
    keys: tuple[str, str] = ("name", "arguments")
    before_name: str = ""  # a pattern: pairs of the object that may stand before the name
    by_name: bool = False  # an object is one pair: the arguments by the name
    alone: bool = False  # one object without a list around it

    def format(self, tools: Tools) -> Json:
        """Free text with such lists in it."""
        calls = nodes.any_of([self._object(name, given) for name, given in tools.items()])
        close = nodes.const(self.close) if self.close else _BLANKS
        listed = [_BLANKS, calls] if self.alone else [_OPENS, nodes.several(calls, _COMMA), _CLOSES]
        content = nodes.sequence(*listed, nodes.sequence(_BLANKS, close))
        tags = [nodes.tag(begin, content) for begin in self.opens]
        for name, given in tools.items() if self.also else ():
            one = nodes.sequence(*self.also, nodes.arguments(given))
            tags.append(nodes.tag(f"{self.opens[0]}{name}", one))
        return nodes.triggered(self.opens, tags)

    def _object(self, name: str, given: Mapping[str, Any] | None) -> Json:
        if self.by_name:
            return nodes.sequence(nodes.regex(rf"\{{\s{{0,3}}{_json(name)}\s?:\s?"), nodes.arguments(given), _END)
        return nodes.sequence(nodes.regex(r"\{"), _rest_of_object(name, given, self.keys, self.before_name))


class FencedStructure(Struct, frozen=True):
    """A list of objects with a name and arguments with which an answer begins, or one in a block of code or behind one of the texts
    `opens`. An object alone may stand in a block of code, and between the texts of `around`. What begins so is a call."""

    opens: tuple[str, ...]
    around: Mapping[str, str]
    fence: str = "```"

    def format(self, tools: Tools) -> Json:
        """Free text with such lists in it."""
        rest = nodes.any_of([_rest_of_object(name, given) for name, given in tools.items()])
        more = nodes.sequence(_COMMA, nodes.const("{"), rest)
        behind_bracket = nodes.sequence(rest, nodes.star(more), _CLOSES)
        listed = nodes.sequence(nodes.regex(r"\s*\[[\s\[]*\{"), behind_bracket)
        contents = dict.fromkeys(self.opens, listed)
        for begin, end in self.around.items():
            one = nodes.sequence(nodes.regex(r"\s*\{"), rest, self._end(end))
            contents[begin] = nodes.any_of([listed, one])
        found = nodes.triggered(
            list(contents),
            [nodes.tag(begin, one) for begin, one in contents.items()],
            patterns=[
                {"pattern": rf"{self.fence}(json)?\s*\[[\s\[]*\{{", "content": behind_bracket},
                {"pattern": rf"{self.fence}(json)?\s*\{{", "content": nodes.sequence(rest, self._end(self.fence))},
            ],
        )
        begins = {"pattern": r"\s*\[[\s\[]*\{", "content": nodes.sequence(behind_bracket, found)}
        return {"type": "beginning_or", "beginnings": [begins], "otherwise": found}

    @staticmethod
    def _end(text: str) -> Json:
        return nodes.sequence(_BLANKS, nodes.const(text))


class PythonStructure(Struct, frozen=True):
    """Calls as Python writes them: between the texts `open` and `close`, and where `bare` in a list with which an answer begins.
    lines: each may stand on a line of its own."""

    open: str = ""
    close: str = ""
    bare: bool = False
    lines: bool = False

    def format(self, tools: Tools) -> Json:
        """Free text with such calls in it. ValueError names what of a tool cannot be held."""
        rests = {name: _rest_of_call(name, given) for name, given in tools.items()}
        found: Json = nodes.ANY_TEXT
        if self.open:
            head = [nodes.sequence(nodes.const(f"{name}("), rest) for name, rest in rests.items()]
            calls = nodes.several(nodes.any_of(head), _COMMA_OR_LINE if self.lines else _COMMA)
            content = nodes.any_of([nodes.sequence(_OPENS, calls, _CLOSES), nodes.sequence(_BLANKS, calls)])
            calls_between = nodes.tag(self.open, nodes.sequence(content, _BLANKS), self.close)
            found = nodes.triggered([self.open], [calls_between])
        if not self.bare:
            return found
        heads = [
            {
                "pattern": rf"\s*\[\s*{re.escape(name)}\s*\(",
                "content": nodes.sequence(rest, self._others(rests), _CLOSES, found),
            }
            for name, rest in rests.items()
        ]
        return {"type": "beginning_or", "beginnings": heads, "otherwise": found}

    @staticmethod
    def _others(rests: Mapping[str, Json]) -> Json:
        """The calls behind the first one."""
        heads = [nodes.sequence(nodes.const(f"{name}("), rest) for name, rest in rests.items()]
        return nodes.star(nodes.sequence(_COMMA, nodes.any_of(heads)))


def _json(text: str) -> str:
    """The pattern of a JSON string."""
    return re.escape(json.dumps(text, ensure_ascii=False))


def _rest_of_object(
    name: str, given: Mapping[str, Any] | None, keys: tuple[str, str] = ("name", "arguments"), before_name: str = ""
) -> Json:
    """One call as a JSON object, behind its opening brace."""
    named, holds = map(_json, keys)
    head = rf"\s{{0,3}}{before_name}{named}\s?:\s?{_json(name)}\s{{0,2}},\s{{0,3}}{holds}\s?:\s?"
    return nodes.sequence(nodes.regex(head), nodes.arguments(given), _END)


def _rest_of_call(name: str, given: Mapping[str, Any] | None) -> Json:
    """The arguments of a call and its closing bracket, with parameters in the order of the schema."""
    if not _OF_PYTHON.fullmatch(name):
        raise ValueError(f"the name of the tool {name!r}")
    close = nodes.const(")")
    if given is None:
        return nodes.sequence(_ANY_ARGUMENTS, close)
    try:
        return nodes.sequence(_BLANKS, _parameters(given), _BLANKS, close)
    except ValueError as error:
        raise ValueError(f"{error}, of the tool {name!r}") from None


def _parameters(given: Mapping[str, Any]) -> Json:
    reader = SchemaReader(given)
    (properties, required), elements = properties_of(reader), []
    for key, schema in properties.items():
        if not _OF_PYTHON.fullmatch(key):
            raise ValueError(f"the parameter name {key!r}")
        content = nodes.sequence(nodes.regex(rf"{re.escape(key)}\s?=\s?"), _value(schema, reader))
        elements.append({"content": content, "required": key in required})
    reader.check()
    return {"type": "joined", "separator": _COMMA, "elements": elements}


def _value(schema: Any, reader: SchemaReader) -> Json:
    """A value as JSON, or as Python where that writes it otherwise. The parser reads both."""
    found = reader.resolved(schema)
    if not isinstance(found, Mapping):
        return nodes.json_schema(schema)
    if (values := reader.values(found)) is not None:
        texts = [text for value in values for text in _spellings(value)]
        return nodes.any_of([nodes.const(text) for text in texts])
    if found.get("type") == "string" and not found.keys() - SAYS_NOTHING - {"type"}:
        return _TEXT
    ways: list[Json] = [nodes.json_schema(reader.alone(schema))]
    if found.keys() & {"type", "anyOf"} and not found.keys() & {"allOf", "oneOf", "not", "if"}:
        kinds = reader.kinds(found)
        texts = [text for kind, spelled in _SPELLINGS.items() if kind in kinds for text in spelled]
        ways += [nodes.const(text) for text in texts]
    return nodes.any_of(ways)


def _spellings(value: Any) -> list[str]:
    """How a value of an enum may be written."""
    if value is None or isinstance(value, bool):
        return [str(value), json.dumps(value)]
    text = json.dumps(value, ensure_ascii=False)
    bare = isinstance(value, str) and text == f'"{value}"' and "'" not in value
    return [text, f"'{value}'"] if bare else [text]


START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
FUNCTIONS = "functions."
_WORDS: Json = nodes.regex("[ \\w]{0,32}")


class ChannelStructure(Struct, frozen=True):
    """A call is a message to `functions.NAME`, in a channel that stands before or behind the name. It is the end of an answer."""

    def format(self, tools: Mapping[str, Mapping[str, Any] | None]) -> Json:
        """Messages, of which those to a function have arguments that fit."""
        contents = {name: self._behind_name(given) for name, given in tools.items()}
        heads = [f"{CHANNEL}{channel} to={FUNCTIONS}" for channel in ("commentary", "analysis")]
        heads.append(f"{START}assistant to={FUNCTIONS}")
        tags = [nodes.tag(f"{head}{name}", content) for head in heads for name, content in contents.items()]
        messages = nodes.triggered(heads, tags, stop_after_first=True)
        beginnings = [
            {"pattern": rf"\s?to={re.escape(FUNCTIONS + name)}", "content": content}
            for name, content in contents.items()
        ]
        return {"type": "beginning_or", "beginnings": beginnings, "otherwise": messages}

    @staticmethod
    def _behind_name(given: Mapping[str, Any] | None) -> Json:
        marks = [nodes.optional(nodes.sequence(nodes.const(mark), _WORDS)) for mark in (CHANNEL, CONSTRAIN)]
        arguments = nodes.arguments(given)
        blank = nodes.regex("( [ \\w]{0,32})?")  # a word that goes on is another name
        return nodes.sequence(blank, *marks, nodes.const(MESSAGE), arguments)
