"""A body of POST /v1/responses to the chat request that means the same, and what its answer repeats of it. Pure."""

from collections.abc import Callable
from typing import Any

from meshlm.frontend.http.answer_fields import REFUSED_RESPONSES
from meshlm.frontend.http.errors import HttpError, field_error
from meshlm.frontend.openai import parse
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.schema import ChatRequest, SamplingFields
from meshlm.frontend.requests.generation import Backend
from meshlm.frontend.responses_api import items, tools
from meshlm.frontend.responses_api.schema import LOGPROBS, ResponsesRequest
from meshlm.protocol.config import ServerConfig

Json = dict[str, Any]
MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_TEXT = 16, 64, 512  # OpenAI's
# The name of a field in a chat's refusal -> its name here.
NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "truncate_prompt_tokens": "truncation",
}
# Fields that a chat has too.
_SAME = (
    *SamplingFields.__struct_fields__,
    "include_reasoning",
    "chat_template_kwargs",
    "parallel_tool_calls",
    "vllm_xargs",
)


def check(request: ResponsesRequest) -> None:
    """Refuses what is not there, and fields that do not fit each other."""
    for field, why in REFUSED_RESPONSES.items():
        if getattr(request, field):
            raise field_error(field, f"{why}")
    if not request.input and not request.previous_input_messages:
        raise field_error("input", "give a text or a list of items")
    if request.background and request.store is False:
        raise field_error("background", "a response that is not stored cannot be asked for")
    if request.stream_options is not None and not request.stream:
        raise HttpError(400, "stream_options needs stream: true", "stream_options")
    for field in ("conversation", items.PREVIOUS):
        if getattr(request, field) and request.previous_response_id:
            raise field_error(field, "give either this or previous_response_id")
    if conversation_of(request) and request.previous_input_messages:
        raise HttpError(400, f"{items.PREVIOUS}: give either this or conversation", items.PREVIOUS)
    check_metadata(request.metadata)


def check_metadata(metadata: dict[str, str] | None) -> None:
    if len(metadata or {}) > MAX_METADATA:
        raise field_error("metadata", f"at most {MAX_METADATA} entries")
    for name, text in (metadata or {}).items():
        if len(name) > MAX_METADATA_NAME or len(text) > MAX_METADATA_TEXT:
            limits = f"names of {MAX_METADATA_NAME} characters and texts of {MAX_METADATA_TEXT} at most"
            raise field_error("metadata", f"{limits}")


def conversation_of(request: ResponsesRequest) -> str:
    """The name of the conversation that the request belongs to; empty without one."""
    given = request.conversation
    name = given.get("id") if isinstance(given, dict) else given
    if not isinstance(name, str | None):
        raise field_error("conversation", "the id of a conversation is expected")
    return name or ""


def chat_request(request: ResponsesRequest, before: list[Json]) -> ChatRequest:
    """`before`: the items of the conversation that the request goes on with."""
    mine = items.listed(request.input or [])
    messages = items.messages_of([*before, *mine], "input") if not before else _joined(before, mine)
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    wants_logprobs = LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    fields: Json = {
        **{name: getattr(request, name) for name in _SAME},
        "messages": messages,
        "max_tokens": request.max_output_tokens,
        "logprobs": wants_logprobs,
        "top_logprobs": request.top_logprobs or 0 if wants_logprobs else None,
        "continue_final_message": items.goes_on(mine),
        "return_token_ids": request.enable_response_messages,
        "return_prompt_text": request.enable_response_messages,
        **tools.chat_fields(request),
    }
    if request.truncation == "auto":
        fields["truncate_prompt_tokens"] = -1
    if request.reasoning is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    if request.text is not None:
        fields["verbosity"] = request.text.verbosity
    if (form := request.text.format if request.text is not None else None) is not None:
        fields["response_format"] = _response_format(form)
        if request.structured_outputs is not None:
            raise field_error("structured_outputs", "give either this or text.format")
    return ChatRequest(**fields)


def _joined(before: list[Json], mine: list[Json]) -> list[Json]:
    """The messages of both; a call's result may answer a call of what came before."""
    items.messages_of(mine, "input")  # which names what is wrong by its place in the request
    return items.messages_of([*before, *mine], "input")


def _response_format(form: Json) -> Json:
    """text.format in the form of a chat's response_format."""
    if form.get("type") != "json_schema":
        return form
    inner = {name: value for name, value in form.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": inner}


def asked(
    request: ResponsesRequest,
    unknown: tuple[str, ...],
    before: list[Json],
    backend: Backend,
    change: Callable[[ChatRequest, ServerConfig], tuple[ChatRequest, ServerConfig]] | None = None,
) -> ParsedRequest:
    """The request as the mesh is asked it. `before`: the items of the conversation so far. `change` makes another one of the chat."""
    with parse.renamed(NAMES):
        chat, server = chat_request(request, before), backend.config.server
        if change is not None:
            chat, server = change(chat, server)
        found = parse.chat(chat, (*unknown, *tools.left_out(request)), backend.resolved, server, media=True)
    name = (request.request_id or "").removeprefix("resp_")
    return found.with_answer(client_names=NAMES)._replace(request_id=name)


def repeated(request: ResponsesRequest, parsed_request: ParsedRequest, *, stores: bool) -> Json:
    """The fields of an answer that repeat the request, with the values that hold."""
    default = "auto" if request.tools else "none"
    return {
        **_plain(request, ("instructions", "previous_response_id", "max_output_tokens", "max_tool_calls")),
        **_plain(request, ("user", "safety_identifier", "prompt_cache_key")),
        **_plain(parsed_request.mesh.sampling, ("temperature", "top_p", "presence_penalty", "frequency_penalty")),
        **dict.fromkeys(("prompt", "kv_transfer_params", "ec_transfer_params", "input_messages", "output_messages")),
        "conversation": {"id": name} if (name := conversation_of(request)) else None,
        "background": bool(request.background),
        "store": stores,
        "metadata": request.metadata or {},
        "tools": tools.repeated(request.tools),
        "tool_choice": request.tool_choice or default,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": _plain(request.reasoning, ("effort", "summary")),
        "text": {**_plain(request.text, ("verbosity",)), "format": _format_of(request)},
        "top_logprobs": request.top_logprobs or 0,
        "truncation": request.truncation or "disabled",
        "service_tier": request.service_tier or "auto",
    }


def _plain(value: object, names: tuple[str, ...]) -> Json:
    return {name: getattr(value, name, None) for name in names}


def _format_of(request: ResponsesRequest) -> Json:
    form = request.text.format if request.text is not None else None
    return form or {"type": "text"}
