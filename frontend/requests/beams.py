"""`use_beam_search`: one request that asks the mesh for a token of each of its beams, again and again (runtime/client/beam_search.py).

Each step is a request of its own, which finds all tokens but the last in the prefix cache and survives deaths as every request does.
What was found goes into the answer as rows, so that reasoning, calls, ids and log-probabilities are told as of any other.
Called by generation.py.
"""

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.requests import pacing, submits
from meshlm.protocol.edges import text as edge
from meshlm.protocol.edges.token import First
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32, unpack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason
from meshlm.runtime.client.beam_search import Beam, BeamSearch, Candidate, num_candidates, search
from meshlm.runtime.client.placement import Choice, RowDetails

SENDS_A_TURN = 16  # beams of a prompt, in one turn of the loop
Detail = tuple[edge.TokenLogprob, tuple[edge.TokenLogprob, ...]]  # a token, and the likeliest in its place


class Step:
    """The choices of one step: see `ResponseSink`. `end` is set when all have their token, or one has failed."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.choices: list[Choice] = []
        self.has_begun = False
        self.end = asyncio.Event()
        self.accepted_as: edge.Accepted | None = None
        self.first: First | None = None
        self.found: dict[int, edge.PositionLogprobs] = {}  # by choice
        self.error: HttpError | None = None

    def accepted(self, choice: Choice, accepted: edge.Accepted) -> None:
        self.accepted_as = accepted

    def row(self, choice: Choice, num_tokens: int, text: str, details: RowDetails | None) -> None:
        if details is None:
            return
        self.first = self.first or details.first
        if details.logprobs:
            self.found[choice.index] = details.logprobs[0]
        if (end := details.finished) is not None and end.reason is FinishReason.ERROR:
            self.failed(choice, end.kind, end.message, end.param)
        elif len(self.found) == len(self.choices):
            self.end.set()

    def failed(self, choice: Choice, kind: ErrorKind, message: str, param: str) -> None:
        self.error = self.error or HttpError.of_kind(kind, message, param)
        self.end.set()

    async def take(self, backend: Any, parsed_request: ParsedRequest, rank: int) -> None:
        """Submits the request, without its texts that end an answer, and waits for the token of each choice. HttpError."""
        asked = list(submits.build_each(self, parsed_request, backend.requests.new_handle, rank))
        opened: list[Choice] = []
        try:
            for number, (choices, submit) in enumerate(asked, 1):
                opened += choices
                backend.requests.open(choices, replace(submit, text=replace(submit.text, stop=())))
                if number % SENDS_A_TURN == 0:
                    await asyncio.sleep(0)  # others' tokens have their turn
            await self.end.wait()
        finally:
            backend.requests.close(opened)
        if self.error is not None:
            raise self.error


class Search:
    """All prompts of one request. `backend` is generation.py's, `answer` gets the rows at the end."""

    def __init__(self, backend: Any, parsed_request: ParsedRequest, request_id: str, rank: int) -> None:
        self._backend, self._parsed_request, self._request_id, self._rank = backend, parsed_request, request_id, rank
        self._vocab_size = backend.resolved.spec.vocab_size
        self._num_steps = 0

    async def fill(self, answer: Any) -> None:
        """Search, and tell the answer. HttpError. As with other requests only a part of thousands of beams is in the mesh at a time."""
        width = self._parsed_request.mesh.num_choices
        at_once = asyncio.Semaphore(max(1, pacing.most_waiting(self._backend.config) // width))

        async def one(prompt: edge.Prompt, choices: list[Choice]) -> None:
            async with at_once:
                await self._one(answer, prompt, choices)

        try:
            async with asyncio.timeout(self._parsed_request.mesh.timeout_s or None), asyncio.TaskGroup() as group:
                for place, prompt in enumerate(self._parsed_request.mesh.prompts):
                    mine = answer.choices[place * width : (place + 1) * width]
                    group.create_task(one(prompt, mine))
        except TimeoutError:
            raise HttpError.of_kind(ErrorKind.TIMEOUT, "the request's timeout passed") from None
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _one(self, answer: Any, prompt: edge.Prompt, choices: list[Choice]) -> None:
        parsed_request, width = self._parsed_request, len(choices)
        step = await self._step([prompt], is_first=True)
        accepted = step.accepted_as
        assert accepted is not None
        prompt_ids, num_prompt = accepted.prompt_token_ids, accepted.num_prompt_tokens
        beam_search = BeamSearch[Detail](
            width,
            parsed_request.mesh.sampling.eos_token_ids,
            num_prompt,
            self._max_tokens(num_prompt),
            parsed_request.mesh.length_penalty,
        )
        first = step.first
        beam_search.take([self._candidates(step.found[0])])

        async def next_step(beams: list[tuple[int, Beam[Detail]]]) -> list[list[Candidate[Detail]]]:
            nonlocal first
            step = await self._step([edge.TokenPrompt(prompt_ids + pack_i32(beam.token_ids)) for _, beam in beams])
            first = step.first
            return [self._candidates(step.found[index]) for index in range(len(beams))]

        await search([beam_search], next_step)
        best = beam_search.best()
        texts = [await self._text(beam) for beam in best]
        for choice, beam, (text, sizes) in zip(choices, best, texts):  # there may be fewer, of a tiny vocabulary
            answer.accepted(choice, accepted)
            choice.num_prompt_tokens = num_prompt
            choice.token_ids = array("i", _shown(beam, keep_end=parsed_request.mesh.text.include_stop_str_in_output))
            reason = FinishReason.LENGTH if beam.end < 0 else FinishReason.STOP
            finished = edge.Finished(0, reason, None if beam.end < 0 else beam.end, len(choice.token_ids))
            choice.finished = finished
            logprobs = list(self._positions(beam, sizes)) if parsed_request.answer.logprobs >= 0 else None
            answer.row(choice, len(choice.token_ids), text, RowDetails(finished, logprobs, None, first))

    def _max_tokens(self, num_prompt: int) -> int:
        """Checks what a plain request's detokenizer checks: the first step asks for one token only."""
        parsed_request, context = self._parsed_request, self._backend.resolved.max_model_len
        room: int = context - num_prompt
        if (
            parsed_request.mesh.max_tokens is not None
            and parsed_request.mesh.max_tokens > room
            and not parsed_request.mesh.cap_max_tokens
        ):
            name = parsed_request.answer.client_names.get("max_tokens", "max_tokens")
            text = f"{num_prompt} in the prompt and {name} {parsed_request.mesh.max_tokens} are more; {name} may be {room} at most"
            raise HttpError(400, f"This model's maximum context length is {context} tokens; {text}", name)
        return room if parsed_request.mesh.max_tokens is None else min(parsed_request.mesh.max_tokens, room)

    async def _step(self, prompts: Sequence[edge.Prompt], *, is_first: bool = False) -> Step:
        """The likeliest tokens behind each of these prompts."""
        self._num_steps += 1
        step, parsed_request = Step(f"{self._request_id}-beam{self._num_steps}"), self._parsed_request
        wanted = num_candidates(parsed_request.mesh.num_choices, self._vocab_size)
        one = parsed_request.with_mesh(
            prompts=list(prompts),
            sampling=SamplingParams(temperature=0.0, logprobs=wanted),
            seed=0,
            max_tokens=1,
            cap_max_tokens=False,
            num_choices=1,
            text=parsed_request.mesh.text if is_first else edge.TextParams(),
        ).with_answer(
            return_token_ids=is_first,
            echo=is_first and parsed_request.answer.echo,
            return_prompt_text=is_first and parsed_request.answer.return_prompt_text,
        )
        await step.take(self._backend, one, self._rank)
        return step

    def _candidates(self, found: edge.PositionLogprobs) -> list[Candidate[Detail]]:
        top = found.top if self._parsed_request.answer.logprobs >= 0 else ()
        return [Candidate(one.token_id, one.logprob, (one, top)) for one in found.top]

    def _positions(self, beam: Beam[Detail], sizes: Sequence[int]) -> Iterator[edge.PositionLogprobs]:
        """What an answer tells of each token."""
        for (token, top), num_chars in zip(beam.details, sizes):
            yield edge.PositionLogprobs(token, num_chars, top[: self._parsed_request.answer.logprobs])

    async def _text(self, beam: Beam[Detail]) -> tuple[str, list[int]]:
        """The text, and how many characters each token brought."""
        ids = pack_i32(beam.token_ids)
        reply = await self._backend.requests.ask(
            edge.Detokenize(self._backend.requests.new_handle(), ids, self._parsed_request.mesh.text)
        )
        assert isinstance(reply, edge.DetokenizeReply)
        if reply.error:
            raise HttpError.of_kind(reply.kind, reply.error, reply.param)
        return reply.text, unpack_i32(reply.num_chars).tolist()


def _shown(beam: Beam[Detail], *, keep_end: bool) -> tuple[int, ...]:
    return (*beam.token_ids, beam.end) if keep_end and beam.end >= 0 else beam.token_ids
