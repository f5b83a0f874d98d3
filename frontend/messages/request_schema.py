"""The JSON schema of Anthropic's bodies, where the types of schema.py do not say it. Called by frontend/routes/request_schema.py."""

from typing import Any

from meshlm.frontend.openai.schema import MAX_TOKENS

Json = dict[str, Any]
_TEXT: Json = {"type": "string", "minLength": 1}
_NULL: Json = {"type": "null"}
_ANY_TEXT: Json = {"type": "string"}


def fields(names: tuple[str, ...], *, takes_tools: bool, tells_reasoning: bool, takes_priorities: bool) -> Json:
    """The schemas of fields by name."""
    texts: Json = {"anyOf": [_ANY_TEXT, {"type": "array", "items": _block("text", text=_ANY_TEXT)}]}
    thinks = ["disabled", "adaptive", *(["enabled"] if tells_reasoning else [])]
    budget: Json = (
        {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_TOKENS}, _NULL]} if tells_reasoning else _NULL
    )
    found: Json = {
        "model": {"enum": list(names)},
        "messages": {"type": "array", "minItems": 1, "items": _message(texts)},
        "system": {"anyOf": [*texts["anyOf"], _NULL]},
        "tools": {"anyOf": [{"type": "array", "items": _tool()}, _NULL]} if takes_tools else {"enum": [[], None]},
        "tool_choice": {"description": "tool needs the name of one of the tools.", "anyOf": [_choice(), _NULL]},
        "thinking": {"anyOf": [_object(["type"], type={"enum": thinks}, budget_tokens=budget), _NULL]},
        "output_config": {"anyOf": [_object([], format={"anyOf": [_format(), _NULL]}), _NULL]},
        "stop_sequences": {"anyOf": [{"type": "array", "items": {**_TEXT, "maxLength": 4096}, "maxItems": 64}, _NULL]},
        "context_management": {"anyOf": [_object([], edits={"type": "array", "items": _edit()}), _NULL]},
        **dict.fromkeys(("mcp_servers", "container"), _NULL),
    }
    if not takes_priorities:
        found["priority"] = {"const": 0}
    return found


def _edit() -> Json:
    turns = _object(["type", "value"], type={"const": "thinking_turns"}, value={"type": "integer", "minimum": 1})
    return _object(["type"], type={"const": "clear_thinking_20251015"}, keep={"anyOf": [{"const": "all"}, turns]})


def _object(required: list[str], **properties: Json) -> Json:
    return {"type": "object", "required": required, "properties": properties}


def _block(kind: str, **properties: Json) -> Json:
    return _object(["type", *properties], type={"const": kind}, **properties)


def _message(texts: Json) -> Json:
    """User and assistant messages; one with results of tools names the call that each answers."""
    text = _block("text", text=_ANY_TEXT)
    result = _block("tool_result", tool_use_id=_TEXT)
    result["properties"]["content"] = {"anyOf": [*texts["anyOf"], _NULL]}
    result["properties"]["is_error"] = {"type": "boolean"}
    call = _block("tool_use", id=_TEXT, name=_TEXT, input={"type": "object"})
    thought = _block("thinking", thinking=_ANY_TEXT)
    of_user: Json = {"anyOf": [_ANY_TEXT, {"type": "array", "minItems": 1, "items": {"anyOf": [text, result]}}]}
    of_model: Json = {"anyOf": [_ANY_TEXT, {"type": "array", "minItems": 1, "items": {"anyOf": [text, call, thought]}}]}
    return {
        "anyOf": [
            _object(["role", "content"], role={"const": "user"}, content=of_user),
            _object(["role", "content"], role={"const": "assistant"}, content=of_model),
            _object(["role", "content"], role={"const": "system"}, content=texts),
        ]
    }


def _tool() -> Json:
    tool = _object(["name", "input_schema"], name=_TEXT, input_schema={"type": "object"}, type={"const": "custom"})
    tool["properties"] |= {"description": {"anyOf": [_ANY_TEXT, _NULL]}, "strict": {"enum": [True, False, None]}}
    return tool


def _format() -> Json:
    return _object(["type", "schema"], type={"const": "json_schema"}, schema={"type": "object"})


def _choice() -> Json:
    return _object(
        ["type"],
        type={"enum": ["auto", "any", "tool", "none"]},
        name=_ANY_TEXT,
        disable_parallel_tool_use={"type": "boolean"},
    )
