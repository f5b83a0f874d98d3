"""What a prompt must be before a scheduler sees it: not empty, of known tokens, within the context. Pure."""

from array import array

import msgspec

from meshlm.protocol.edges.text import Submit
from meshlm.protocol.extras import Extras, generates
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import RequestError

POOLS = SamplingParams(max_tokens=1)  # nothing is sampled
# Log-probabilities of one prompt's tokens, in all its choices: a second of work, 80 MB meanwhile.
MAX_PROMPT_LOGPROBS = 1 << 18


def checked_prompt(token_ids: "array[int]", submit: Submit, vocab_size: int, max_model_len: int) -> "array[int]":
    """The prompt, truncated if asked for. RequestError names what is wrong."""
    keep = submit.text.truncate_prompt_tokens
    if keep:
        token_ids = token_ids[:keep] if submit.text.truncation_side == "right" else token_ids[-keep:]
    if not token_ids:
        raise RequestError(ErrorKind.INVALID, "the prompt is empty; give at least one token", "prompt")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise RequestError(ErrorKind.INVALID, f"token id {bad} is outside the vocabulary 0..{vocab_size - 1}", "prompt")
    is_full = generates(submit.extras) and len(token_ids) >= max_model_len
    if is_full or len(token_ids) > max_model_len:
        text = f"This model's maximum context length is {max_model_len} tokens, and the prompt has {len(token_ids)}"
        text += ": no room for an output token" if is_full else ""
        raise RequestError(ErrorKind.INVALID, text, "prompt")
    return token_ids


def producible(words: tuple[tuple[int, ...], ...], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Of these sequences those that the model can write: a tokenizer may know tokens that the model has no logits for."""
    return tuple(word for word in words if max(word) < vocab_size)


def left_extras(extras: Extras, whole: int, left: int, submit: Submit) -> Extras:
    """The extras of a prompt of `whole` tokens of which `left` are left."""
    if left == whole:
        return extras
    begin = 0 if submit.text.truncation_side == "right" else whole - left
    try:
        return _cut(extras, begin, begin + left)
    except ValueError as error:
        raise RequestError(ErrorKind.INVALID, f"truncate_prompt_tokens: {error}", "truncate_prompt_tokens") from None


def _cut(extras: Extras, begin: int, end: int) -> Extras:
    return tuple(part for extra in extras if (part := extra.cut(begin, end)) is not None)


def checked_sampling(submit: Submit, choice: int, num_prompt: int, max_model_len: int) -> SamplingParams:
    """This choice's sampling parameters: its own seed, and max_tokens that the context holds. RequestError."""
    if not generates(submit.extras):
        return POOLS
    room = max_model_len - num_prompt
    wanted, sampling = submit.max_tokens, submit.sampling
    if wanted is not None and submit.cap_max_tokens:
        wanted = min(wanted, room)
        sampling = msgspec.structs.replace(sampling, min_tokens=min(sampling.min_tokens, room))
    if wanted is not None and wanted > room:
        text = (
            f"This model's maximum context length is {max_model_len} tokens; {num_prompt} in the prompt and max_tokens "
            f"{wanted} are more. max_tokens may be {room} at most"
        )
        raise RequestError(ErrorKind.INVALID, text, "max_tokens")
    max_tokens = room if wanted is None else wanted
    if sampling.min_tokens > max_tokens:
        text = f"min_tokens {sampling.min_tokens} exceeds max_tokens {max_tokens}"
        raise RequestError(ErrorKind.INVALID, text, "min_tokens")
    num_entries = (sampling.prompt_logprobs + 1) * num_prompt * len(submit.handles)
    if num_entries > MAX_PROMPT_LOGPROBS:
        text = (
            f"prompt_logprobs: {sampling.prompt_logprobs + 1} for each of {num_prompt} prompt tokens, times n, "
            f"are {num_entries}; at most {MAX_PROMPT_LOGPROBS} in one request"
        )
        raise RequestError(ErrorKind.INVALID, text, "prompt_logprobs")
    seed = (sampling.seed + choice) & 0x7FFF_FFFF_FFFF_FFFF
    return msgspec.structs.replace(sampling, max_tokens=max_tokens, seed=seed)
