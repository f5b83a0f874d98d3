"""`SamplingParams` of the Python API: vLLM's names, checked and turned into what the mesh knows. Used by llm.py."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Any

import msgspec

from meshlm.protocol import samplers
from meshlm.protocol.config import StructuredOutputsConfig
from meshlm.protocol.drafting import NAME, Drafting, drafting_of
from meshlm.protocol.edges.text import TextParams
from meshlm.protocol.extras import Extras
from meshlm.protocol.grammar import Grammar
from meshlm.protocol.sampling import RepetitionDetection
from meshlm.protocol.sampling import SamplingParams as WireParams
from meshlm.runtime.errors import RequestError
from meshlm.runtime.parsers import budgets
from meshlm.runtime.structured_outputs import of_structured_outputs
from meshlm.supervisor.errors import raised_as

MOST_IDS = 1 << 31  # of any vocabulary
LOGPROBS = ("logprobs", "prompt_logprobs")
OF_THE_VOCABULARY = ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids", *LOGPROBS)
_COUNTS = ("max_tokens", "truncate_prompt_tokens", "thinking_token_budget", "num_speculative_tokens")
MAY_BE_NONE = ("seed", *_COUNTS, *LOGPROBS)
INTEGERS = ("n", "min_tokens", "top_k", *MAY_BE_NONE)
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
# Fields of vLLM's that would change the output: why not, or what there is instead.
NOT_SUPPORTED = {
    "logits_processors": "give classes to LLM(logits_processors=[...]), and arguments in extra_args",
    "flat_logprobs": "logprobs are a dict a position",
    "routed_experts_prompt_start": "the experts of tokens are not returned",
    "skip_reading_prefix_cache": "a prompt's cache_salt keeps it from what others left in the cache",
}


@dataclass(frozen=True)
class RepetitionDetectionParams:
    """An output ends whose last tokens are one pattern of these lengths, min_count times in a row. Names and limits are vLLM's."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_pattern_size <= self.max_pattern_size:
            raise ValueError("RepetitionDetectionParams: 0 <= min_pattern_size <= max_pattern_size must hold")
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError("RepetitionDetectionParams.min_count: must be at least 2; one time is no repetition")

    def wire(self) -> RepetitionDetection | None:
        """Gives the value as the mesh knows it; None where it is off."""
        if not self.max_pattern_size:
            return None
        return RepetitionDetection(self.max_pattern_size, max(1, self.min_pattern_size), self.min_count)


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The text keeps to one of these: a JSON schema, a pattern, one of several texts, a grammar (EBNF or Lark), any JSON object, or
    tags. Names are vLLM's."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        self.wire(StructuredOutputsConfig())

    def wire(self, config: StructuredOutputsConfig) -> Grammar:
        """The grammar as the mesh knows it. ValueError names the field at fault."""
        fields, name = (
            {one.name: getattr(self, one.name) for one in dataclasses.fields(self)},
            "StructuredOutputsParams",
        )
        # of values that JSON lacks
        with raised_as(ValueError, RequestError), raised_as(ValueError, TypeError, of=name):
            return of_structured_outputs(fields, config, name)


class RequestOutputKind(Enum):
    """What `AsyncLLM.generate` gives each time; names and values are vLLM's."""

    CUMULATIVE = 0  # all that is there
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # all, at the end alone


@dataclass
class SamplingParams:
    """The settings of sampling; names, meanings and defaults are vLLM's. ValueError names what is not allowed or not supported."""

    n: int = 1
    _: KW_ONLY
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True  # False: outputs have no text
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # for `AsyncLLM`; `LLM` gives complete answers
    skip_clone: bool = False  # nothing is copied, and nothing changed
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: Any = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    thinking_token_budget: int | None = None
    deterministic: bool = False  # it is the case with LLM(deterministic=True), and refused without
    num_speculative_tokens: int | None = None  # drafted in a step, at most; the text is the same with any number
    repetition_detection: RepetitionDetectionParams | None = None
    extra_args: dict[str, Any] | None = None  # of logits processors
    routed_experts_prompt_start: int = 0
    skip_reading_prefix_cache: bool | None = None
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] | list[str] = ("\n", ":", '"', "*")

    def __post_init__(self) -> None:
        for name, why in NOT_SUPPORTED.items():
            if getattr(self, name):
                raise ValueError(f"SamplingParams.{name}: not supported; {why}")
        if self.thinking_token_budget is not None and self.structured_outputs is not None:
            raise ValueError("SamplingParams.thinking_token_budget: does not go with structured_outputs")
        for name in INTEGERS:
            setattr(self, name, _integer(name, getattr(self, name)))
        for name in NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"SamplingParams.{name}: {value!r} is no number")
        self._check_samplers()
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ValueError("SamplingParams.structured_outputs: must be StructuredOutputsParams")
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            raise ValueError(f"SamplingParams.output_kind: {self.output_kind!r} is no RequestOutputKind") from None
        self.seed = None if self.seed == -1 else self.seed  # as in vLLM
        if self.stop and not self.detokenize:
            raise ValueError("SamplingParams.stop: stop strings are found in text; they need detokenize=True")
        self.check(MOST_IDS)

    def _check_samplers(self) -> None:
        """Types and ranges of llama.cpp's samplers."""
        for field in msgspec.structs.fields(samplers.LlamaSamplers):
            value = getattr(self, field.name)
            try:
                if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
                    raise ValueError("not a number")
                setattr(self, field.name, msgspec.convert(value, field.type))
            except (ValueError, msgspec.ValidationError):
                raise ValueError(f"SamplingParams.{field.name}: {str(value)[:80]} is not allowed") from None

    @staticmethod
    def from_optional(**fields: Any) -> "SamplingParams":
        """SamplingParams with the defaults for what is None; ids of a logit_bias may be text."""
        if fields.get("logit_bias"):
            fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
        given = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        return SamplingParams(**given)

    def check_reasoning(self, parser: str) -> None:
        """ValueError for a budget of reasoning that nobody would keep. parser: LLM(reasoning_parser=...)."""
        if self.thinking_token_budget not in (None, -1) and (why := budgets.why_none(parser)):
            raise ValueError(f"SamplingParams.{budgets.NAME}: not supported; {why}")

    def drafting(self, most: int) -> tuple[Drafting, ...]:
        """What the request says of its drafts, where the server drafts `most` tokens in a step. ValueError."""
        try:
            return drafting_of(self.num_speculative_tokens, most)
        except ValueError as error:
            raise ValueError(f"SamplingParams.{NAME}: {error}") from None

    def wire(self, eos: tuple[int, ...], vocab_size: int, drawn: int) -> WireParams:
        """The settings as the mesh knows them, with the seed that was drawn if none is given. Call `check` first."""
        certain = tuple(dict.fromkeys(self.logprob_token_ids or ()))
        same = {name: getattr(self, name) for name in ("min_tokens", *NUMBERS, *samplers.NAMES)}
        return WireParams(
            **same,
            top_k=max(0, self.top_k),
            seed=drawn if self.seed is None else self.seed & (2**63 - 1),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            eos_token_ids=() if self.ignore_eos else eos,
            logit_bias={token: min(100.0, max(-100.0, bias)) for token, bias in (self.logit_bias or {}).items()},
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            logprobs=len(certain) if certain else _wanted(self.logprobs, vocab_size),
            prompt_logprobs=_wanted(self.prompt_logprobs, vocab_size),
            logprob_token_ids=certain,
            extra_args=dict(self.extra_args or {}),
            repetition_detection=self.repetition_detection.wire() if self.repetition_detection else None,
        )

    def extras(self, config: StructuredOutputsConfig, reasoning_parser: str = "") -> Extras:
        """What travels with each sequence beside these settings."""
        constraint, budget = self.structured_outputs, self.thinking_token_budget
        asked = samplers.LlamaSamplers(**{name: getattr(self, name) for name in samplers.NAMES})
        breakers = samplers.breakers_of(asked)
        if budget not in (None, -1) and reasoning_parser:
            return (budgets.alone(budgets.of_prompt(reasoning_parser, budget)), *breakers)
        return (*(() if constraint is None else (constraint.wire(config),)), *breakers)

    def check(self, vocab_size: int) -> None:
        """ValueError names a value that is not allowed."""

        def known(ids: Iterable[int] | None) -> bool:
            return all(0 <= token < vocab_size for token in ids or ())

        # As in vLLM: `logprobs` is left out, or is their number.
        fits_logprobs = not self.logprob_token_ids or self.logprobs in (None, len(self.logprob_token_ids))
        allowed = {
            "n": self.n >= 1,
            "max_tokens": self.max_tokens is None or self.max_tokens >= 1,
            "min_tokens": self.min_tokens >= 0 and (self.max_tokens is None or self.min_tokens <= self.max_tokens),
            "temperature": 0 <= self.temperature < math.inf,
            "top_p": 0 < self.top_p <= 1,
            "top_k": self.top_k >= -1,
            "min_p": 0 <= self.min_p <= 1,
            "presence_penalty": -2 <= self.presence_penalty <= 2,
            "frequency_penalty": -2 <= self.frequency_penalty <= 2,
            "repetition_penalty": 0 < self.repetition_penalty < math.inf,
            "seed": self.seed is None or -(1 << 63) <= self.seed < 1 << 63,
            "stop": "" not in ([self.stop] if isinstance(self.stop, str) else self.stop or []),
            "stop_token_ids": known(self.stop_token_ids),
            "logit_bias": known(self.logit_bias) and not any(map(math.isnan, (self.logit_bias or {}).values())),
            "allowed_token_ids": known(self.allowed_token_ids) and self.allowed_token_ids != [],
            "bad_words": all(word.strip() for word in self.bad_words or ()),
            "logprob_token_ids": known(self.logprob_token_ids) and fits_logprobs,
            "logprobs": -1 <= (self.logprobs or 0) <= vocab_size,
            "prompt_logprobs": -1 <= (self.prompt_logprobs or 0) <= vocab_size,
            "thinking_token_budget": self.thinking_token_budget is None or self.thinking_token_budget >= -1,
            "num_speculative_tokens": self.num_speculative_tokens is None or self.num_speculative_tokens >= 0,
            "truncate_prompt_tokens": self.truncate_prompt_tokens is None or self.truncate_prompt_tokens >= 1,
        }
        wrong = [name for name, fine in allowed.items() if not fine]
        if wrong:
            of_vocabulary = wrong[0] in OF_THE_VOCABULARY and vocab_size < MOST_IDS
            hint = f"; this model's token ids are 0 to {vocab_size - 1}" if of_vocabulary else ""
            raise ValueError(f"SamplingParams.{wrong[0]}: {str(getattr(self, wrong[0]))[:80]} is not allowed{hint}")

    def text(self) -> TextParams:
        stop = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        return TextParams(
            stop=tuple(stop),
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens or 0,
            bad_words=tuple(self.bad_words or ()),
        )


def _wanted(logprobs: int | None, vocab_size: int) -> int:
    """-1 is the whole vocabulary here, and none in the mesh."""
    return -1 if logprobs is None else (vocab_size if logprobs == -1 else logprobs)


def _integer(name: str, value: Any) -> int | None:
    """An integer, also where it is written as 16.0; True for one logprob, as in vLLM."""
    if value is None and name in MAY_BE_NONE:
        return None
    if isinstance(value, bool):
        if name in LOGPROBS:
            return 1 if value else None
    elif isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    raise ValueError(f"SamplingParams.{name}: {value!r} is no integer")


def check_embeds(params: SamplingParams) -> None:
    """ValueError for what would have to know the token ids of a prompt of vectors."""
    if params.prompt_logprobs is not None:
        raise ValueError("SamplingParams.prompt_logprobs: does not go with prompt_embeds")
    if params.repetition_penalty != 1.0:
        why = "counts the prompt's tokens, which prompt_embeds does not have"
        raise ValueError(f"SamplingParams.repetition_penalty: {why}")
