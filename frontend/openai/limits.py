"""What one request may ask for at most: the lists and texts that a client controls and that travel to other processes.

A request within these makes no message that a frame cannot hold (tests/frontend/openai/test_limits.py encodes the largest ones).
What is copied for each of its sequences (prompts x n) is counted that often, so that a small body does not become gigabytes.
Pure; called by parse.py and routes.py. HttpError names the field and its limit.
"""

from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING

from msgspec import Raw

from meshlm.frontend.http.errors import field_error
from meshlm.protocol.config import Resolved
from meshlm.protocol.edges import text as edge
from meshlm.protocol.prompt_embeds import MAX_EMBEDS_BYTES

# of logit_bias, allowed_token_ids, stop_token_ids and logprob_token_ids together, times the sequences
MAX_LISTED_IDS = 1 << 18
MAX_COPIED_BYTES = 1 << 22  # of stop, bad_words, cache_salt and the grammar together, in UTF-8, times the sequences
# Of one prompt's text, or of a chat's messages, tools and template. A longer context allows more, so much for each of its tokens: a
# tokenizer takes a hundred times a text's bytes, and seconds for a megabyte.
MIN_PROMPT_BYTES, BYTES_PER_TOKEN = 1 << 20, 16
MAX_PROMPT_IDS = 1 << 20  # of one prompt that is to be truncated; or as many as the context holds
MAX_DETOKENIZE_IDS = 1 << 18  # or as many as the context holds, where that is more
# Log-probabilities: of all prompts of a request (of one prompt: detokenizer/admission.py); of a prompt that is echoed in one chunk of a
# stream, which its loop writes; of the output tokens of an answer that is kept here until its end.
MAX_PROMPT_LOGPROBS, MAX_STREAMED_ECHO, MAX_KEPT_LOGPROBS = 1 << 20, 1 << 14, 1 << 22

if TYPE_CHECKING:  # it has a choice of tools, whose reader imports this module
    from meshlm.frontend.openai.parsed_request import MeshRequest

LISTS = ("logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids")


def check_raw(fields: Mapping[str, Raw], resolved: Resolved, *, vectors: bool = False) -> None:
    """Refuses a large generation request by lists of numbers that are too long whatever is in them, before its fields are decoded."""
    for name in LISTS:
        if (count := _num_values(fields.get(name))) > MAX_LISTED_IDS:
            _refuse(name, f"{count} token ids", MAX_LISTED_IDS)
    check_raw_texts(fields, resolved, vectors=vectors)
    prompt = bytes(memoryview(fields.get("prompt", b""))[:64])
    if prompt.startswith(b"[") and prompt[1:].lstrip()[:1].isdigit():
        truncates = bytes(fields.get("truncate_prompt_tokens", b"null")) not in (b"null", b"0")
        check_num_ids(_num_values(fields["prompt"]), truncates, resolved)


def check_raw_texts(fields: Mapping[str, Raw], resolved: Resolved, *, vectors: bool = False) -> None:
    """Texts that are too long however they are written: JSON has no more than six bytes for one of a text. `vectors`: messages may have
    some, or images, in base64."""
    most = max(MIN_PROMPT_BYTES, BYTES_PER_TOKEN * resolved.max_model_len)
    for name in ("prompt", "suffix", "messages", "tools", "system", "input", "instructions"):
        value = memoryview(fields.get(name, b""))
        room = 6 * most + (2 * MAX_EMBEDS_BYTES if vectors and name in ("messages", "input") else 0)
        if len(value) > room and (name != "prompt" or value[0] == ord('"')):
            _refuse(name, f"{len(value)} bytes", most)


def check_raw_tokens(fields: Mapping[str, Raw], resolved: Resolved) -> None:
    """The same of POST /detokenize."""
    check_detokenize(_num_values(fields.get("tokens")), resolved)


def _num_values(value: Raw | None) -> int:
    """The number of values in an array or object of numbers."""
    return 0 if value is None else bytes(value).count(b",") + 1


def check_lists(lists: Mapping[str, Sized], num_sequences: int) -> None:
    """Checks the lengths of token id lists as the client sent them, repetitions included, before anything looks at them."""
    for name, ids in lists.items():
        if isinstance(ids, dict) and len(ids) * num_sequences > MAX_LISTED_IDS:  # each once
            _refuse(name, f"{len(ids)} token ids for each of {num_sequences} sequences", MAX_LISTED_IDS)
        if len(ids) > MAX_LISTED_IDS:
            _refuse(name, f"{len(ids)} token ids", MAX_LISTED_IDS)


def check(mesh: "MeshRequest", truncates: bool, resolved: Resolved) -> None:
    """Checks what a generation request asks for in all."""
    num_ids, num_sequences = 0, len(mesh.prompts) * mesh.num_choices
    for name in LISTS:
        num_ids += len(getattr(mesh.sampling, name))
        if num_ids * num_sequences > MAX_LISTED_IDS:
            _refuse(name, f"{num_ids} token ids for each of {num_sequences} sequences", MAX_LISTED_IDS)
    num_bytes = 0
    texts = {"stop": mesh.text.stop, "bad_words": mesh.text.bad_words, "cache_salt": (mesh.cache_salt,)}
    copied = {name: sum(len(text.encode()) for text in listed) for name, listed in texts.items()}
    for name, size in {**copied, **{extra.constraint.split(".")[0]: extra.num_bytes for extra in mesh.extras}}.items():
        num_bytes += size
        if num_bytes * num_sequences > MAX_COPIED_BYTES:
            _refuse(name, f"{num_bytes} bytes for each of {num_sequences} sequences", MAX_COPIED_BYTES)
    for prompt in mesh.prompts:
        check_prompt(prompt, truncates, resolved)


def check_num_ids(count: int, truncates: bool, resolved: Resolved) -> None:
    """Checks the length of one prompt that came as token ids."""
    most = max(MAX_PROMPT_IDS, resolved.max_model_len) if truncates else resolved.max_model_len
    if count > most:
        text = f"{count} tokens; this model's maximum context length is {resolved.max_model_len} tokens"
        _refuse("prompt", text, most)


def check_prompt(prompt: edge.Prompt, truncates: bool, resolved: Resolved) -> None:
    """One prompt, before it is tokenized; how many tokens a text has, its detokenizer sees."""
    match prompt:
        case edge.TokenPrompt(token_ids=ids):
            check_num_ids(len(ids) // 4, truncates, resolved)
        case edge.MediaPrompt(prompt=plain):
            check_prompt(plain, truncates, resolved)  # media have limits of their own
        case edge.JoinedPrompt(parts=parts):
            for part in parts:
                check_prompt(part, truncates, resolved)
        case edge.TextPrompt() | edge.ChatPrompt() | edge.PairPrompt():
            most = max(MIN_PROMPT_BYTES, BYTES_PER_TOKEN * resolved.max_model_len)
            if (size := edge.num_bytes_of(prompt)) > most:
                is_text = not isinstance(prompt, edge.ChatPrompt)
                _refuse(
                    "prompt" if is_text else "messages",
                    f"{size} bytes" + ("" if is_text else " with tools and template"),
                    most,
                )


def check_detokenize(num_ids: int, resolved: Resolved) -> None:
    """Checks the number of ids of POST /detokenize."""
    most = max(MAX_DETOKENIZE_IDS, resolved.max_model_len)
    if num_ids > most:
        _refuse("tokens", f"{num_ids} ids", most)


def check_prompt_logprobs(of_one: int, of_all: int, *, echoes_in_stream: bool) -> None:
    """Entries of a prompt, in one of its choices, and of all prompts so far in all of theirs."""
    if echoes_in_stream and of_one > MAX_STREAMED_ECHO:
        text = f"{of_one} log-probabilities of an echoed prompt; at most {MAX_STREAMED_ECHO} in a stream"
        raise field_error("logprobs", f"{text}, more without stream: true")
    if of_all > MAX_PROMPT_LOGPROBS:
        _refuse("prompt_logprobs", f"{of_all} for the tokens of all prompts, times n", MAX_PROMPT_LOGPROBS)


def check_kept_logprobs(count: int) -> None:
    """Checks the log-probabilities of output tokens that an answer keeps: one that is not streamed, or has an Idempotency-Key."""
    if count > MAX_KEPT_LOGPROBS:
        text = f"more than {MAX_KEPT_LOGPROBS} in one answer; with stream: true and without an Idempotency-Key it may have any number"
        raise field_error("logprobs", text)


def _refuse(name: str, found: str, most: int) -> None:
    raise field_error(name, f"{found}; at most {most} in one request")
