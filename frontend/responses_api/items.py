"""Items of OpenAI's Responses API to a chat's messages, and `previous_input_messages` to items. Pure; HttpError names what is at fault.

A turn of the assistant may be several items there, a reasoning, a message and calls: they are one message of a chat. A previous message
has OpenAI's chat form, or the form of gpt-oss' harmony: an author, and by its channel and its recipient it is a reasoning, an answer, a
call, or a call's result. Results there have no id: one belongs to the last call of its function."""

import base64
import binascii
import hashlib
from typing import Any

from meshlm.frontend.http.errors import field_error
from meshlm.frontend.responses_api.tools import flat

Json = dict[str, Any]
TEXTS = ("input_text", "output_text", "text")
MEDIA = ("input_image", "input_audio")


def listed(given: str | list[Json]) -> list[Json]:
    """The input as items: a text is a user's message."""
    if isinstance(given, list):
        return given
    return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]


def messages_of(items: list[Json], field: str = "input") -> list[Json]:
    """The messages that items are, in their order."""
    found: list[Json] = []
    for place, item in enumerate(items):
        where = f"{field}[{place}]"
        if not isinstance(item, dict):
            raise field_error(where, "an item is an object")
        match item.get("type", "message"):
            case "message":
                _message(item, where, found)
            case "function_call":
                turn = _turn(found, after=("reasoning", "content", "tool_calls"))
                turn.setdefault("tool_calls", []).append(_call(item, where))
            case "function_call_output":
                call_id = _name(item, "call_id", where)
                found.append({"role": "tool", "tool_call_id": call_id, "content": _output(item, where)})
            case "reasoning":
                turn = _turn(found, after=("reasoning",))
                turn["reasoning"] = turn.get("reasoning", "") + _reasoning(item, where)
            case "compaction":
                _compaction(_unsealed(_string(item, "encrypted_content", where), where), found)
            case kind:
                raise field_error(where, f"items of type {str(kind)[:40]!r} are not supported")
    for message in found:
        if message["role"] == "assistant":
            message.setdefault("content", None if "tool_calls" in message else "")
    return found


def referred(item: Any) -> str | None:
    """The name of the stored item that an item stands for; None for any other."""
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return None
    is_bare = item.keys() == {"id"}  # of a reference the type may be left out
    return item["id"] if item.get("type") == "item_reference" or is_bare else None


def goes_on(items: list[Json]) -> bool:
    """True where the answer is the rest of the last item: a message of the assistant's that is not complete."""
    last = items[-1] if items else {}
    unfinished = last.get("status") in ("in_progress", "incomplete")
    return unfinished and last.get("role") == "assistant" and last.get("type", "message") == "message"


def _compaction(summary: str, found: list[Json]) -> None:
    """A summary is the assistant's, after the user's messages before it, which become one: templates take turns."""
    of_user = list[str]()
    while found and found[-1]["role"] == "user":
        of_user.insert(0, text_of(found.pop()))
    if of_user:
        found.append({"role": "user", "content": "\n\n".join(of_user)})
    found.append({"role": "assistant", "content": summary})


def text_of(message: Json) -> str:
    """The text of a message, whose parts are lines, as for the template."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _turn(found: list[Json], after: tuple[str, ...]) -> Json:
    """The assistant's message that another item belongs to: the last one, if it has nothing but what may come before, or a new one."""
    if found and found[-1]["role"] == "assistant" and found[-1].keys() <= {"role", *after}:
        return found[-1]
    found.append({"role": "assistant"})
    return found[-1]


def _message(item: Json, where: str, found: list[Json]) -> None:
    role = item.get("role")
    if not (isinstance(role, str) and role):
        raise field_error(f"{where}.role", "must be a string such as 'user'")
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(part, f"{where}.content[{place}]") for place, part in enumerate(content)]
        if role == "assistant" or (len(content) == 1 and content[0]["type"] == "text"):
            if any(part["type"] != "text" for part in content):
                raise field_error(f"{where}.content", "a message of role 'assistant' has no images and no audio")
            content = "".join(part["text"] for part in content)
    elif not isinstance(content, str):
        raise field_error(f"{where}.content", "must be text or a list of parts")
    if role == "assistant":
        _turn(found, after=("reasoning",))["content"] = content
    else:
        found.append({"role": role, "content": content})


def _part(part: Any, where: str) -> Json:
    if not (isinstance(part, dict) and isinstance(part.get("type"), str)):
        raise field_error(where, "a part is an object with a type")
    if part["type"] == "refusal":
        return {"type": "text", "text": _string(part, "refusal", where)}
    if part["type"] in MEDIA:
        return part
    if part["type"] not in TEXTS:
        text = f"parts of type {part['type'][:40]!r} are not supported; those of type 'input_text' are"
        raise field_error(where, text)
    return {"type": "text", "text": _string(part, "text", where)}


def _call(item: Json, where: str) -> Json:
    name = flat(item.get("namespace"), _name(item, "name", where))
    function = {"name": name, "arguments": _string(item, "arguments", where)}
    return {"id": _name(item, "call_id", where), "type": "function", "function": function}


def _output(item: Json, where: str) -> str:
    output = item.get("output")
    if isinstance(output, list):
        return "\n".join(_text_part(part, f"{where}.output[{place}]") for place, part in enumerate(output))
    return _string(item, "output", where)


def _text_part(part: Any, where: str) -> str:
    made = _part(part, where)
    if made["type"] != "text":
        raise field_error(where, "the output of a call is text")
    return str(made["text"])


def _reasoning(item: Json, where: str) -> str:
    """Its text, or what `sealed` made of it, or its summary."""
    content = _texts(item, "content", "reasoning_text", where)
    summary = _texts(item, "summary", "summary_text", where)
    encrypted = "" if item.get("encrypted_content") is None else _string(item, "encrypted_content", where)
    return content or summary if content or not encrypted else _unsealed(encrypted, where)


def _texts(item: Json, field: str, kind: str, where: str) -> str:
    """The parts of this field in one."""
    if (parts := item.get(field)) is None:
        return ""
    if not isinstance(parts, list) or not all(isinstance(part, dict) and part.get("type") == kind for part in parts):
        raise field_error(f"{where}.{field}", f"must be a list of parts of type {kind!r}")
    return "".join(_string(part, "text", f"{where}.{field}") for part in parts)


def sealed(text: str) -> str:
    """A reasoning as `encrypted_content`, for clients that send it back where nothing is stored. It is no secret from them."""
    return base64.b64encode(text.encode()).decode()


def _unsealed(text: str, where: str) -> str:
    try:
        return base64.b64decode(text, validate=True).decode()
    except (binascii.Error, ValueError):
        raise field_error(f"{where}.encrypted_content", "was not made by this server") from None


def _string(item: Json, name: str, where: str) -> str:
    if not isinstance(value := item.get(name), str):
        raise field_error(f"{where}.{name}", "must be a string")
    return value


def _name(item: Json, name: str, where: str) -> str:
    if not (value := _string(item, name, where)):
        raise field_error(f"{where}.{name}", "must not be empty")
    return value


def stored(given: str | list[Json], response_id: str) -> list[Json]:
    """The input as it is stored and listed: each item with a type and an id, texts of messages as parts."""
    found = []
    for place, item in enumerate(listed(given)):
        kind = item.get("type", "message")
        name = {
            "message": "msg",
            "function_call": "fc",
            "function_call_output": "fco",
            "reasoning": "rs",
            "compaction": "cmp",
        }[kind]
        digest = hashlib.sha256(f"{response_id} input {place}".encode()).hexdigest()[:32]
        one = {"id": f"{name}_{digest}", "status": "completed", **item, "type": kind}
        if kind == "message" and isinstance(item["content"], str):
            is_model = item["role"] == "assistant"
            part: Json = {"type": "output_text" if is_model else "input_text", "text": item["content"]}
            one["content"] = [{**part, "annotations": []} if is_model else part]
        found.append(one)
    return found


PREVIOUS, FUNCTIONS = "previous_input_messages", "functions."


def previous_items(messages: list[Any] | None) -> list[Json]:
    """The items, without those of the system: instructions are always the newest request's, as in vLLM."""
    found: list[Json] = []
    for place, message in enumerate(messages or []):
        where = f"{PREVIOUS}[{place}]"
        if not isinstance(message, dict):
            raise field_error(where, "a message is an object")
        author = message.get("author")
        role, name = (author if isinstance(author, dict) else message).get("role"), message.get("name")
        if isinstance(author, dict):
            name = author.get("name")
        match role:
            case "system" | "developer":
                continue
            case "user":
                found.append({"type": "message", "role": role, "content": _previous_text(message, where)})
            case "assistant":
                found += _previous_items(message, where)
            case "tool":
                found.append(_previous_result(message, name, where, found))
            case _:
                raise field_error(f"{where}.role", "must be 'user', 'assistant', 'tool', 'system' or 'developer'")
    return found


def _previous_items(message: Json, where: str) -> list[Json]:
    """The items of one message of the assistant's."""
    recipient, channel = message.get("recipient"), message.get("channel")
    if recipient is not None:
        return [_previous_call(where, recipient, _previous_text(message, where), "")]
    if channel == "analysis":
        return [_reasoning_item(_previous_text(message, where))]
    if channel not in (None, "final", "commentary"):
        raise field_error(f"{where}.channel", "must be 'analysis', 'commentary' or 'final'")
    calls = [] if message.get("tool_calls") is None else message["tool_calls"]
    if not isinstance(calls, list):
        raise field_error(f"{where}.tool_calls", "must be a list")
    thought = _optional(message, "reasoning", where) or _optional(message, "reasoning_content", where)
    found = [_reasoning_item(thought)] if thought else []
    if not calls or message.get("content") not in (None, "", []):
        found.append({"type": "message", "role": "assistant", "content": _previous_text(message, where)})
    for index, call in enumerate(calls):
        path = f"{where}.tool_calls[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise field_error(path, "a call has a function")
        arguments = "" if function.get("arguments") is None else function["arguments"]
        found.append(_previous_call(path, function.get("name"), arguments, call.get("id")))
    return found


def _optional(message: Json, name: str, where: str) -> str:
    """A text, or "" where there is none."""
    if not isinstance(value := message.get(name), str | None):
        raise field_error(f"{where}.{name}", "must be a string")
    return value or ""


def _reasoning_item(text: str) -> Json:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def _previous_call(where: str, name: Any, arguments: Any, call_id: Any) -> Json:
    """The call of a function; harmony writes its name as `functions.NAME`."""
    name = name.removeprefix(FUNCTIONS) if isinstance(name, str) else None
    if not name:
        raise field_error(where, "a call names its function")
    if "." in name or name in ("python", "browser", "container"):
        raise field_error(where, f"calls of {name[:40]!r} are not supported; those of functions are")
    if not isinstance(arguments, str):
        raise field_error(where, "the arguments of a call are text")
    if not (isinstance(call_id, str) and call_id):
        call_id = f"call_{where.removeprefix(PREVIOUS)}"
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def _previous_result(message: Json, name: Any, where: str, before: list[Json]) -> Json:
    call_id = message.get("tool_call_id")
    if not (isinstance(call_id, str) and call_id):
        wanted = name.removeprefix(FUNCTIONS) if isinstance(name, str) else None
        calls = [item for item in before if item["type"] == "function_call" and wanted in (None, item["name"])]
        if not calls:
            raise field_error(where, "no call before it has this result")
        call_id = calls[-1]["call_id"]
    return {"type": "function_call_output", "call_id": call_id, "output": _previous_text(message, where)}


def _previous_text(message: Json, where: str) -> str:
    """The content, which is text alone."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    for part in content if isinstance(content, list) else [None]:
        if not (isinstance(part, dict) and part.get("type", "text") in TEXTS and isinstance(part.get("text"), str)):
            raise field_error(f"{where}.content", "must be text or parts of text")
    return "".join(part["text"] for part in content or [])
