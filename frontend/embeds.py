"""Prompts that are vectors (`prompt_embeds`): read, checked and cut. Pure; HttpError names the field. Called by parse.py."""

from meshlm.frontend.errors import HttpError
from meshlm.frontend.prompts import MAX_PROMPTS
from meshlm.frontend.schema import CompletionRequest
from meshlm.protocol.config import Resolved, ServerConfig
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.text_edge import EmbedsPrompt, Prompt
from meshlm.runtime import tensor_files
from meshlm.runtime.errors import RequestError

NAME = "prompt_embeds"
MAX_COPIES_BYTES = 64 << 20  # of all prompts, times n: each choice is a request of its own, with the vectors


def of_completion(request: CompletionRequest, resolved: Resolved, server: ServerConfig) -> list[Prompt]:
    """Each tensor as a prompt."""
    if not server.enable_prompt_embeds:
        raise HttpError(400, f"{NAME}: this server takes none (--enable-prompt-embeds)", NAME)
    against = {
        "echo": request.echo,
        "suffix": request.suffix,
        "prompt_logprobs": request.prompt_logprobs is not None,
        "use_beam_search": request.use_beam_search,
    }
    for name, asked in against.items():
        if asked:
            raise HttpError(400, f"{name}: does not go with {NAME}", name)
    given = [request.prompt_embeds] if isinstance(request.prompt_embeds, str) else request.prompt_embeds or []
    if len(given) > MAX_PROMPTS:
        raise HttpError(400, f"{NAME}: at most {MAX_PROMPTS} prompts", NAME)
    spec = resolved.spec
    try:
        return [tensor_files.prompt_of(one, spec.hidden_size, spec.vocab_size, NAME) for one in given]
    except RequestError as error:
        raise HttpError.of(error.kind, error.message, error.param) from None


def checked(prompts: list[Prompt], sampling: SamplingParams, num_choices: int, keep: int, side: str) -> list[Prompt]:
    """The prompts, of which those that are vectors are cut to `keep` at `side`. Refused are what would have to know token ids of
    vectors, and more copies of them than may travel."""
    if not any(isinstance(prompt, EmbedsPrompt) for prompt in prompts):
        return prompts
    found = [
        tensor_files.kept(prompt, keep, side) if isinstance(prompt, EmbedsPrompt) else prompt for prompt in prompts
    ]
    size = sum(len(prompt.embeds.data) for prompt in found if isinstance(prompt, EmbedsPrompt))
    if size * num_choices > MAX_COPIES_BYTES:
        text = f"{NAME}: {size} bytes for each of {num_choices} choices; at most {MAX_COPIES_BYTES} in one request"
        raise HttpError(400, text, NAME)
    if sampling.repetition_penalty != 1.0:
        text = f"counts the prompt's tokens, which {NAME} does not have; send 1"
        raise HttpError(400, f"repetition_penalty: {text}", "repetition_penalty")
    return found
