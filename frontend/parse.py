"""A request body to what the mesh is asked: prompts and parameters. Pure; HttpError names the field at fault."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from meshlm.frontend.errors import HttpError
from meshlm.frontend.schema import (
    MAX_SEQUENCES,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    NOT_SUPPORTED,
    STRUCTURED,
    ChatRequest,
    Common,
    CompletionRequest,
    TokenizeRequest,
)
from meshlm.protocol.columns import pack_i32
from meshlm.protocol.config import Resolved
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.text_edge import ChatPrompt, Prompt, TextParams, TextPrompt, TokenPrompt

Body = TypeVar("Body", bound=Struct)
MAX_PROMPTS = 2048
MAX_ID_DIGITS = 10


class Ask(NamedTuple):
    """What one HTTP request asks of the mesh."""

    prompts: list[Prompt]
    sampling: SamplingParams  # its seed is drawn later
    seed: int | None  # the client's
    text: TextParams
    max_tokens: int | None
    num_choices: int  # per prompt, as generated
    num_returned: int  # per prompt, as answered (best_of >= n)
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    logprobs: int  # that the client reads; -1: none
    prompt_logprobs: int
    return_token_ids: bool
    priority: int
    cache_salt: str
    timeout_s: float
    is_chat: bool
    unknown_fields: tuple[str, ...]
    client_names: Mapping[str, str] = MappingProxyType(
        {}
    )  # the mesh's name of a field -> the client's, where they differ


def decode(body: bytes, kind: type[Body]) -> tuple[Body, tuple[str, ...]]:
    """The body as its Struct, and the names of fields that nobody knows."""
    try:
        raw = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise HttpError(400, f"the body is not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise HttpError(400, f"the body is not valid UTF-8: {error.reason} at byte {_bad_byte(body)}") from None
    except RecursionError:
        raise HttpError(400, "the body is nested too deeply") from None
    if not isinstance(raw, dict):
        raise HttpError(400, f"the body must be a JSON object, got {type(raw).__name__}")
    try:
        value = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        param = path.rstrip("`")
        if not path and "required field" in what:
            param = what.rpartition("`")[0].rpartition("`")[2]
        raise HttpError(400, f"{param}: {what}" if param else what, param.split("[")[0]) from None
    unknown = sorted(raw.keys() - set(kind.__struct_fields__))
    for name in unknown:
        if name in NOT_SUPPORTED and (raw[name] or (name in STRUCTURED and raw[name] is not None)):
            raise HttpError(400, f"{name}: {NOT_SUPPORTED[name]}", name)
    return value, tuple(unknown)


def _bad_byte(body: bytes) -> int:
    """Where the first byte is that is not UTF-8; msgspec counts from the beginning of the string it stands in."""
    try:
        return len(body.decode())
    except UnicodeDecodeError as error:
        return error.start


def completion(request: CompletionRequest, unknown: tuple[str, ...], resolved: Resolved, max_logprobs: int) -> Ask:
    """POST /v1/completions."""
    if request.suffix:
        raise HttpError(400, "suffix is not supported", "suffix")
    returned = request.n or 1
    generated = request.best_of or returned
    if generated < returned:
        raise HttpError(400, f"best_of ({generated}) must be at least n ({returned})", "best_of")
    if generated > returned and request.stream:
        raise HttpError(400, "best_of > n cannot be streamed", "best_of")
    logprobs = -1 if request.logprobs is None else _limited("logprobs", request.logprobs, max_logprobs)
    add_special = request.add_special_tokens is not False
    prompt_logprobs = request.prompt_logprobs
    if request.echo and logprobs >= 0 and prompt_logprobs is None:
        prompt_logprobs = logprobs
    default = request.max_tokens or int(resolved.generation_defaults.get("max_tokens", 16))
    return _ask(
        request,
        unknown,
        resolved,
        max_logprobs,
        prompts=_prompts(request.prompt, add_special, resolved),
        max_tokens=default,
        num_choices=generated,
        num_returned=returned,
        echo=bool(request.echo),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        is_chat=False,
    )


def chat(request: ChatRequest, unknown: tuple[str, ...], resolved: Resolved, max_logprobs: int) -> Ask:
    """POST /v1/chat/completions."""
    if not request.messages:
        raise HttpError(400, "messages: give at least one message", "messages")
    if request.top_logprobs and not request.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    if request.tools:
        raise HttpError(400, "tools are not supported", "tools")
    if request.tool_choice not in (None, "none", "auto"):
        raise HttpError(400, "tool_choice: only 'none' and 'auto' are supported, as tools are not", "tool_choice")
    logprobs = _limited("top_logprobs", request.top_logprobs or 0, max_logprobs) if request.logprobs else -1
    default = resolved.generation_defaults.get("max_tokens")
    prompt = chat_prompt(
        request.messages,
        None,
        request.chat_template,
        request.chat_template_kwargs,
        add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
        continue_final_message=request.continue_final_message,
        add_special_tokens=bool(request.add_special_tokens),
    )
    num_choices = request.n or 1
    return _ask(
        request,
        unknown,
        resolved,
        max_logprobs,
        prompts=[prompt],
        max_tokens=request.max_completion_tokens or request.max_tokens or (int(default) if default else None),
        num_choices=num_choices,
        num_returned=num_choices,
        echo=False,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        is_chat=True,
    )


def _ask(
    request: Common,
    unknown: tuple[str, ...],
    resolved: Resolved,
    max_logprobs: int,
    *,
    prompts: list[Prompt],
    max_tokens: int | None,
    num_choices: int,
    num_returned: int,
    echo: bool,
    logprobs: int,
    prompt_logprobs: int | None,
    is_chat: bool,
) -> Ask:
    """The part that both endpoints share."""
    if request.response_format is not None and (kind := request.response_format.get("type")) != "text":
        raise HttpError(400, f"response_format: type {kind!r} is not supported; only 'text' is", "response_format")
    options = request.stream_options
    if options is not None and not request.stream:
        raise HttpError(400, "stream_options needs stream: true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise HttpError(400, "prompt_logprobs are not available with stream: true", "prompt_logprobs")
    if len(prompts) * num_choices > MAX_SEQUENCES:
        text = f"n: {len(prompts)} prompts with {num_choices} choices each are more than {MAX_SEQUENCES} in one request"
        raise HttpError(400, text, "n")
    wanted = -1 if prompt_logprobs is None else _limited("prompt_logprobs", prompt_logprobs, max_logprobs)
    return Ask(
        prompts=prompts,
        # The best of several are chosen by their logprobs.
        sampling=_sampling(request, resolved, max(logprobs, 0) if num_choices > num_returned else logprobs, wanted),
        seed=None if request.seed is None else request.seed & 0x7FFF_FFFF_FFFF_FFFF,
        text=TextParams(
            stop=_stops(request.stop),
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            spaces_between_special_tokens=request.spaces_between_special_tokens,
            truncate_prompt_tokens=request.truncate_prompt_tokens or 0,
        ),
        max_tokens=max_tokens,
        num_choices=num_choices,
        num_returned=num_returned,
        stream=bool(request.stream),
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
        echo=echo,
        logprobs=logprobs,
        prompt_logprobs=wanted,
        return_token_ids=bool(request.return_token_ids),
        priority=request.priority,
        cache_salt=request.cache_salt or "",
        timeout_s=request.timeout or 0.0,
        is_chat=is_chat,
        unknown_fields=unknown,
        client_names=_client_names(request) if is_chat else MappingProxyType({}),
    )


def _client_names(request: Common) -> dict[str, str]:
    """A chat has messages where the mesh has a prompt, and may have the newer name of max_tokens."""
    newer = getattr(request, "max_completion_tokens", None) is not None
    return {"prompt": "messages", **({"max_tokens": "max_completion_tokens"} if newer else {})}


def _limited(name: str, value: int, limit: int) -> int:
    if value > limit:
        raise HttpError(400, f"{name} {value} exceeds the server's limit of {limit} (--max-logprobs)", name)
    return value


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else (stop or [])
    if len(stops) > MAX_STOP_STRINGS:
        raise HttpError(400, f"stop: {len(stops)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop")
    if any(not 1 <= len(text) <= MAX_STOP_LENGTH for text in stops):
        raise HttpError(400, f"stop: each string must have 1 to {MAX_STOP_LENGTH} characters", "stop")
    return tuple(stops)


def _sampling(request: Common, resolved: Resolved, logprobs: int, prompt_logprobs: int) -> SamplingParams:
    def choose(name: str, neutral: float) -> float:
        given = getattr(request, name)
        return float(resolved.generation_defaults.get(name, neutral) if given is None else given)

    vocab_size = resolved.spec.vocab_size
    return SamplingParams(
        min_tokens=request.min_tokens or 0,
        temperature=choose("temperature", 1.0),
        top_p=choose("top_p", 1.0),
        top_k=max(0, int(choose("top_k", 0))),
        min_p=choose("min_p", 0.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=choose("repetition_penalty", 1.0),
        stop_token_ids=_ids("stop_token_ids", request.stop_token_ids or [], vocab_size),
        eos_token_ids=() if request.ignore_eos else resolved.eos_token_ids,
        logit_bias=_bias(request.logit_bias or {}, vocab_size),
        allowed_token_ids=_ids("allowed_token_ids", request.allowed_token_ids or [], vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _ids(name: str, ids: list[int], vocab_size: int) -> tuple[int, ...]:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise HttpError(400, f"{name}: token id {token} is outside the vocabulary 0..{vocab_size - 1}", name)
    return tuple(ids)


def _bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    found = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS):
            raise HttpError(400, f"logit_bias: {key[:20]!r} is no token id", "logit_bias")
        _ids("logit_bias", [int(key)], vocab_size)
        found[int(key)] = value
    return found


def _prompts(prompt: Any, add_special: bool, resolved: Resolved) -> list[Prompt]:
    """Text, token ids, or a list of either."""
    if prompt is None:
        raise HttpError(400, "prompt: this field is required", "prompt")
    many = isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int))
    items = prompt if many else [prompt]
    if not 1 <= len(items) <= MAX_PROMPTS:
        raise HttpError(400, f"prompt: give 1 to {MAX_PROMPTS} prompts, got {len(items)}", "prompt")
    return [_prompt(item, add_special, resolved.spec.vocab_size) for item in items]


def _prompt(item: Any, add_special: bool, vocab_size: int) -> Prompt:
    if isinstance(item, str):
        if not item:
            raise HttpError(400, "prompt: must not be empty", "prompt")
        return TextPrompt(item, add_special)
    if isinstance(item, list) and item and all(type(token) is int for token in item):
        _ids("prompt", item, vocab_size)
        return TokenPrompt(pack_i32(item))
    raise HttpError(400, "prompt: must be text, a list of token ids, or a list of either, none of them empty", "prompt")


def chat_prompt(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    chat_template: str | None,
    template_kwargs: dict[str, Any] | None,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    add_special_tokens: bool = False,
) -> ChatPrompt:
    """Messages checked in outline: what the template makes of them is the detokenizer's to see."""
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        role = message.get("role")
        if not (isinstance(role, str) and role):
            raise HttpError(400, f"{where}.role: must be a string such as 'user'", "messages")
        _check_content(message.get("content"), where)
    return ChatPrompt(
        messages_json=_json("messages", messages),
        tools_json=_json("tools", tools) if tools else b"",
        chat_template=chat_template or "",
        template_kwargs_json=_json("chat_template_kwargs", template_kwargs) if template_kwargs else b"",
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        add_special_tokens=add_special_tokens,
    )


def _json(field: str, value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except RecursionError:
        raise HttpError(400, f"{field}: nested too deeply", field) from None


def _check_content(content: Any, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise HttpError(400, f"{where}.content: must be text or a list of parts", "messages")
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise HttpError(400, f"{where}.content: only parts of type 'text' are supported", "messages")


def tokenize(request: TokenizeRequest) -> Prompt:
    """POST /tokenize."""
    if (request.prompt is None) == (request.messages is None):
        raise HttpError(400, "give either prompt or messages", "prompt")
    if request.prompt is not None:
        return TextPrompt(request.prompt, request.add_special_tokens)
    assert request.messages is not None
    return chat_prompt(
        request.messages,
        request.tools,
        request.chat_template,
        request.chat_template_kwargs,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )
