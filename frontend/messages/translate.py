"""A body of Anthropic's to the chat request that means the same. Pure; HttpError names the field as Anthropic does.

Called by routes.py's routes. Content that is not text is refused by its type.
"""

import json
import re
from typing import Any

from meshlm.frontend.http.answer_fields import REFUSED_MESSAGES
from meshlm.frontend.http.errors import field_error
from meshlm.frontend.messages.schema import Conversation, MessagesRequest, Thinking
from meshlm.frontend.openai.schema import ChatRequest
from meshlm.protocol.config import ServerConfig

Json = dict[str, Any]
# Claude Code's first system block has another text in each request, which would leave nothing of a prompt in the prefix cache.
CLEARS_THINKING, ALL_TURNS = "clear_thinking_20251015", 1 << 30
BILLING = "x-anthropic-billing-header"
# Tools that Anthropic's server runs: a model is not told of them here, since nobody would answer.
SERVER_TOOLS = re.compile(r"(web_search|web_fetch|code_execution|tool_search_tool_\w+|mcp_toolset|advisor)(_\d{8})?")
# The name of a field in a chat's refusal -> its name here.
NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}


def chat_request(request: Conversation, server: ServerConfig, *, sees: bool = False) -> ChatRequest:
    """The same as a chat. sees: messages may have images. What generation alone needs is added where the body is for that."""
    for field, why in REFUSED_MESSAGES.items():
        if getattr(request, field, None):
            raise field_error(field, f"{why}")
    keeps = _kept_turns(request.context_management)
    messages = _system(request.system)
    for place, message in enumerate(request.messages):
        messages += _message(message, f"messages.{place}", sees)
    if not request.messages:
        raise field_error("messages", "give at least one message")
    for message in [message for message in messages if "reasoning" in message][:-keeps]:
        del message["reasoning"]
    goes_on = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    fields: Json = {
        "messages": messages,
        "chat_template_kwargs": _template_kwargs(request),
        "continue_final_message": goes_on,
        **_tools(request),
    }
    config = request.output_config
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = config.effort
    if config is not None and config.format is not None:
        schema = {"name": "answer", "schema": config.format.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(request, MessagesRequest):
        fields |= _generation(request)
    _think(request.thinking, fields, server)
    return ChatRequest(model=request.model, **fields)


def _kept_turns(given: Any) -> int:
    """The number of the last turns whose reasoning stays in the prompt; ALL_TURNS where nothing is said. Claude Code says that."""
    edits = given.get("edits") if isinstance(given, dict) else given
    if not isinstance(edits, list | None):
        raise field_error("context_management.edits", "must be a list")
    found = ALL_TURNS
    for place, edit in enumerate(edits or ()):
        where = f"context_management.edits.{place}"
        kind = edit.get("type") if isinstance(edit, dict) else edit
        if kind != CLEARS_THINKING:
            text = f"edits of type {str(kind)[:40]!r} are not supported; {CLEARS_THINKING!r} is"
            raise field_error(where, text)
        keep = edit.get("keep", {"type": "thinking_turns", "value": 1})
        if keep == "all":
            continue
        value = keep.get("value") if isinstance(keep, dict) and keep.get("type") == "thinking_turns" else None
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON has no other numbers
        if type(value) is not int or value < 1:
            raise field_error(f"{where}.keep", "must be 'all', or thinking_turns with a value of at least 1")
        found = min(found, value)
    return found


_SAME = ("max_tokens", "stream", "temperature", "top_k", "top_p", "cache_salt", "deterministic", "priority")


def _generation(request: MessagesRequest) -> Json:
    return {
        "stop": request.stop_sequences or None,
        "num_speculative_tokens": request.num_speculative_tokens,
        **{name: getattr(request, name) for name in _SAME},
    }


def _template_kwargs(request: Conversation) -> Json | None:
    wanted = dict(request.chat_template_kwargs or {})
    if request.thinking is not None:
        thinks = request.thinking.type != "disabled"
        wanted.setdefault("enable_thinking", thinks)
        wanted.setdefault("thinking", thinks)
    return wanted or None


def _think(thinking: Thinking | None, fields: Json, server: ServerConfig) -> None:
    """Adds what `thinking` asks for beside the template's switches."""
    if thinking is None or "max_tokens" not in fields:  # without it nothing is generated
        return
    if thinking.type == "enabled" and not server.reasoning_parser:
        raise field_error("thinking", "the server tells no reasoning from an answer (--reasoning-parser)")
    if thinking.display == "omitted":
        fields["include_reasoning"] = False
    if thinking.budget_tokens is not None and thinking.type == "enabled":
        fields["thinking_token_budget"] = thinking.budget_tokens


def _system(system: str | list[Json] | None) -> list[Json]:
    """The system message: the texts of its blocks one behind the other."""
    if isinstance(system, list):
        texts = [_text(block, f"system.{place}") for place, block in enumerate(system)]
    else:
        texts = [system or ""]
    text = "".join(text for text in texts if not text.startswith(BILLING))
    return [{"role": "system", "content": text}] if text else []


def _message(message: Json, where: str, sees: bool) -> list[Json]:
    """One message as a chat's: results of tools are messages of their own there."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise field_error(f"{where}.role", "must be 'user', 'assistant' or 'system'")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise field_error(f"{where}.content", "must be text or a list of blocks")
    blocks = []
    for place, block in enumerate(content):
        if not (isinstance(block, dict) and isinstance(block.get("type"), str)):
            raise field_error(f"{where}.content.{place}", "a block is an object with a type")
        blocks.append((block, f"{where}.content.{place}"))
    if role == "assistant":
        return [_assistant(blocks)]
    if role == "system":  # a message of empty blocks is one, too
        return _system(content) or [{"role": "system", "content": ""}]
    if not blocks:
        raise field_error(f"{where}.content", "give at least one block")
    return _user(blocks, sees)


def _assistant(blocks: list[tuple[Json, str]]) -> Json:
    texts, reasoning, calls = list[str](), list[str](), list[Json]()
    for block, where in blocks:
        match block["type"]:
            case "text":
                texts.append(_text(block, where))
            case "thinking":
                reasoning.append(_string(block, "thinking", where))
            case "redacted_thinking":
                pass  # nobody can read it
            case "tool_use":
                calls.append(_call(block, where))
            case kind:
                text = f"blocks of type {kind[:40]!r} are not supported in a message of role 'assistant'"
                raise field_error(where, text)
    found: Json = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    if reasoning:
        found["reasoning"] = "".join(reasoning)
    if calls:
        found["tool_calls"] = calls
    return found


def _call(block: Json, where: str) -> Json:
    arguments = block.get("input")
    if not isinstance(arguments, dict | None):
        raise field_error(f"{where}.input", "must be an object")
    function = {"name": _name(block, "name", where), "arguments": json.dumps(arguments or {}, ensure_ascii=False)}
    return {"id": _name(block, "id", where), "type": "function", "function": function}


def _user(blocks: list[tuple[Json, str]], sees: bool) -> list[Json]:
    found, texts = list[Json](), list[Json]()
    for block, where in blocks:
        if block["type"] == "text":
            texts.append({"type": "text", "text": _text(block, where)})
            continue
        if block["type"] == "image" and sees:
            texts.append(_image(block, where))
            continue
        if block["type"] != "tool_result":
            text = f"blocks of type {block['type'][:40]!r} are not supported; those of type 'text' are"
            raise field_error(where, text)
        found += _of_user(texts)
        texts = []
        call_id = _name(block, "tool_use_id", where)
        found.append({"role": "tool", "tool_call_id": call_id, "content": _result(block, where)})
        if references := _references(block, where):
            found.append({"role": "tool", "tool_call_id": call_id, "content": references})
    return found + _of_user(texts)


def _of_user(texts: list[Json]) -> list[Json]:
    if len(texts) == 1 and texts[0]["type"] == "text":
        return [{"role": "user", "content": texts[0]["text"]}]
    return [{"role": "user", "content": texts}] if texts else []


def _image(block: Json, where: str) -> Json:
    """An image as a chat has it."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("base64", "url"):
        raise field_error(f"{where}.source", "must be an object of type 'base64' or 'url'")
    if kind == "url":
        url = _string(source, "url", f"{where}.source")
    else:
        media_type, data = (_string(source, name, f"{where}.source") for name in ("media_type", "data"))
        url = f"data:{media_type};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _result(block: Json, where: str) -> str:
    """A tool's result as text; a chat has no other place to say that it is an error."""
    content = block.get("content")
    if isinstance(content, list):
        texts = [(one, f"{where}.content.{place}") for place, one in enumerate(content) if not _is_reference(one)]
        content = "\n".join(_text(one, path) for one, path in texts)
    if not isinstance(content, str | None):
        raise field_error(f"{where}.content", "must be text or a list of blocks")
    if not isinstance(block.get("is_error"), bool | None):
        raise field_error(f"{where}.is_error", "must be true or false")
    return f"Error: {content or ''}" if block.get("is_error") else content or ""


def _references(block: Json, where: str) -> list[Json]:
    """The tools that a search for tools found, as templates know them."""
    content = block.get("content")
    return [
        {"type": "tool_reference", "name": _name(one, "tool_name", f"{where}.content.{place}")}
        for place, one in enumerate(content if isinstance(content, list) else ())
        if _is_reference(one)
    ]


def _is_reference(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_reference"


def _text(block: Any, where: str) -> str:
    if not (isinstance(block, dict) and block.get("type") == "text"):
        kind = block.get("type") if isinstance(block, dict) else block
        raise field_error(where, f"blocks of type {str(kind)[:40]!r} are not supported; those of type 'text' are")
    return _string(block, "text", where)


def _string(block: Json, name: str, where: str) -> str:
    if not isinstance(value := block.get(name), str):
        raise field_error(f"{where}.{name}", "must be a string")
    return value


def _name(block: Json, name: str, where: str) -> str:
    """Of a tool or a call."""
    if not (value := _string(block, name, where)):
        raise field_error(f"{where}.{name}", "must not be empty")
    return value


def _tools(request: Conversation) -> Json:
    """tools and tool_choice."""
    found: Json = {}
    tools = [_tool(tool, f"tools.{place}") for place, tool in enumerate(request.tools or ()) if not _is_run(tool)]
    if tools:
        found["tools"] = tools
    choice = request.tool_choice
    if choice is None:
        return found
    if choice.type in ("any", "tool") and not tools:
        raise field_error("tool_choice", f"{choice.type!r} needs tools")
    if choice.type == "tool":
        names = [tool["function"]["name"] for tool in tools]
        if choice.name not in names:
            raise field_error("tool_choice.name", f"there is no tool {(choice.name or '')[:40]!r}")
        found["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif tools:
        found["tool_choice"] = "required" if choice.type == "any" else choice.type
    found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return found


def _is_run(tool: Json) -> bool:
    """Whether a server would run it."""
    return isinstance(kind := tool.get("type"), str) and SERVER_TOOLS.fullmatch(kind) is not None


def left_out(request: Conversation) -> tuple[str, ...]:
    """The types of tools that the model is not told of, as unknown fields are named."""
    kinds = {tool["type"] for tool in request.tools or () if _is_run(tool)}
    return tuple(f"tools of type {kind}" for kind in sorted(kinds))


def _tool(tool: Json, where: str) -> Json:
    if tool.get("type") not in (None, "custom"):
        text = f"tools of type {str(tool['type'])[:40]!r} are not supported; those of the client's own are"
        raise field_error(where, text)
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise field_error(f"{where}.input_schema", "must be a JSON schema")
    if not _string(tool, "name", where):
        raise field_error(f"{where}.name", "must not be empty")
    function = {"name": tool["name"], "parameters": {"type": "object", **schema}}
    if tool.get("description") is not None:
        function["description"] = _string(tool, "description", where)
    if tool.get("strict") is not None:
        if not isinstance(tool["strict"], bool):
            raise field_error(f"{where}.strict", "must be true or false")
        function["strict"] = tool["strict"]
    deferred = {} if tool.get("defer_loading") is None else {"defer_loading": tool["defer_loading"]}
    return {"type": "function", "function": function, **deferred}
