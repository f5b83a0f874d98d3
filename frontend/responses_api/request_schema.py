"""The JSON schema of bodies of /v1/responses and /v1/conversations, where the types of schema.py do not say it. Called by
frontend/routes/request_schema.py."""

from typing import Any, get_args

from meshlm.frontend.http.answer_fields import REFUSED_RESPONSES
from meshlm.frontend.openai.schema import Verbosity

Json = dict[str, Any]
_TEXT: Json = {"type": "string", "minLength": 1}
_NULL: Json = {"type": "null"}
_ANY_TEXT: Json = {"type": "string"}


def of_bodies(names: tuple[str, ...], max_logprobs: int, *, takes_tools: bool, takes_priorities: bool) -> Json:
    """The schemas of fields by the name of the body and their own."""
    of_response = _fields(names, max_logprobs, takes_tools=takes_tools, takes_priorities=takes_priorities)
    most: Json = {"type": "array", "maxItems": 20, "items": {"anyOf": _items()}}
    return {
        "ResponsesRequest": of_response,
        "InputTokensRequest": of_response,
        "CompactRequest": of_response,
        "ConversationRequest": {"items": _or_null(most), "metadata": _metadata()},
        "MetadataRequest": {"metadata": _metadata()},
        "ItemsRequest": {"items": most},
    }


def _fields(names: tuple[str, ...], max_logprobs: int, *, takes_tools: bool, takes_priorities: bool) -> Json:
    """The schemas of fields by name."""
    stop = {**_TEXT, "maxLength": 4096}
    bias = {"type": "object", "propertyNames": {"pattern": "^[0-9]{1,4}$"}, "additionalProperties": {"type": "number"}}
    most = {} if max_logprobs == -1 else {"maximum": max_logprobs}
    found: Json = {
        "model": {"enum": [*names, None]},
        "input": {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": {"anyOf": _items()}}]},
        "previous_response_id": {"description": "A response that is stored.", **_or_null(_TEXT)},
        "tools": _or_null({"type": "array", "items": _tool()}) if takes_tools else {"enum": [[], None]},
        "tool_choice": _choice(),
        "text": _or_null(_object([], format=_or_null(*_formats()), verbosity={"enum": [*get_args(Verbosity), None]})),
        "stop": _or_null(stop, {"type": "array", "items": stop, "maxItems": 64}),
        "logit_bias": _or_null(bias),
        "top_logprobs": _or_null({"type": "integer", "minimum": 0, **most}),
        "metadata": _metadata(),
        "vllm_xargs": {"description": "For the server's logits processors (--logits-processors).", **_NULL},
        "conversation": {"description": "The id of a conversation.", **_or_null(_TEXT)},
        "previous_input_messages": _previous(),
        **dict.fromkeys(REFUSED_RESPONSES, _NULL),
    }
    if not takes_priorities:
        found["priority"] = {"const": 0}
    return found


def _metadata() -> Json:
    entries: Json = {"maxProperties": 16, "propertyNames": {"maxLength": 64}}
    return _or_null({"type": "object", **entries, "additionalProperties": {"type": "string", "maxLength": 512}})


def _or_null(*kinds: Json) -> Json:
    return {"anyOf": [*kinds, _NULL]}


def _object(required: list[str], **properties: Json) -> Json:
    return {"type": "object", "required": required, "properties": properties}


def _items() -> list[Json]:
    part = _object(["type", "text"], type={"enum": ["input_text", "output_text"]}, text=_ANY_TEXT)
    parts = {"type": "array", "minItems": 1, "items": part}
    content: Json = {"anyOf": [_ANY_TEXT, parts]}
    call = _object(["type", "call_id", "name", "arguments"], type={"const": "function_call"}, call_id=_TEXT, name=_TEXT)
    call["properties"]["arguments"] = _ANY_TEXT
    of_call: Json = {"type": {"const": "function_call_output"}, "call_id": _TEXT}
    output = _object(["type", "call_id", "output"], **of_call, output=content)
    thought = _object(["type", "text"], type={"const": "reasoning_text"}, text=_ANY_TEXT)
    reasoning = _object(["type", "content"], type={"const": "reasoning"}, content={"type": "array", "items": thought})
    summary = _object(["type", "text"], type={"const": "summary_text"}, text=_ANY_TEXT)
    reasoning["properties"] |= {"summary": _or_null({"type": "array", "items": summary}), "encrypted_content": _NULL}
    roles = {"enum": ["user", "system", "developer", "assistant"]}
    message = _object(["type", "role", "content"], type={"const": "message"}, role=roles, content=content)
    return [message, call, output, reasoning]


def _choice() -> Json:
    """A function must be one of the tools."""
    named = _object(["type", "name"], type={"const": "function"}, name=_TEXT)
    listed = {"type": "array", "items": _object(["name"], name=_TEXT)}
    several = _object(["type", "mode", "tools"], type={"const": "allowed_tools"}, mode={"enum": ["auto", "required"]})
    several["properties"]["tools"] = listed
    return {"anyOf": [{"enum": ["none", "auto", "required", None]}, named, several]}


def _formats() -> list[Json]:
    """Forms of the text."""
    named = _object(["type", "name", "schema"], type={"const": "json_schema"}, name=_ANY_TEXT)
    named["properties"] |= {"schema": {"type": "object"}, "strict": _or_null({"type": "boolean"})}
    return [_object(["type"], type={"enum": ["text", "json_object"]}), named]


def _tool() -> Json:
    tool = _object(["type", "name"], type={"const": "function"}, name=_TEXT, description=_or_null(_ANY_TEXT))
    tool["properties"] |= {"parameters": _or_null({"type": "object"}), "strict": _or_null({"type": "boolean"})}
    several = _object(["type", "name", "tools"], type={"const": "namespace"}, name=_TEXT)
    several["properties"]["tools"] = {"type": "array", "items": tool}
    return {"anyOf": [tool, several]}


def _previous() -> Json:
    """Messages in the form of a chat, or of harmony."""
    content = {"anyOf": [_ANY_TEXT, {"type": "array", "items": _object(["text"], text=_ANY_TEXT)}]}
    named = _object(["role", "content"], role={"enum": ["user", "assistant"]}, content=content)
    author = _object(["role"], role={"enum": ["user", "assistant"]})
    harmony = _object(["author", "content"], author=author, content=content)
    harmony["properties"]["channel"] = {"enum": ["analysis", "commentary", "final"]}
    return _or_null({"type": "array", "items": {"anyOf": [named, harmony]}})
