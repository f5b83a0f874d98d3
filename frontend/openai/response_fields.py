"""Fields of answers: log-probabilities, times, the fingerprint, a model's card, and keys that vLLM's answers have with null. Pure."""

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from meshlm.protocol.adapters import Adapter
from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.protocol.edges.text import Accepted, PositionLogprobs, PromptLogprobs, TokenLogprob
from meshlm.protocol.logprobs import positions_of
from meshlm.runtime.client.placement import Choice

START = "0"  # WeightsVersion.label of the model's own files
NO_ANSWER = dict.fromkeys(("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics"))
NO_CHAT = NO_ANSWER | dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))
NO_MESSAGE = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
NO_CHOICE = dict.fromkeys(("logprobs", "stop_reason", "token_ids", "routed_experts"))
NO_TEXT_CHOICE = NO_CHOICE | dict.fromkeys(("prompt_logprobs", "prompt_token_ids"))
NO_PROMPT_DETAILS = dict.fromkeys(("created_cache_tokens", "multimodal_tokens"))
NO_CHAT_CHUNK_CHOICE = dict.fromkeys(("logprobs", "finish_reason", "token_ids"))
NO_TEXT_CHUNK_CHOICE = NO_CHAT_CHUNK_CHOICE | dict.fromkeys(("stop_reason", "prompt_token_ids"))
Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode


def by_id(positions: Sequence[PositionLogprobs]) -> list[PositionLogprobs]:
    """The same entries with tokens named "token_id:5", which tells tokens apart whose text is the same or empty."""

    def named(token: TokenLogprob) -> TokenLogprob:
        return msgspec.structs.replace(token, text=f"token_id:{token.token_id}")

    return [PositionLogprobs(named(p.token), p.num_chars, tuple(map(named, p.top))) for p in positions]


def _token_entry(token: TokenLogprob) -> Json:
    return {"token": token.text, "logprob": max(token.logprob, -9999.0), "bytes": list(token.token_bytes)}


def chat_logprobs(positions: Sequence[PositionLogprobs], *, has_sampled: bool) -> Json:
    """choices[].logprobs of a chat answer. has_sampled: top_logprobs begin with the token itself where it is not one of them."""

    def entry(position: PositionLogprobs) -> Json:
        token, top = position.token, position.top
        if has_sampled and all(one.token_id != token.token_id for one in top):
            top = token, *top
        return {**_token_entry(token), "top_logprobs": [_token_entry(one) for one in top]}

    return {"content": [entry(position) for position in positions]}


def completion_logprobs(positions: Sequence[PositionLogprobs], offset: int, num_top: int) -> Json:
    """choices[].logprobs of a completion. `offset` is where the first token's text begins."""
    tops: list[dict[str, float]] = []
    offsets: list[int] = []
    for position in positions:
        offsets.append(offset)
        offset += position.num_chars
        top: dict[str, float] = {}
        for token in (position.token, *position.top[:num_top]):  # the likeliest of those whose text is the same stays
            top.setdefault(token.text, max(token.logprob, -9999.0))
        tops.append(top)
    return {
        "tokens": [position.token.text for position in positions],
        "token_logprobs": [max(position.token.logprob, -9999.0) for position in positions],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def echoed_logprobs(positions: Sequence[PositionLogprobs], accepted: Accepted, num_top: int, as_ids: bool) -> Json:
    """choices[].logprobs of an echoed prompt, whose first token has none; one of a single token has no positions."""
    first = accepted.first_token_text
    if as_ids:
        first = f"token_id:{memoryview(accepted.prompt_token_ids).cast('i')[0]}"
    rest = completion_logprobs(positions, len(accepted.first_token_text), num_top)
    begin = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {key: [begin[key], *values] for key, values in rest.items()}


def prompt_logprobs_json(found: PromptLogprobs | None) -> list[msgspec.Raw | None]:
    """vLLM's prompt_logprobs: per position, token id -> logprob, rank, text; the prompt's own token first. Each position is encoded as
    soon as it is made: this runs in a thread, and one call that takes long would hold up the others. None: of a prompt of one token."""

    def entry(token: TokenLogprob) -> Json:
        return {"logprob": max(token.logprob, -9999.0), "rank": token.rank, "decoded_token": token.text}

    positions = positions_of(found) if found is not None else ()
    each = (_encode({str(token.token_id): entry(token) for token in (p.token, *p.top)}) for p in positions)
    return [None, *map(msgspec.Raw, each)]


FIELDS = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")


def timing(choices: Sequence[Choice]) -> Json | None:
    """vLLM's fields, in milliseconds; None for an answer of several choices, whose times are not one.

    The wait for a place in a batch; from then to the first token; from the first token to the last; of that the mean between two; and
    tokens a second from that place on. All null where no token came, or where the tokens had come on another connection before."""
    if len(choices) != 1:
        return None
    (choice,) = choices
    found: Json = dict.fromkeys(FIELDS)
    if choice.first is None or not choice.first_at or choice.num_told:
        return found
    prefill_ms, decode_ms, count = (
        choice.first.prefill_us / 1e3,
        (choice.last_at - choice.first_at) * 1e3,
        len(choice.token_ids),
    )
    found |= {
        "time_to_first_token_ms": prefill_ms,
        "generation_time_ms": decode_ms,
        "queue_time_ms": choice.first.queued_us / 1e3,
    }
    if count > 1:
        found["mean_itl_ms"] = decode_ms / (count - 1)
    if prefill_ms + decode_ms > 0:
        found["tokens_per_second"] = count / (prefill_ms + decode_ms) * 1e3
    return found


def system_fingerprint(config: MeshConfig, version: str) -> str | None:
    """The system_fingerprint that --fingerprint-mode asks for, in vLLM's form: version, division of the
    model, and a hash of what is computed and how."""
    mode = config.server.fingerprint_mode
    if mode == "none":
        return None
    if mode == "custom":
        return config.server.fingerprint_value
    resolved, parallel = config.require_resolved(), config.parallel
    model = (resolved.spec, resolved.model_path, resolved.load_format, resolved.device, resolved.dtype)
    cache = (config.cache.kv_cache_dtype, config.cache.calculate_kv_scales)
    ways = (cache, config.worker.attention_backend, config.worker.compile)
    digest = hashlib.sha256(msgspec.json.encode((model, ways))).hexdigest()[:8]
    degrees = {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dp": parallel.data_parallel_size,
    }
    divided = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1 and mode == "full"]
    return "-".join([f"meshlm-{version}", *divided, digest])


def model_card(name: str, resolved: Resolved, adapter: Adapter | None = None) -> dict[str, Any]:
    """One of the names that the model is served under, or the name of an adapter, whose parent the model is."""
    created = int(time.time())
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "meshlm",
        "root": resolved.model_path if adapter is None else adapter.path,
        "parent": None if adapter is None else resolved.served_names[0],
        "max_model_len": resolved.max_model_len,
        "permission": [_permission(name, created)],
    }


def _permission(name: str, created: int) -> dict[str, Any]:
    """The permission object of a model: OpenAI's first clients read it, and vLLM still sends it."""
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


def weights_of_tokens(choice: Choice) -> Json:
    """From which output token on which version of the weights computed this choice; nothing while the mesh has those of its start."""
    told = [list(one) for one in choice.weights]
    return {"weights_versions": told} if any(label != START for _, label in choice.weights) else {}


def weights_of_answer(choices: Sequence[Choice]) -> Json:
    """The version of the weights that computed the last token, under the same condition."""
    label = next((choice.weights[-1][1] for choice in reversed(choices) if choice.weights), START)
    return {} if label == START else {"weights_version": label}
