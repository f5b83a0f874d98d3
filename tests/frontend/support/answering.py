"""An answer fed by hand, and what a client then reads: shared by the tests of whole and of streamed answers."""

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from meshlm.frontend.openai.parsed_request import AnswerOptions, MeshRequest, ParsedRequest
from meshlm.frontend.openai.responses import AnswerHead, Response, WholeResponse
from meshlm.frontend.openai.stream_response import StreamResponse
from meshlm.protocol.edges.text import (
    Accepted,
    Finished,
    PositionLogprobs,
    PromptLogprobs,
    Submit,
    TextPrompt,
    TokenLogprob,
)
from meshlm.protocol.edges.token import First, LogprobColumns
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_f32, pack_i32
from meshlm.protocol.wire.ids import FinishReason, Handle, RequestId
from meshlm.runtime.client.placement import NO_DETAILS, Choice, RowDetails

Json = dict[str, Any]
FRAME = {"id": "cmpl-1", "created": 1700000000, "model": "tiny"}
PROMPT_IDS, PROMPT_TEXT, FIRST_TEXT = [5, 6], "Hi you", "Hi"
STOP = Finished(0, FinishReason.STOP)
LENGTH = Finished(0, FinishReason.LENGTH)


def asking(is_chat: bool, **changes: object) -> ParsedRequest:
    """A ParsedRequest with nothing special, and these changes."""
    plain = ParsedRequest(MeshRequest([TextPrompt(PROMPT_TEXT)], max_tokens=16), AnswerOptions(is_chat=is_chat))
    return changed(plain, **changes)


def changed(parsed_request: ParsedRequest, **changes: object) -> ParsedRequest:
    """The request with these changes, in whichever of its two halves the fields are."""
    of_mesh = {name: value for name, value in changes.items() if name in MeshRequest._fields}
    of_answer = {name: value for name, value in changes.items() if name in AnswerOptions._fields}
    own: dict[str, Any] = {name: value for name, value in changes.items() if name in ParsedRequest._fields}
    assert len(of_mesh) + len(of_answer) + len(own) == len(changes)
    return parsed_request.with_mesh(**of_mesh).with_answer(**of_answer)._replace(**own)


class Ends:
    """Counts the calls of on_end."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


Kind = TypeVar("Kind", bound=Response)


def filled(answer: Kind, num_prompts: int = 1) -> Kind:
    """The answer with its choices, their prompts accepted; as server.py and request_tracker.py do it."""
    n = answer.parsed_request.mesh.num_choices
    for index in range(num_prompts * n):
        submit = Submit((Handle(index + 1),), (RequestId(str(index)),), TextPrompt(PROMPT_TEXT), SamplingParams())
        answer.choices.append(Choice(answer, index, index // n, submit, Handle(index + 1)))
    for choice in answer.choices[::n]:
        answer.accepted(choice, Accepted((choice.handle,), 2, pack_i32(PROMPT_IDS), PROMPT_TEXT, FIRST_TEXT))
    return answer


def whole(ask: ParsedRequest, num_prompts: int = 1) -> tuple[WholeResponse, Ends]:
    ends = Ends()
    return filled(WholeResponse(AnswerHead(ask, "cmpl-1", 1700000000, "tiny", ends)), num_prompts), ends


def streamed(ask: ParsedRequest, num_prompts: int = 1) -> tuple[StreamResponse, list[bytes], Ends]:
    ends, events = Ends(), list[bytes]()
    answer = StreamResponse(AnswerHead(ask.with_answer(stream=True), "cmpl-1", 1700000000, "tiny", ends), events.append)
    return filled(answer, num_prompts), events, ends


def give(
    answer: WholeResponse | StreamResponse,
    index: int,
    token_ids: Sequence[int],
    text: str,
    finished: Finished | None = None,
    logprobs: list[PositionLogprobs] | None = None,
    prompt_logprobs: PromptLogprobs | None = None,
    num_cached: int | None = None,
) -> None:
    """One row of deltas, as request_tracker.py hands it on."""
    choice = answer.choices[index]
    choice.token_ids.extend(token_ids)
    if finished is not None:
        choice.finished = finished
    details = RowDetails(finished, logprobs, prompt_logprobs, None if num_cached is None else First(num_cached))
    answer.row(choice, len(token_ids), text, None if details == NO_DETAILS else details)


def body(answer: WholeResponse) -> Json:
    """The answer, in the form of OpenAI's own models."""
    found: Json = json.loads(answer.body())
    if answer.parsed_request.answer.is_chat:
        ChatCompletion.model_validate(found)
    elif (
        not answer.parsed_request.answer.echo
    ):  # of an echo's first token OpenAI answers null, which their model has no place for
        Completion.model_validate(found)
    return found


def chunks(events: Sequence[bytes], is_chat: bool) -> list[Json]:
    """The JSON of each event; the events are well-formed."""
    found: list[Json] = []
    for event in events:
        assert event.startswith(b"data: {")
        assert event.endswith(b"}\n\n")
        assert b"\n" not in event[:-2]
        chunk: Json = json.loads(event.removeprefix(b"data: "))
        if is_chat:
            ChatCompletionChunk.model_validate(chunk)
        assert {key: chunk[key] for key in FRAME} == FRAME
        assert chunk["object"] == ("chat.completion.chunk" if is_chat else "text_completion")
        found.append(chunk)
    return found


def usage(prompt: int, output: int, cached: int = 0) -> Json:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def whole_usage(prompt: int, output: int, cached: int = 0) -> Json:
    """Of an answer that is no stream."""
    found = usage(prompt, output, cached)
    found["prompt_tokens_details"] |= {"created_cache_tokens": None, "multimodal_tokens": None}
    return found


def logprob(token_id: int, value: float, text: str, rank: int = 1) -> TokenLogprob:
    return TokenLogprob(token_id, value, rank, text, text.encode())


HELLO = PositionLogprobs(logprob(7, -0.25, "Hé"), 2, (logprob(7, -0.25, "Hé"), logprob(8, -1.5, "Oh", 2)))
WORLD = PositionLogprobs(logprob(9, -2.0, " w", 2), 2, (logprob(3, -0.5, " x"), logprob(4, float("-inf"), " y", 2)))


def of_prompt(first: int, *positions: PositionLogprobs) -> PromptLogprobs:
    """As it travels: of a prompt that begins with token `first`."""
    own = [position.token for position in positions]
    tops = [token for position in positions for token in position.top]
    texts = {token.token_id: token.text for token in (*own, *tops)}
    columns = LogprobColumns(
        len(positions[0].top),
        pack_f32(token.logprob for token in own),
        pack_i32(token.rank for token in own),
        pack_i32(token.token_id for token in tops),
        pack_f32(token.logprob for token in tops),
    )
    prompt = pack_i32([first, *(token.token_id for token in own)])
    num_chars = pack_i32(position.num_chars for position in positions)
    return PromptLogprobs(columns, prompt, num_chars, pack_i32(texts), list(texts.values()))


OF_PROMPT = of_prompt(5, PositionLogprobs(logprob(6, -3.0, " you", 4), 4, (logprob(2, -0.5, " me"),)))
HELLO_CHAT = {
    "token": "Hé",
    "logprob": -0.25,
    "bytes": [72, 195, 169],
    "top_logprobs": [
        {"token": "Hé", "logprob": -0.25, "bytes": [72, 195, 169]},
        {"token": "Oh", "logprob": -1.5, "bytes": [79, 104]},
    ],
}
WORLD_CHAT = {
    "token": " w",
    "logprob": -2.0,
    "bytes": [32, 119],
    "top_logprobs": [
        {"token": " x", "logprob": -0.5, "bytes": [32, 120]},
        {"token": " y", "logprob": -9999.0, "bytes": [32, 121]},
    ],
}
BOTH_TEXT = {
    "tokens": ["Hé", " w"],
    "token_logprobs": [-0.25, -2.0],
    "top_logprobs": [{"Hé": -0.25, "Oh": -1.5}, {" w": -2.0, " x": -0.5, " y": -9999.0}],
    "text_offset": [0, 2],
}
SAID_NOTHING = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
PROMPT_JSON = [
    None,
    {
        "6": {"logprob": -3.0, "rank": 4, "decoded_token": " you"},
        "2": {"logprob": -0.5, "rank": 1, "decoded_token": " me"},
    },
]


def echoed_logprobs() -> Json:
    answer, _ = whole(asking(False, echo=True, logprobs=2, prompt_logprobs=2))
    give(answer, 0, [7], "Hé", prompt_logprobs=OF_PROMPT, logprobs=[HELLO])
    give(answer, 0, [9], " w", STOP, logprobs=[WORLD])
    (choice,) = body(answer)["choices"]
    assert choice["text"] == "Hi youHé w"
    assert choice["prompt_logprobs"] == PROMPT_JSON
    found: Json = choice["logprobs"]
    return found
