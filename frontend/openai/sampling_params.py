"""How a request's tokens are drawn, and how it has its text. Pure; HttpError names the field at fault. Called by parse.py."""

import math
from typing import Any

import msgspec

from meshlm.frontend.http.errors import field_error
from meshlm.frontend.openai.schema import MAX_BAD_WORDS, MAX_STOP_LENGTH, MAX_STOP_STRINGS, Common
from meshlm.protocol import kv_transfer, samplers
from meshlm.protocol.config import Resolved
from meshlm.protocol.drafting import NAME, drafting_of
from meshlm.protocol.edges.text import TextParams
from meshlm.protocol.extras import Extras
from meshlm.protocol.sampling import RepetitionDetection, SamplingParams

MAX_ID_DIGITS = 10
MAX_XARGS_BYTES = 16384


def token_ids(name: str, ids: list[int], vocab_size: int) -> tuple[int, ...]:
    """Ids that the vocabulary has, each once; HttpError names the field otherwise."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):  # in C: there may be many
        token = next(token for token in ids if not 0 <= token < vocab_size)
        raise field_error(name, f"token id {token} is outside the vocabulary 0..{vocab_size - 1}")
    return tuple(dict.fromkeys(ids))


def from_request(request: Common, resolved: Resolved, logprobs: int, prompt_logprobs: int) -> SamplingParams:
    """The request's own values, else those of the generation config. logprobs, prompt_logprobs: -1 for none."""

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
        stop_token_ids=token_ids("stop_token_ids", request.stop_token_ids or [], vocab_size),
        eos_token_ids=() if request.ignore_eos else resolved.eos_token_ids,
        logit_bias=_bias(request.logit_bias or {}, vocab_size),
        allowed_token_ids=_allowed(request.allowed_token_ids, vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_token_ids=token_ids("logprob_token_ids", request.logprob_token_ids or [], vocab_size),
        repetition_detection=_repetition_detection(request),
        extra_args=_extra_args(request.vllm_xargs or {}, resolved),
        **{name: value for name in samplers.NAMES if (value := getattr(request, name)) is not None},
    )


def _repetition_detection(request: Common) -> RepetitionDetection | None:
    wanted, name = request.repetition_detection, "repetition_detection"
    if wanted is None or (wanted.max_pattern_size == 0 and wanted.min_pattern_size == 0):
        return None
    if wanted.min_pattern_size > wanted.max_pattern_size:
        raise field_error(name, "min_pattern_size is at most max_pattern_size")
    if wanted.min_count < 2:
        raise field_error(name, "min_count must be at least 2; one time is no repetition")
    return RepetitionDetection(wanted.max_pattern_size, max(1, wanted.min_pattern_size), wanted.min_count)


def _extra_args(given: dict[str, Any], resolved: Resolved) -> dict[str, Any]:
    """The arguments of logits processors, whose classes are asked later (generation.py)."""
    if given and not resolved.logits_processors:
        text = "the server has no logits processors that would read them (--logits-processors)"
        raise field_error("vllm_xargs", text)
    if len(msgspec.json.encode(given)) > MAX_XARGS_BYTES:
        raise field_error("vllm_xargs", f"at most {MAX_XARGS_BYTES} bytes")
    return given


def extras(request: Common, resolved: Resolved) -> Extras:
    """What the request says of the tokens that are drafted for it, and of the KV of its prompt."""
    try:
        drafting = drafting_of(request.num_speculative_tokens, resolved.num_speculative_tokens)
    except ValueError as error:
        raise field_error(NAME, str(error)) from None
    return *drafting, *_transfer(request, resolved)


def _transfer(request: Common, resolved: Resolved) -> tuple[kv_transfer.KVTransfer, ...]:
    """HttpError where its answer could not tell whom the KV was left to."""
    try:
        found = kv_transfer.transfer_of(
            request.kv_transfer_params, has_connector=resolved.transfers_kv, hosts=resolved.kv_remote_hosts
        )
    except ValueError as error:
        raise field_error(kv_transfer.NAME, str(error)) from None
    if found and found[0].leaves and (request.stream or (request.n or 1) > 1 or request.use_beam_search):
        raise field_error(kv_transfer.NAME, "do_remote_decode is for one choice that is not streamed")
    return found


def _allowed(ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    if ids is not None and not ids:
        raise field_error("allowed_token_ids", "an empty list allows no token")
    return token_ids("allowed_token_ids", ids or [], vocab_size)


def _bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    found = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS):
            raise field_error("logit_bias", f"{key[:20]!r} is no token id")
        token_ids("logit_bias", [int(key)], vocab_size)
        if math.isnan(value):
            raise field_error("logit_bias", f"that of {key} is no number")
        found[int(key)] = min(100.0, max(-100.0, value))  # OpenAI's range
    return found


# Beam search takes the likeliest of the model's own log-probabilities, which these do not change.
_OF_DRAWS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "eos_token_ids", "logprobs")


def check_beams(request: Common, resolved: Resolved, text: TextParams) -> None:
    """Refuses what the search would not heed, where the client asks for it; a generation config does not ask."""
    asked = from_request(request, msgspec.structs.replace(resolved, generation_defaults={}), -1, -1)
    neutral = SamplingParams()
    names = [name for name in neutral.__struct_fields__ if name not in _OF_DRAWS]
    refused = [name for name in names if getattr(asked, name) != getattr(neutral, name)]
    refused += [name for name in ("stop", "bad_words") if getattr(text, name)]
    refused += ["prompt_logprobs"] * (request.prompt_logprobs is not None)
    refused += ["best_of"] * ((getattr(request, "best_of", None) or request.n or 1) != (request.n or 1))
    refused += ["echo"] * bool(getattr(request, "echo", False) and getattr(request, "logprobs", None) is not None)
    refused += ["max_tokens"] * (request.max_tokens == 0)
    if refused:
        name = {"bad_words_token_ids": "bad_words"}.get(refused[0], refused[0])
        raise field_error(name, "does not go with use_beam_search")


def text_params(request: Common, truncation: int, keep_special_tokens: tuple[str, ...]) -> TextParams:
    """The settings for the detokenizer."""
    return TextParams(
        stop=_stops(request.stop),
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        spaces_between_special_tokens=request.spaces_between_special_tokens,
        truncate_prompt_tokens=truncation,
        truncation_side=request.truncation_side or "left",
        bad_words=_bad_words(request.bad_words or []),
        keep_special_tokens=keep_special_tokens,
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else (stop or [])
    if len(texts) > MAX_STOP_STRINGS:
        raise field_error("stop", f"{len(texts)} strings; at most {MAX_STOP_STRINGS} are allowed")
    if any(not 1 <= len(text) <= MAX_STOP_LENGTH for text in texts):
        raise field_error("stop", f"each string must have 1 to {MAX_STOP_LENGTH} characters")
    return tuple(texts)


def _bad_words(words: list[str]) -> tuple[str, ...]:
    if len(words) > MAX_BAD_WORDS:
        raise field_error("bad_words", f"{len(words)} words; at most {MAX_BAD_WORDS} are allowed")
    if not all(1 <= len(word) <= MAX_STOP_LENGTH and word.strip() for word in words):
        raise field_error("bad_words", f"each must have 1 to {MAX_STOP_LENGTH} characters, not blanks alone")
    return tuple(words)
