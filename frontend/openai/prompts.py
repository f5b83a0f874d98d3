"""The prompts of a request body, checked in outline, as the mesh takes them. Pure; HttpError names the field at fault.

Called by parse.py and, for /tokenize, by routes.py. What a chat template makes of messages is the detokenizer's to see.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from meshlm.frontend.http.errors import HttpError, as_http, field_error
from meshlm.frontend.openai import limits
from meshlm.frontend.openai.sampling_params import token_ids
from meshlm.frontend.openai.schema import TokenizeRequest
from meshlm.protocol.config import Resolved, ServerConfig
from meshlm.protocol.edges.media import MediaSource
from meshlm.protocol.edges.text import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from meshlm.protocol.media_spec import MediaSpec
from meshlm.protocol.wire.columns import pack_i32
from meshlm.runtime.errors import RequestError
from meshlm.runtime.mesh import media_parts
from meshlm.runtime.mesh.messages import check_messages, check_template_kwargs, check_tools

MAX_PROMPTS = 2048


def of_completion(
    prompt: Any, add_special: bool, resolved: Resolved, truncates: bool = False, suffix: str = ""
) -> list[Prompt]:
    """Text, token ids, or a list of either; text that a suffix follows."""
    if prompt is None:
        raise field_error("prompt", "this field is required")
    many = isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int | float))
    items = prompt if many else [prompt]
    if not 1 <= len(items) <= MAX_PROMPTS:
        raise field_error("prompt", f"give 1 to {MAX_PROMPTS} prompts, got {len(items)}")
    for item in items:
        if isinstance(item, list):
            limits.check_num_ids(len(item), truncates, resolved)  # before anything looks at them
    items.reverse()
    found = []
    while items:  # each is freed when it is read: to free millions of numbers at once takes as long as to make them
        found.append(_prompt(items.pop(), add_special, resolved.spec.vocab_size, suffix))
    return found


def _prompt(item: Any, add_special: bool, vocab_size: int, suffix: str) -> Prompt:
    if isinstance(item, str):
        if not item:
            raise field_error("prompt", "must not be empty")
        return TextPrompt(item, add_special, suffix)
    if suffix:
        raise field_error("suffix", "needs a prompt of text")
    if isinstance(item, list) and item and (ids := _whole_numbers(item)) is not None:
        if min(ids) < 0 or max(ids) >= vocab_size:
            token_ids("prompt", ids, vocab_size)  # names the first one
        return TokenPrompt(pack_i32(ids))
    raise field_error("prompt", "must be text, a list of token ids, or a list of either, none of them empty")


def of_ids(item: Any, resolved: Resolved, truncates: bool, name: str) -> TokenPrompt | None:
    """Token ids; None where they are none. HttpError names those that are too many or unknown."""
    if not isinstance(item, list) or not item:
        return None
    limits.check_num_ids(len(item), truncates, resolved)  # before anything looks at them
    ids = _whole_numbers(item)
    if ids is None:
        return None
    token_ids(name, [min(ids), max(ids)], resolved.spec.vocab_size)
    return TokenPrompt(pack_i32(ids))


def _whole_numbers(items: list[Any]) -> list[int] | None:
    """The items where all are whole numbers, also as some languages write them: 5.0. No loop in Python for a million ids."""
    kinds = set(map(type, items))
    if kinds == {int}:
        return items
    if kinds <= {int, float} and all(map(float.is_integer, map(float, items))):
        return list(map(int, items))
    return None


def of_template(wanted: dict[str, Any], server: ServerConfig) -> dict[str, Any]:
    """The template's arguments: the server's own give way to the request's."""
    try:
        check_template_kwargs(wanted)
    except RequestError as error:
        raise HttpError(400, error.message, error.param) from None
    if not server.default_chat_template_kwargs:
        return wanted
    return {**msgspec.json.decode(server.default_chat_template_kwargs), **wanted}


def of_chat(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    chat_template: str | None,
    template_kwargs: dict[str, Any],
    server: ServerConfig,
    *,
    add_generation_prompt: bool | UnsetType,
    continue_final_message: bool,
    add_special_tokens: bool = False,
    media: bool = False,
) -> ChatPrompt:
    """Messages and what else the template is given. media: parts may be media."""
    if chat_template and not server.trust_request_chat_template:
        text = "the server takes no template from a request, as one can keep it busy for ever (--trust-request-chat-template)"
        raise field_error("chat_template", text)
    if continue_final_message and add_generation_prompt is True:
        text = "continue_final_message and add_generation_prompt exclude each other"
        raise field_error("add_generation_prompt", text)
    check_shapes(messages, tools, media=media)
    return ChatPrompt(
        messages_json=_json("messages", messages),
        tools_json=_json("tools", [_deferred(tool) for tool in tools]) if tools else b"",
        chat_template=chat_template or "",
        template_kwargs_json=_json("chat_template_kwargs", template_kwargs) if template_kwargs else b"",
        add_generation_prompt=not continue_final_message if add_generation_prompt is UNSET else add_generation_prompt,
        continue_final_message=continue_final_message,
        add_special_tokens=add_special_tokens,
    )


def _deferred(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as templates read it: `defer_loading` is the function's, wherever a client says it, as in vLLM."""
    if tool.get("defer_loading") is None:
        return tool
    return {**tool, "function": {"defer_loading": tool["defer_loading"], **tool["function"]}}


def check_shapes(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, media: bool = False) -> None:
    try:
        check_messages(messages, media=media)
        check_tools(tools or [])
    except RequestError as error:
        raise HttpError.of_kind(error.kind, error.message, error.param) from None


def _json(field: str, value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except RecursionError:
        raise field_error(field, "nested too deeply") from None


def of_tokenize(
    request: TokenizeRequest, server: ServerConfig, spec: MediaSpec | None
) -> tuple[Prompt, list[MediaSource]]:
    """POST /tokenize: the prompt, and the sources of its messages' media. spec: of a model that takes some."""
    if (request.prompt is None) == (request.messages is None):
        raise HttpError(400, "give either prompt or messages", "prompt")
    if request.prompt is not None:
        return TextPrompt(request.prompt, request.add_special_tokens is not False), []
    assert request.messages is not None
    messages, media = with_media(request.messages, request.mm_processor_kwargs, spec)
    conversation = of_chat(
        messages,
        request.tools,
        request.chat_template,
        of_template(request.chat_template_kwargs or {}, server),
        server,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        add_special_tokens=request.add_special_tokens is True,
        media=bool(media),
    )
    return conversation, media


def with_media(
    messages: list[dict[str, Any]], kwargs: dict[str, Any] | None, spec: MediaSpec | None
) -> tuple[list[dict[str, Any]], list[MediaSource]]:
    """The messages as a template takes them, and the sources of their media. kwargs: the request's mm_processor_kwargs."""
    if spec is None:
        if kwargs:
            raise field_error("mm_processor_kwargs", "this model has no vision")
        return messages, []
    with as_http():
        return media_parts.of_messages(
            messages, media_parts.Reading(spec, msgspec.json.encode(kwargs) if kwargs else b"")
        )
