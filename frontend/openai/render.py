"""A parsed request, whose prompts have become token ids, as the request for POST /inference/v1/generate that it stands for, and as a
completion. Pure."""

from typing import Any

import msgspec

from meshlm.frontend.http.errors import HttpError, field_error
from meshlm.frontend.openai import embeds
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.protocol import samplers
from meshlm.protocol.drafting import Drafting
from meshlm.protocol.edges.text import TextParams
from meshlm.protocol.extras import find_extra
from meshlm.protocol.grammar import Grammar, GrammarKind

Json = dict[str, Any]
SAME = (  # names of SamplingParams that are vLLM's too
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


def completion_alone(parsed_request: ParsedRequest, ids: list[int], model: str, context: int) -> Json:
    """The fields of a completion that asks for one of the request's sequences behind these ids; but for its seed."""
    room, most = context - len(ids), parsed_request.mesh.max_tokens
    sampling = {**_sampling(parsed_request), "n": 1, "max_tokens": room if most is None else min(most, room)}
    other = {"extra_args": "vllm_xargs"}
    given = {other.get(name, name): value for name, value in sampling.items() if name != "timeout"}
    return {**msgspec.to_builtins(given), "model": model, "prompt": ids, "return_token_ids": True}


def check(parsed_request: ParsedRequest) -> None:
    """Refuses what is no single generation."""
    if parsed_request.mesh.beams:
        raise field_error("use_beam_search", "a search is many requests")
    if any(map(embeds.vectors_of, parsed_request.mesh.prompts)):
        raise field_error("prompt_embeds", "vectors cannot be rendered to token ids")
    if parsed_request.mesh.media:
        name = "messages" if parsed_request.answer.is_chat else "multi_modal_data"
        raise field_error(name, "images cannot be rendered to token ids")
    if parsed_request.mesh.num_choices != parsed_request.answer.num_returned:
        raise field_error("best_of", "is chosen where the tokens are")
    if (grammar := find_extra(parsed_request.mesh.extras, Grammar)) is not None and grammar.begins_after:
        field = grammar.param.split(".")[0]
        raise field_error(field, "begins behind the reasoning, which token ids alone do not tell")
    if parsed_request.answer.echo:
        raise field_error("echo", "an answer of token ids has no prompt in it")
    if parsed_request.answer.prompt_only:
        raise field_error("max_tokens", "0 asks for no token")


def kept(ids: list[int], text: TextParams) -> slice:
    """The part of a prompt that truncate_prompt_tokens leaves."""
    keep = text.truncate_prompt_tokens
    if not keep or keep >= len(ids):
        return slice(0, len(ids))
    return slice(0, keep) if text.truncation_side == "right" else slice(len(ids) - keep, len(ids))


def rendered(
    parsed_request: ParsedRequest,
    name: str,
    model: str | None,
    ids: list[int],
    offsets: list[tuple[int, int]] | None,
    mask: list[int] | None,
    context: int,
) -> Json:
    """The request for one prompt. HttpError where generation would refuse its length."""
    part = kept(ids, parsed_request.mesh.text)
    ids, offsets, mask = ids[part], offsets and offsets[part], mask and mask[part]
    room = context - len(ids)
    prompt, most = (parsed_request.answer.client_names.get(field, field) for field in ("prompt", "max_tokens"))
    if not ids or room < 1:
        text = f"{prompt}: {len(ids)} tokens; this model's maximum context length is {context}, with an output token"
        raise HttpError(400, text, prompt)
    wanted = room if parsed_request.mesh.max_tokens is None else parsed_request.mesh.max_tokens
    if wanted > room and not parsed_request.mesh.cap_max_tokens:
        raise field_error(most, f"{wanted} are more than the {room} that the context leaves")
    options = (
        {"include_usage": True, "continuous_usage_stats": parsed_request.answer.continuous_usage}
        if parsed_request.answer.include_usage
        else None
    )
    return {
        "request_id": name,
        "token_ids": ids,
        "assistant_tokens_mask": mask,
        "token_offsets": offsets,
        "features": None,
        "sampling_params": {**_sampling(parsed_request), "max_tokens": min(wanted, room)},
        "model": model,
        "stream": parsed_request.answer.stream,
        "stream_options": options if parsed_request.answer.stream else None,
        "cache_salt": parsed_request.mesh.cache_salt or None,
        "priority": parsed_request.mesh.priority,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def _constraint(grammar: Grammar) -> Json:
    """The grammar as `structured_outputs` has it."""
    value: Any = grammar.text
    if grammar.kind is GrammarKind.JSON_OBJECT:
        value = True
    elif grammar.kind in (GrammarKind.CHOICE, GrammarKind.JSON_SCHEMA):
        value = msgspec.json.decode(grammar.text)
    found: Json = {"json" if grammar.kind is GrammarKind.JSON_SCHEMA else grammar.kind.value: value}
    if not grammar.strict:
        found["strict"] = False
    if not grammar.any_whitespace:
        found["disable_any_whitespace"] = True
    if not grammar.additional_properties:
        found["disable_additional_properties"] = True
    return found | ({"whitespace_pattern": grammar.whitespace_pattern} if grammar.whitespace_pattern else {})


def _sampling(parsed_request: ParsedRequest) -> Json:
    """With vLLM's names, and what is not asked for left out."""
    sampling, text = parsed_request.mesh.sampling, parsed_request.mesh.text
    found: Json = {"n": parsed_request.mesh.num_choices, **{name: getattr(sampling, name) for name in SAME}}
    neutral = samplers.LlamaSamplers()
    found |= {name: own for name in samplers.NAMES if (own := getattr(sampling, name)) != getattr(neutral, name)}
    grammar = find_extra(parsed_request.mesh.extras, Grammar)
    drafting = find_extra(parsed_request.mesh.extras, Drafting)
    wanted: Json = {
        "seed": parsed_request.mesh.seed,
        "stop": list(text.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "bad_words": list(text.bad_words) or None,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "logprobs": parsed_request.answer.logprobs if parsed_request.answer.logprobs >= 0 else None,
        "prompt_logprobs": parsed_request.answer.prompt_logprobs
        if parsed_request.answer.prompt_logprobs >= 0
        else None,
        "logprob_token_ids": list(sampling.logprob_token_ids) or None,
        "repetition_detection": sampling.repetition_detection,
        "ignore_eos": not sampling.eos_token_ids or None,
        "include_stop_str_in_output": text.include_stop_str_in_output or None,
        "skip_special_tokens": None if text.skip_special_tokens else False,
        "spaces_between_special_tokens": None if text.spaces_between_special_tokens else False,
        "structured_outputs": None if grammar is None or grammar.kind is GrammarKind.FREE else _constraint(grammar),
        "thinking_token_budget": None if grammar is None or grammar.thinking is None else grammar.thinking.num_tokens,
        "num_speculative_tokens": None if drafting is None else drafting.num_speculative_tokens,
        "extra_args": sampling.extra_args or None,
        "timeout": parsed_request.mesh.timeout_s or None,
    }
    return found | {name: value for name, value in wanted.items() if value is not None}
