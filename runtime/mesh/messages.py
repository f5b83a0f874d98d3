"""The shapes of a chat's messages and tools, checked before a template sees them. Pure; RequestError names what is wrong.

Called by the frontend and by `LLM.chat`. The rules are OpenAI's; a role that OpenAI does not have is the template's to know, as in
vLLM.
"""

from typing import Any

from meshlm.protocol.media import Modality
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import RequestError

NEED_CONTENT = ("user", "system", "developer", "tool", "function")
# What an assistant's message may have said instead of a content.
INSTEAD = ("tool_calls", "refusal", "reasoning", "reasoning_content")
# OpenAI's fields of an assistant's message that templates do not know: they would be lost.
NOT_READ = {"function_call": "send tool_calls, its newer name", "audio": "only text is supported"}
FIELDS_OF_THEIR_OWN = ("messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message")
# The type of a part -> where its text is. A reference names a tool whose description the template shows there, if it knows of such.
PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "tool_reference": "name"}


def part_of(modality: Modality) -> dict[str, str]:
    """What a template is given in the place of an item."""
    return {"type": modality.value}


def modality_of(part: Any) -> Modality | None:
    """That of the item in whose place a template is given the part; None: it is another part."""
    if isinstance(part, dict) and len(part) == 1 and part.get("type") in list(Modality):
        return Modality(part["type"])
    return None


def check_messages(messages: list[dict[str, Any]], *, media: bool = False) -> None:
    """media: parts may be images, videos and sounds, of which a template is told that they are there."""
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]", media)


def _check_message(message: dict[str, Any], where: str, media: bool) -> None:
    role, content = message.get("role"), message.get("content")
    if not (isinstance(role, str) and role):
        raise _wrong(f"{where}.role: must be a string such as 'user'")
    if content is None or content == []:
        if role in NEED_CONTENT:
            raise _wrong(f"{where}.content: a message of role {role!r} needs a content")
        if role == "assistant" and "content" not in message and not any(message.get(name) for name in INSTEAD):
            raise _wrong(f"{where}: a message of role 'assistant' needs a content or tool_calls")
    _check_content(content, f"{where}.content", media)
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content", "refusal"):
        if not isinstance(message.get(name), str | None):
            raise _wrong(f"{where}.{name}: must be a string")
    for name, why in NOT_READ.items():
        if message.get(name):
            raise _wrong(f"{where}.{name}: not supported; {why}")
    if role == "tool" and not message.get("tool_call_id"):
        raise _wrong(f"{where}.tool_call_id: a message of role 'tool' names the call that it answers")
    _check_calls(message.get("tool_calls"), f"{where}.tool_calls")


def _check_content(content: Any, where: str, media: bool) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise _wrong(f"{where}: must be text or a list of parts")
    for index, item in enumerate(content):
        if isinstance(item, str):
            continue
        if not (isinstance(item, dict) and isinstance(item.get("type"), str)):
            raise _wrong(f"{where}[{index}]: a part is an object with a type")
        if media and modality_of(item) is not None:
            continue
        if (kind := item["type"]) not in PARTS:
            raise _wrong(f"{where}[{index}]: parts of type {kind[:40]!r} are not supported; those of type 'text' are")
        if not isinstance(item.get(PARTS[kind]), str):
            raise _wrong(f"{where}[{index}].{PARTS[kind]}: must be a string")


def _check_calls(calls: Any, where: str) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise _wrong(f"{where}: must be a list")
    for index, call in enumerate(calls):
        if not (isinstance(call, dict) and isinstance(call.get("id"), str)):
            raise _wrong(f"{where}[{index}].id: a call needs an id")
        if call.get("type", "function") != "function":
            raise _wrong(f"{where}[{index}].type: only calls of type 'function' are supported")
        function = call.get("function")
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise _wrong(f"{where}[{index}].function: must be an object with a name")


def check_tools(tools: list[dict[str, Any]]) -> None:
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type", "function") != "function":
            raise _wrong(f"{where}.type: only tools of type 'function' are supported", "tools")
        function = tool.get("function")
        if not (isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]):
            raise _wrong(f"{where}: must be a function with a name", "tools")
        if not isinstance(function.get("description"), str | None):
            raise _wrong(f"{where}.function.description: must be a string", "tools")
        if not isinstance(function.get("parameters"), dict | None):
            raise _wrong(f"{where}.function.parameters: must be a JSON schema", "tools")
        for path, given in ((f"{where}.function", function), (where, tool)):
            for name in ("strict", "defer_loading"):
                if not isinstance(given.get(name), bool | None):
                    raise _wrong(f"{path}.{name}: must be true or false", "tools")


def check_template_kwargs(wanted: dict[str, Any]) -> None:
    for name in FIELDS_OF_THEIR_OWN:
        if name in wanted:
            text = f"chat_template_kwargs: {name} is not one of these; it is said in a place of its own"
            raise _wrong(text, "chat_template_kwargs")


def _wrong(text: str, param: str = "messages") -> RequestError:
    return RequestError(ErrorKind.INVALID, text, param)
