"""Prompts that are vectors (`prompt_embeds`): read, checked and cut. Pure; HttpError names the field. Called by parse.py."""

from typing import Any

from meshlm.frontend.http.errors import HttpError, field_error
from meshlm.frontend.openai.prompts import MAX_PROMPTS
from meshlm.frontend.openai.schema import ChatRequest, CompletionRequest
from meshlm.protocol.config import Resolved, ServerConfig
from meshlm.protocol.edges.text import MediaPrompt, Prompt, TokenPrompt, media_of
from meshlm.protocol.prompt_embeds import MAX_EMBEDS_BYTES, PromptEmbeds, mark
from meshlm.protocol.sampling import SamplingParams
from meshlm.runtime import tensor_files
from meshlm.runtime.errors import RequestError

NAME = "prompt_embeds"
MAX_COPIES_BYTES = 64 << 20  # of all prompts, times n: each choice is a request of its own, with the vectors


def of_completion(request: CompletionRequest, resolved: Resolved, server: ServerConfig) -> list[Prompt]:
    """Each tensor as a prompt."""
    _check(request, server, {"echo": request.echo, "suffix": request.suffix})
    given = [request.prompt_embeds] if isinstance(request.prompt_embeds, str) else request.prompt_embeds or []
    if len(given) > MAX_PROMPTS:
        raise field_error(NAME, f"at most {MAX_PROMPTS} prompts")
    return [tensor_files.prompt_of(_read(one, resolved, NAME)) for one in given]


def of_chat(
    request: ChatRequest, resolved: Resolved, server: ServerConfig
) -> tuple[list[dict[str, Any]], tuple[PromptEmbeds, ...]]:
    """The messages with a mark for each part of type prompt_embeds, and the vectors of these parts."""
    found: list[PromptEmbeds] = []
    messages = list(request.messages)
    for place, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list) or not any(map(_is_part, content)):
            continue
        if not found:
            _check(request, server, {"echo": request.echo, "return_prompt_text": request.return_prompt_text})
        parts = []
        for index, part in enumerate(content):
            if _is_part(part):
                where = f"messages[{place}].content[{index}].data"
                if not isinstance(data := part.get("data"), str):
                    raise HttpError(400, f"{where}: must be base64 of a tensor that torch.save wrote", "messages")
                parts.append({"type": "text", "text": mark(len(found))})
                found.append(_read(data, resolved, where))
            else:
                parts.append(part)
        messages[place] = {**message, "content": parts}
    if len({one.dtype for one in found}) > 1:
        raise field_error("messages", f"parts of type {NAME!r} have different types of numbers")
    return messages, tuple(found)


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == NAME


def _check(request: CompletionRequest | ChatRequest, server: ServerConfig, against: dict[str, Any]) -> None:
    """Refuses vectors where the server takes none, and fields that need token ids of them."""
    if not server.enable_prompt_embeds:
        raise field_error(NAME, "this server takes none (--enable-prompt-embeds)")
    of_both = {"prompt_logprobs": request.prompt_logprobs is not None, "use_beam_search": request.use_beam_search}
    for name, asked in (against | of_both).items():
        if asked:
            raise field_error(name, f"does not go with {NAME}")


def _read(given: Any, resolved: Resolved, where: str) -> PromptEmbeds:
    spec = resolved.spec
    try:
        return tensor_files.embeds_of(given, spec.hidden_size, spec.vocab_size, where)
    except RequestError as error:
        raise HttpError.of_kind(error.kind, error.message, where.split("[")[0]) from None


def vectors_of(prompt: Prompt) -> list[PromptEmbeds]:
    """The vectors that a prompt has."""
    return [one for one in media_of(prompt) if isinstance(one, PromptEmbeds)]


def _kept(prompt: Prompt, keep: int, side: str) -> Prompt:
    """The prompt; where it is nothing but vectors, its first or last `keep` ones."""
    match prompt:
        case MediaPrompt(TokenPrompt(), (PromptEmbeds() as vectors,)):
            return tensor_files.prompt_of(tensor_files.kept(vectors, keep, side))
    return prompt


def checked(prompts: list[Prompt], sampling: SamplingParams, num_choices: int, keep: int, side: str) -> list[Prompt]:
    """The prompts, of which those that are vectors are cut to `keep` at `side`. Refused are what would have to know token ids of
    vectors, and more copies of them than may travel."""
    if not any(map(vectors_of, prompts)):
        return prompts
    found = [_kept(prompt, keep, side) for prompt in prompts]
    size = sum(len(one.data) for prompt in found for one in vectors_of(prompt))
    if len(prompts) == 1 and size > MAX_EMBEDS_BYTES:
        raise field_error(NAME, f"{size} bytes in one prompt; at most {MAX_EMBEDS_BYTES}")
    if size * num_choices > MAX_COPIES_BYTES:
        text = f"{NAME}: {size} bytes for each of {num_choices} choices; at most {MAX_COPIES_BYTES} in one request"
        raise HttpError(400, text, NAME)
    if sampling.repetition_penalty != 1.0:
        raise field_error("repetition_penalty", f"counts the prompt's tokens, which {NAME} does not have; send 1")
    return found
