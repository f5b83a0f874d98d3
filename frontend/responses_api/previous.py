"""`previous_input_messages` of a request to the items that mean the same. Pure; HttpError names the message at fault.

A message has OpenAI's chat form, or the form of gpt-oss' harmony: an author, and by its channel and its recipient it is a reasoning,
an answer, a call, or a call's result. Results there have no id: one belongs to the last call of its function.
"""

from typing import Any

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.responses_api.items import TEXTS

Json = dict[str, Any]
FIELD, FUNCTIONS = "previous_input_messages", "functions."


def items_of(messages: list[Any] | None) -> list[Json]:
    """The items, without those of the system: instructions are always the newest request's, as in vLLM."""
    found: list[Json] = []
    for place, message in enumerate(messages or []):
        where = f"{FIELD}[{place}]"
        if not isinstance(message, dict):
            raise _wrong(where, "a message is an object")
        author = message.get("author")
        role, name = (author if isinstance(author, dict) else message).get("role"), message.get("name")
        if isinstance(author, dict):
            name = author.get("name")
        match role:
            case "system" | "developer":
                continue
            case "user":
                found.append({"type": "message", "role": role, "content": _text(message, where)})
            case "assistant":
                found += _said(message, where)
            case "tool":
                found.append(_result(message, name, where, found))
            case _:
                raise _wrong(f"{where}.role", "must be 'user', 'assistant', 'tool', 'system' or 'developer'")
    return found


def _said(message: Json, where: str) -> list[Json]:
    """The items of one message of the assistant's."""
    recipient, channel = message.get("recipient"), message.get("channel")
    if recipient is not None:
        return [_call(where, recipient, _text(message, where), "")]
    if channel == "analysis":
        return [_reasoning(_text(message, where))]
    if channel not in (None, "final", "commentary"):
        raise _wrong(f"{where}.channel", "must be 'analysis', 'commentary' or 'final'")
    calls = [] if message.get("tool_calls") is None else message["tool_calls"]
    if not isinstance(calls, list):
        raise _wrong(f"{where}.tool_calls", "must be a list")
    thought = _optional(message, "reasoning", where) or _optional(message, "reasoning_content", where)
    found = [_reasoning(thought)] if thought else []
    if not calls or message.get("content") not in (None, "", []):
        found.append({"type": "message", "role": "assistant", "content": _text(message, where)})
    for index, call in enumerate(calls):
        path = f"{where}.tool_calls[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise _wrong(path, "a call has a function")
        arguments = "" if function.get("arguments") is None else function["arguments"]
        found.append(_call(path, function.get("name"), arguments, call.get("id")))
    return found


def _optional(message: Json, name: str, where: str) -> str:
    """A text, or "" where there is none."""
    if not isinstance(value := message.get(name), str | None):
        raise _wrong(f"{where}.{name}", "must be a string")
    return value or ""


def _reasoning(text: str) -> Json:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def _call(where: str, name: Any, arguments: Any, call_id: Any) -> Json:
    """The call of a function; harmony writes its name as `functions.NAME`."""
    name = name.removeprefix(FUNCTIONS) if isinstance(name, str) else None
    if not name:
        raise _wrong(where, "a call names its function")
    if "." in name or name in ("python", "browser", "container"):
        raise _wrong(where, f"calls of {name[:40]!r} are not supported; those of functions are")
    if not isinstance(arguments, str):
        raise _wrong(where, "the arguments of a call are text")
    if not (isinstance(call_id, str) and call_id):
        call_id = f"call_{where.removeprefix(FIELD)}"
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def _result(message: Json, name: Any, where: str, before: list[Json]) -> Json:
    call_id = message.get("tool_call_id")
    if not (isinstance(call_id, str) and call_id):
        wanted = name.removeprefix(FUNCTIONS) if isinstance(name, str) else None
        calls = [item for item in before if item["type"] == "function_call" and wanted in (None, item["name"])]
        if not calls:
            raise _wrong(where, "no call before it has this result")
        call_id = calls[-1]["call_id"]
    return {"type": "function_call_output", "call_id": call_id, "output": _text(message, where)}


def _text(message: Json, where: str) -> str:
    """The content, which is text alone."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    for part in content if isinstance(content, list) else [None]:
        if not (isinstance(part, dict) and part.get("type", "text") in TEXTS and isinstance(part.get("text"), str)):
            raise _wrong(f"{where}.content", "must be text or parts of text")
    return "".join(part["text"] for part in content or [])


def _wrong(where: str, text: str) -> HttpError:
    return HttpError(400, f"{where}: {text}", FIELD)
