"""Grammars of requests, as clients say them: the frontend and `LLM` check their shapes here. Pure; RequestError names what is wrong.

What a schema, pattern or grammar says, the detokenizer reads (detokenizer/grammars.py).
"""

from typing import Any

import msgspec

from meshlm.protocol.config import StructuredOutputsConfig
from meshlm.protocol.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import RequestError

MAX_CHOICES = 4096
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "strict", "whitespace_pattern")


def json_schema(schema: Any, param: str, config: StructuredOutputsConfig, *, strict: bool = True) -> Grammar:
    """The text is JSON that fits the schema: an object, or JSON text."""
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return made(GrammarKind.JSON_SCHEMA, text, param, config, strict=strict)


def structural_tag(tag: Any, param: str, config: StructuredOutputsConfig) -> Grammar:
    """Free text in which tags have contents of their own: an object with `format` (or `structures` and `triggers`), or JSON text."""
    text = tag if isinstance(tag, str) else msgspec.json.encode(tag).decode()
    return made(GrammarKind.STRUCTURAL_TAG, text, param, config)


def of_structured_outputs(
    fields: dict[str, Any], config: StructuredOutputsConfig, param: str = "structured_outputs"
) -> Grammar:
    """vLLM's field, which has one kind of constraint, and options."""
    absent = {"json_object": False}  # as good as null
    given = [name for name in KINDS if fields.get(name) is not None and fields[name] is not absent.get(name)]
    if unknown := fields.keys() - {*KINDS, *OPTIONS}:
        raise _wrong(f"{param}: {sorted(unknown)[0][:40]!r} is no field of it")
    if len(given) != 1:
        text = f"give one of {', '.join(KINDS)}" + (f", not {' and '.join(given)}" if given else "")
        raise _wrong(f"{param}: {text}")
    (kind,) = given
    for name in OPTIONS[:3]:
        if not isinstance(fields.get(name), bool | None):
            raise _wrong(f"{param}.{name}: must be true or false")
    pattern = fields.get("whitespace_pattern")
    if not isinstance(pattern, str | None):
        raise _wrong(f"{param}.whitespace_pattern: must be text")
    found = of_kind(kind, fields[kind], f"{param}.{kind}", config)
    return msgspec.structs.replace(
        found,
        strict=fields.get("strict") is not False,
        any_whitespace=found.any_whitespace and not fields.get("disable_any_whitespace"),
        additional_properties=found.additional_properties and not fields.get("disable_additional_properties"),
        whitespace_pattern=pattern or "",
    )


def of_kind(kind: str, value: Any, param: str, config: StructuredOutputsConfig) -> Grammar:
    match kind:
        case "json" if isinstance(value, str | dict):
            return json_schema(value, param, config)
        case "json_object" if value is True:
            return made(GrammarKind.JSON_OBJECT, "", param, config)
        case "regex" if isinstance(value, str):
            return made(GrammarKind.REGEX, value, param, config)
        case "grammar" if isinstance(value, str):
            return made(GrammarKind.GRAMMAR, value, param, config)
        case "structural_tag" if isinstance(value, str | dict):
            return structural_tag(value, param, config)
        case "choice" if isinstance(value, list) and all(isinstance(text, str) for text in value):
            if not 1 <= len(value) <= MAX_CHOICES:
                raise _wrong(f"{param}: {len(value)} texts; 1 to {MAX_CHOICES} are allowed")
            return made(GrammarKind.CHOICE, msgspec.json.encode(value).decode(), param, config)
    wanted = {"json": "a schema", "json_object": "true", "choice": "a list of texts"}.get(kind, "text")
    raise _wrong(f"{param}: must be {wanted}")


def made(kind: GrammarKind, text: str, param: str, config: StructuredOutputsConfig, *, strict: bool = True) -> Grammar:
    if (size := len(text.encode("utf-8", "surrogatepass"))) > MAX_GRAMMAR_BYTES:
        raise _wrong(f"{param}: {size} bytes; at most {MAX_GRAMMAR_BYTES} in one grammar")
    return Grammar(
        kind,
        text,
        param,
        strict=strict,
        any_whitespace=not config.disable_any_whitespace,
        additional_properties=not config.disable_additional_properties,
    )


def _wrong(text: str) -> RequestError:
    """`text` begins with the field."""
    return RequestError(ErrorKind.INVALID, text, text.partition(":")[0].partition(".")[0])
