"""The grammar that an answer keeps to, from the fields of a request: response_format, structured_outputs, and the older guided_*. Pure.

Called by parse.py. Shapes are checked here; what a schema, pattern or grammar says, the detokenizer reads (detokenizer/grammars.py).
"""

from typing import Any

import msgspec

from meshlm.frontend.errors import HttpError
from meshlm.frontend.schema import Common
from meshlm.protocol.config import ServerConfig, StructuredOutputsConfig
from meshlm.protocol.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

MAX_CHOICES = 4096
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object")


def grammar(request: Common, server: ServerConfig) -> Grammar | None:
    """The request's constraint; None where it has none. HttpError names the field."""
    config = server.structured_outputs
    found = [*_of_response_format(request.response_format, config), *_of_guided(request, config)]
    if request.structured_outputs is not None:
        found.append(of_structured_outputs(request.structured_outputs, config))
    if len(found) > 1:
        names = ", ".join(one.param.split(".")[0] for one in found)
        raise HttpError(
            400, f"{found[-1].param}: only one constraint may be given; {names} are", found[-1].param.split(".")[0]
        )
    return found[0] if found else None


def json_schema(schema: Any, param: str, config: StructuredOutputsConfig, *, strict: bool = True) -> Grammar:
    """The text is JSON that fits the schema: an object, or JSON text."""
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return _made(GrammarKind.JSON_SCHEMA, text, param, config, strict=strict)


def structural_tag(tag: Any, param: str, config: StructuredOutputsConfig) -> Grammar:
    """Free text in which tags have contents of their own: an object with `format` (or `structures` and `triggers`), or JSON text."""
    text = tag if isinstance(tag, str) else msgspec.json.encode(tag).decode()
    return _made(GrammarKind.STRUCTURAL_TAG, text, param, config)


def of_structured_outputs(
    fields: dict[str, Any], config: StructuredOutputsConfig, param: str = "structured_outputs"
) -> Grammar:
    """vLLM's field, which has one kind of constraint, and options."""
    given = [name for name in KINDS if fields.get(name) is not None and fields[name] is not False]
    if unknown := fields.keys() - {*KINDS, *OPTIONS}:
        raise HttpError(400, f"{param}: {sorted(unknown)[0][:40]!r} is no field of it", param)
    if len(given) != 1:
        text = f"give one of {', '.join(KINDS)}" + (f", not {' and '.join(given)}" if given else "")
        raise HttpError(400, f"{param}: {text}", param)
    (kind,) = given
    for name in OPTIONS[:2]:
        if not isinstance(fields.get(name) or False, bool):
            raise HttpError(400, f"{param}.{name}: must be true or false", param)
    pattern = fields.get("whitespace_pattern") or ""
    if not isinstance(pattern, str):
        raise HttpError(400, f"{param}.whitespace_pattern: must be text", param)
    made = _of_kind(kind, fields[kind], f"{param}.{kind}", config)
    return msgspec.structs.replace(
        made,
        any_whitespace=made.any_whitespace and not fields.get("disable_any_whitespace"),
        additional_properties=made.additional_properties and not fields.get("disable_additional_properties"),
        whitespace_pattern=pattern,
    )


def _of_kind(kind: str, value: Any, param: str, config: StructuredOutputsConfig) -> Grammar:
    field = param.split(".")[0]
    match kind:
        case "json" if isinstance(value, str | dict):
            return json_schema(value, param, config)
        case "json_object" if value is True:
            return _made(GrammarKind.JSON_OBJECT, "", param, config)
        case "regex" if isinstance(value, str):
            return _made(GrammarKind.REGEX, value, param, config)
        case "grammar" if isinstance(value, str):
            return _made(GrammarKind.GRAMMAR, value, param, config)
        case "structural_tag" if isinstance(value, str | dict):
            return structural_tag(value, param, config)
        case "choice" if isinstance(value, list) and all(isinstance(text, str) for text in value):
            if not 1 <= len(value) <= MAX_CHOICES:
                raise HttpError(400, f"{param}: {len(value)} texts; 1 to {MAX_CHOICES} are allowed", field)
            return _made(GrammarKind.CHOICE, msgspec.json.encode(value).decode(), param, config)
    wanted = {"json": "a schema", "json_object": "true", "choice": "a list of texts"}.get(kind, "text")
    raise HttpError(400, f"{param}: must be {wanted}", field)


def _of_response_format(format: dict[str, Any] | None, config: StructuredOutputsConfig) -> list[Grammar]:
    field = "response_format"
    match format:
        case None | {"type": "text"}:
            return []
        case {"type": "json_object"}:
            return [_made(GrammarKind.JSON_OBJECT, "", f"{field}.type", config)]
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema} as named}:
            strict = named.get("strict")
            if strict is not None and not isinstance(strict, bool):
                raise HttpError(400, f"{field}.json_schema.strict: must be true or false", field)
            return [json_schema(schema, f"{field}.json_schema.schema", config, strict=bool(strict))]
        case {"type": "json_schema"}:
            raise HttpError(400, f"{field}: type 'json_schema' needs json_schema, with the schema as an object", field)
        case {"type": "structural_tag"}:
            return [structural_tag(format, field, config)]
    kind = format.get("type") if isinstance(format, dict) else format
    known = "'text', 'json_object', 'json_schema' and 'structural_tag' are"
    raise HttpError(400, f"{field}: type {str(kind)[:40]!r} is not supported; {known}", field)


def _of_guided(request: Common, config: StructuredOutputsConfig) -> list[Grammar]:
    """The spellings of vLLM before structured_outputs; the options are those fields' own."""
    found = [
        _of_kind(name.removeprefix("guided_"), value, name, config)
        for name in GUIDED
        if (value := getattr(request, name)) is not None and value is not False
    ]
    if request.structural_tag is not None:
        found.append(structural_tag(request.structural_tag, "structural_tag", config))
    if (pattern := request.guided_whitespace_pattern) is not None:
        found = [msgspec.structs.replace(one, whitespace_pattern=pattern) for one in found]
    if request.guided_decoding_backend not in (None, "", "auto", "guidance"):
        text = f"{request.guided_decoding_backend[:40]!r} is not here; 'auto' and 'guidance' (llguidance) are"
        raise HttpError(400, f"guided_decoding_backend: {text}", "guided_decoding_backend")
    return found


def _made(kind: GrammarKind, text: str, param: str, config: StructuredOutputsConfig, *, strict: bool = True) -> Grammar:
    if (size := len(text.encode("utf-8", "surrogatepass"))) > MAX_GRAMMAR_BYTES:
        raise HttpError(400, f"{param}: {size} bytes; at most {MAX_GRAMMAR_BYTES} in one grammar", param.split(".")[0])
    return Grammar(
        kind,
        text,
        param,
        strict=strict,
        any_whitespace=not config.disable_any_whitespace,
        additional_properties=not config.disable_additional_properties,
    )
