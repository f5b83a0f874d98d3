"""The grammar that an answer keeps to, from the fields of a request: response_format, structured_outputs, and the older guided_*. Pure.

Called by parse.py. HttpError names the field; what is in it, runtime/structured_outputs.py checks.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from meshlm.frontend.http.errors import HttpError, field_error
from meshlm.frontend.openai.schema import Common
from meshlm.protocol.config import ServerConfig, StructuredOutputsConfig
from meshlm.protocol.grammar import Grammar, GrammarKind
from meshlm.runtime.errors import RequestError
from meshlm.runtime.structured_outputs import json_schema, made, of_kind, of_structured_outputs, structural_tag

# Fields that are one constraint -> its kind: those of vLLM before structured_outputs, of llama.cpp and of SGLang.
PLAIN = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "structural_tag": "structural_tag",
    "grammar": "grammar",
    "ebnf": "grammar",
    "regex": "regex",
    "json_schema": "json",
}


def grammar(request: Common, server: ServerConfig) -> Grammar | None:
    """The request's constraint; None where it has none."""
    config = server.structured_outputs
    try:
        found = [*_of_response_format(request.response_format, config), *_of_plain(request, config)]
        if request.structured_outputs is not None:
            found.append(of_structured_outputs(request.structured_outputs, config))
    except RequestError as error:
        raise HttpError(400, error.message, error.param) from None
    if not found:
        return None
    field = found[-1].param.split(".")[0]
    if len(found) > 1:
        names = ", ".join(one.param.split(".")[0] for one in found)
        raise field_error(field, f"only one constraint may be given; {names} are")
    if request.use_beam_search:
        raise field_error(field, "does not go with use_beam_search")
    return found[0]


def _of_response_format(format: Any, config: StructuredOutputsConfig) -> list[Grammar]:
    field = "response_format"
    match format:
        case None:
            return []
        case {"type": "text", **rest} if not _given(rest):
            return []
        case {"type": "json_object", **rest} if not _given(rest):
            return [made(GrammarKind.JSON_OBJECT, "", f"{field}.type", config)]
        case {"type": "json_object" | "json", "schema": dict() as schema, **rest} if not _given(rest):  # llama.cpp's
            return [json_schema(schema, f"{field}.schema", config)]
        case {"type": "json_object" | "json", "value": dict() as schema, **rest} if not _given(rest):  # TGI's
            return [json_schema(schema, f"{field}.value", config)]
        case {"type": "text" | "json_object" as kind, **rest}:
            raise field_error(field, f"type {kind!r} has no {_given(rest)[0][:40]!r}")
        case {"type": "regex", "value": pattern}:
            return [of_kind("regex", pattern, f"{field}.value", config)]
        case {"type": "grammar", "grammar": grammar}:
            return [of_kind("grammar", grammar, f"{field}.grammar", config)]
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema} as named}:
            strict = named.get("strict")
            if strict is not None and not isinstance(strict, bool):
                raise field_error(f"{field}.json_schema.strict", "must be true or false")
            return [json_schema(schema, f"{field}.json_schema.schema", config, strict=bool(strict))]
        case {"type": "json_schema"}:
            raise field_error(field, "type 'json_schema' needs json_schema, with the schema as an object")
        case {"type": "structural_tag"}:
            return [structural_tag(format, field, config)]
    kind = format.get("type") if isinstance(format, dict) else format
    known = "'text', 'json_object', 'json_schema', 'structural_tag', 'regex' and 'grammar' are"
    raise field_error(field, f"type {str(kind)[:40]!r} is not supported; {known}")


def _given(fields: Mapping[Any, Any]) -> list[str]:
    """The names of those that are not null."""
    return [str(name) for name, value in fields.items() if value is not None]


def _of_plain(request: Common, config: StructuredOutputsConfig) -> list[Grammar]:
    """The constraints that are fields of their own; the options are those fields' own."""
    found = [
        of_kind(kind, value, name, config)
        for name, kind in PLAIN.items()
        if (value := getattr(request, name)) is not None
        and value is not False
        and not (value == "" and kind == "grammar")
    ]
    if (pattern := request.guided_whitespace_pattern) is not None:
        found = [msgspec.structs.replace(one, whitespace_pattern=pattern) for one in found]
    if request.guided_decoding_backend not in (None, "", "auto", "guidance"):
        text = f"{request.guided_decoding_backend[:40]!r} is not here; 'auto' and 'guidance' (llguidance) are"
        raise field_error("guided_decoding_backend", text)
    return found
