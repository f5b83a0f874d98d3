"""The grammar that an answer keeps to, from the fields of a request: response_format, structured_outputs, and the older guided_*. Pure.

Called by parse.py. HttpError names the field; what is in it, runtime/structured_outputs.py checks.
"""

from typing import Any

import msgspec

from meshlm.frontend.errors import HttpError
from meshlm.frontend.schema import Common
from meshlm.protocol.config import ServerConfig, StructuredOutputsConfig
from meshlm.protocol.grammar import Grammar, GrammarKind
from meshlm.runtime.errors import RequestError
from meshlm.runtime.structured_outputs import json_schema, made, of_kind, of_structured_outputs, structural_tag

GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object")


def grammar(request: Common, server: ServerConfig) -> Grammar | None:
    """The request's constraint; None where it has none."""
    config = server.structured_outputs
    try:
        found = [*_of_response_format(request.response_format, config), *_of_guided(request, config)]
        if request.structured_outputs is not None:
            found.append(of_structured_outputs(request.structured_outputs, config))
    except RequestError as error:
        raise HttpError(400, error.message, error.param) from None
    if not found:
        return None
    field = found[-1].param.split(".")[0]
    if len(found) > 1:
        names = ", ".join(one.param.split(".")[0] for one in found)
        raise HttpError(400, f"{field}: only one constraint may be given; {names} are", field)
    if request.use_beam_search:
        raise HttpError(400, f"{field}: does not go with use_beam_search", field)
    return found[0]


def _of_response_format(format: dict[str, Any] | None, config: StructuredOutputsConfig) -> list[Grammar]:
    field = "response_format"
    match format:
        case None | {"type": "text"}:
            return []
        case {"type": "json_object"}:
            return [made(GrammarKind.JSON_OBJECT, "", f"{field}.type", config)]
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
        of_kind(name.removeprefix("guided_"), value, name, config)
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
