"""Language detection: the likeliest of the languages' tokens behind the start. It is a request of its own, of one token, before the
others. Called by routes.py."""

from typing import Any

from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.requests import submits
from meshlm.frontend.requests.beams import Step
from meshlm.protocol.audio import Audio, SpeechTokens
from meshlm.protocol.edges.text import MediaPrompt, TextParams, TokenPrompt
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.runtime.client.choice import Choice


async def find(
    backend: Any, parsed_request: ParsedRequest, speech: SpeechTokens, audio: Audio, request_id: str, rank: int
) -> str:
    """The code of the language. `backend` is generation.py's, `ask` the request that follows. HttpError."""
    step = Step(f"{request_id}-language")
    codes = {token: code for code, token in speech.languages.items()}
    one = parsed_request.with_answer(logprobs=0).with_mesh(
        prompts=[MediaPrompt(TokenPrompt(pack_i32([speech.start])), (audio,))],
        sampling=SamplingParams(temperature=0.0, logprobs=0, allowed_token_ids=tuple(codes)),
        seed=0,
        text=TextParams(),
        max_tokens=1,
    )
    opened: list[Choice] = []
    try:
        for choices, submit in list(submits.build_each(step, one, backend.requests.new_handle, rank)):
            opened += choices
            backend.requests.open(choices, submit)
        await step.end.wait()
    finally:
        backend.requests.close(opened)
    if step.error is not None:
        raise step.error
    return codes[step.found[0].token.token_id]
