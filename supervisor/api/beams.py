"""`LLM.beam_search`: steps of one token for each beam of each prompt (runtime/client/beam_search.py). Names are vLLM's."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshlm.protocol.config import Resolved
from meshlm.runtime.client.beam_search import Beam, BeamSearch, Candidate, num_candidates, search
from meshlm.supervisor.api.outputs import Logprob, RequestOutput
from meshlm.supervisor.api.sampling import SamplingParams

Detail = dict[int, Logprob]
MOST_BEAMS = 128


@dataclass(frozen=True)
class BeamSearchParams:
    """The settings of a search; names and defaults are vLLM's. `temperature` changes nothing: raw log-probabilities are what counts."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        if self.structured_outputs is not None:
            raise ValueError("BeamSearchParams.structured_outputs: not supported")
        if not 1 <= self.beam_width <= MOST_BEAMS:
            raise ValueError(f"BeamSearchParams.beam_width: must be 1 to {MOST_BEAMS}")
        if self.max_tokens < 1:
            raise ValueError("BeamSearchParams.max_tokens: must be at least 1")
        if not -16 <= self.length_penalty <= 16:
            raise ValueError("BeamSearchParams.length_penalty: must be -16 to 16")


@dataclass
class BeamSearchSequence:
    """One of the best sequences. `tokens` are the prompt's, the output's and the end's; `logprobs` are the output's."""

    orig_prompt: Any
    tokens: list[int]
    logprobs: list[Detail]
    lora_request: None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The best sequences of one prompt, the best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


Step = Callable[[list[dict[str, Any]], SamplingParams], Awaitable[list[RequestOutput]]]


async def find(
    prompts: Sequence[tuple[Any, dict[str, Any]]], params: BeamSearchParams, step: Step, resolved: Resolved
) -> list[list[Beam[Detail]]]:
    """The best beams of each prompt, given as it came and as token ids. All of them go one token on with each call of `step`."""
    logprobs = num_candidates(params.beam_width, resolved.spec.vocab_size)
    wanted = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=logprobs)
    searches = []
    for _, prompt in prompts:
        num_prompt = len(prompt["prompt_token_ids"])
        max_tokens = min(params.max_tokens, resolved.max_model_len - num_prompt)
        ends = () if params.ignore_eos else resolved.eos_token_ids
        searches.append(BeamSearch[Detail](params.beam_width, ends, num_prompt, max_tokens, params.length_penalty))

    async def likeliest(beams: list[tuple[int, Beam[Detail]]]) -> list[list[Candidate[Detail]]]:
        given = [(prompts[index][1], beam.token_ids) for index, beam in beams]
        asked = [{**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], *more]} for prompt, more in given]
        found = [(output.outputs[0].logprobs or [{}])[0] for output in await step(asked, wanted)]
        return [[Candidate(token, one.logprob, each) for token, one in each.items()] for each in found]

    await search(searches, likeliest)
    return [one.best() for one in searches]


def sequence_of(
    given: Any, prompt: dict[str, Any], beam: Beam[Detail], decode: Callable[[list[int]], str]
) -> BeamSearchSequence:
    ended = beam.end >= 0
    tokens = [*prompt["prompt_token_ids"], *beam.token_ids, *((beam.end,) if ended else ())]
    return BeamSearchSequence(
        given,
        tokens,
        list(beam.details),
        cum_logprob=beam.logprob,
        text=decode(tokens),
        finish_reason="stop" if ended else "length",
        stop_reason=beam.end if ended else None,
    )
