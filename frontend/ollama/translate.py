"""A body of Ollama's to the chat or completion request that means the same. Pure; HttpError names the field as Ollama does.

Called by routes.py.
"""

import json
from typing import Any

from meshlm.frontend.http.errors import field_error
from meshlm.frontend.ollama.schema import ChatBody, GenerateBody, GenerationCommon, Options
from meshlm.frontend.openai.schema import ChatRequest, CompletionRequest
from meshlm.protocol.config import ServerConfig

Json = dict[str, Any]
LATEST = ":latest"  # the tag that Ollama's clients add to a name without one
# The name of a field in a chat's refusal -> its name here.
NAMES = {
    "max_completion_tokens": "options.num_predict",
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "reasoning_effort": "think",
    "repetition_penalty": "options.repeat_penalty",
    **{name: f"options.{name}" for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop")},
    **{name: f"options.{name}" for name in ("presence_penalty", "frequency_penalty")},
}
ROLES = ("system", "user", "assistant", "tool")
_SAME = ("temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "seed", "stop")


def is_load(body: GenerationCommon) -> bool:
    """Whether a body without a prompt asks for nothing but the model to be there. HttpError where it asks for it to go."""
    if isinstance(body, ChatBody):
        has_prompt = bool(body.messages)
    else:
        assert isinstance(body, GenerateBody)
        has_prompt = bool(body.prompt or body.images or body.suffix or body.system)
    if not has_prompt and body.keep_alive in (0, "0", "0s"):
        raise field_error("keep_alive", "the model of this server stays loaded as long as the server runs")
    return not has_prompt


def chat_of_messages(body: ChatBody, server: ServerConfig) -> ChatRequest:
    """POST /api/chat."""
    messages = _messages(body.messages)
    goes_on = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    tools = {"tools": body.tools} if body.tools else {}
    return _chat(body, server, messages, continue_final_message=goes_on, **tools)


def chat_of_prompt(body: GenerateBody, server: ServerConfig) -> ChatRequest:
    """POST /api/generate: a prompt for the model's template."""
    _check_prompt(body)
    system = [{"role": "system", "content": body.system}] if body.system else []
    return _chat(body, server, [*system, {"role": "user", "content": _content(body.prompt, body.images, "images")}])


def completion(body: GenerateBody) -> CompletionRequest:
    """POST /api/generate with raw: true, whose prompt is as it is, or with a suffix."""
    _check_prompt(body)
    for name, given in (("system", body.system), ("images", body.images), ("think", body.think)):
        if given:
            raise field_error(name, "goes with neither raw: true nor suffix")
    fields: Json = {"prompt": body.prompt, "suffix": body.suffix or None, **_common(body)}
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    if fields.get("max_tokens") is None:
        fields["max_tokens"] = None  # as many as the context holds: routes.py knows how many these are
    return CompletionRequest(model=body.model, **fields)


def _check_prompt(body: GenerateBody) -> None:
    if body.template:
        raise field_error("template", "not supported; the model's own template is used, and with raw: true none")
    if body.context:
        raise field_error("context", "not supported; send the conversation to /api/chat")


def _chat(body: GenerationCommon, server: ServerConfig, messages: list[Json], **fields: Any) -> ChatRequest:
    fields |= {**_common(body), **_thinking(body.think, server)}
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return ChatRequest(model=body.model, messages=messages, **fields)


def _common(body: GenerationCommon) -> Json:
    """What both paths take: how tokens are drawn, the form of the answer."""
    if body.top_logprobs and not body.logprobs:
        raise field_error("top_logprobs", "needs logprobs: true")
    options = body.options or Options()
    fields: Json = {"stream": body.stream is not False, **{name: getattr(options, name) for name in _SAME}}
    fields["repetition_penalty"] = options.repeat_penalty
    if options.num_predict == 0:
        raise field_error("options.num_predict", "must be at least 1, or -1 for as many as the context holds")
    if options.num_predict is not None and options.num_predict > 0:
        fields["max_tokens"] = options.num_predict
    return fields | _format(body.format)


def _format(wanted: Any) -> Json:
    if not wanted:
        return {}
    if wanted == "json":
        return {"response_format": {"type": "json_object"}}
    if not isinstance(wanted, dict):
        raise field_error("format", "must be 'json' or a JSON schema")
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}}


def _thinking(think: Any, server: ServerConfig) -> Json:
    """The template's switches. Reasoning that is told apart needs a parser."""
    if think is None:
        return {}
    if think not in (True, False, "low", "medium", "high") or type(think) in (int, float):
        raise field_error("think", "must be true, false, 'low', 'medium' or 'high'")
    if think and not server.reasoning_parser:
        raise field_error("think", "the server tells no reasoning from an answer (--reasoning-parser)")
    fields: Json = {"chat_template_kwargs": {"enable_thinking": bool(think), "thinking": bool(think)}}
    return fields | ({"reasoning_effort": think} if isinstance(think, str) else {})


def _messages(given: list[Json]) -> list[Json]:
    """Messages as a chat has them. A call without an id gets one; the results that follow get the ids of the calls, in their order."""
    messages, open_calls, count = list[Json](), list[Json](), 0
    for place, message in enumerate(given):
        where = f"messages.{place}"
        role, content = message.get("role"), message.get("content", "")
        if role not in ROLES:
            raise field_error(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        if not isinstance(content, str | None):
            raise field_error(f"{where}.content", "must be text")
        found: Json = {"role": role, "content": _content(content or "", message.get("images"), f"{where}.images")}
        if role == "assistant":
            if isinstance(thinking := message.get("thinking"), str) and thinking:
                found["reasoning"] = thinking
            if calls := message.get("tool_calls"):
                open_calls = _calls(calls, f"{where}.tool_calls", count)
                count += len(open_calls)
                found["tool_calls"] = open_calls
                open_calls = [*open_calls]
        elif role == "tool":
            found["tool_call_id"] = _result_of(message, open_calls)
        messages.append(found)
    return messages


def _content(text: str, images: Any, where: str) -> str | list[Json]:
    """The text, with the images before it."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(one, str) for one in images):
        raise field_error(where, "must be a list of images in base64")
    urls = [f"data:application/octet-stream;base64,{one}" for one in images]
    return [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": text}]


def _calls(calls: Any, where: str, count: int) -> list[Json]:
    if not isinstance(calls, list):
        raise field_error(where, "must be a list of calls")
    found = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
            raise field_error(f"{where}.{place}.function", "must be an object with the function's name")
        if not isinstance(arguments := function.get("arguments", {}), dict | None):
            raise field_error(f"{where}.{place}.function.arguments", "must be an object")
        text = json.dumps(arguments or {}, ensure_ascii=False)
        call_id = call["id"] if isinstance(call.get("id"), str) and call["id"] else f"call_{count + place}"
        found.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": text}})
    return found


def _result_of(message: Json, open_calls: list[Json]) -> str:
    """The id of the call whose result this is: the one that it names, else the first of its tool's name, else the first."""
    if isinstance(given := message.get("tool_call_id"), str) and given:
        return given
    named = [call for call in open_calls if call["function"]["name"] == message.get("tool_name", message.get("name"))]
    if not (fitting := named or open_calls):
        return "call"  # templates want one, and nothing tells which
    call = fitting[0]
    open_calls.remove(call)
    return str(call["id"])
