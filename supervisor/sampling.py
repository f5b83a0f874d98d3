"""`SamplingParams` of the Python API: vLLM's names, checked and turned into what the mesh knows. Used by llm.py."""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass

from meshlm.protocol.sampling import SamplingParams as WireParams
from meshlm.protocol.text_edge import TextParams

OF_THE_VOCABULARY = ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprobs", "prompt_logprobs")


@dataclass
class SamplingParams:
    """How to sample; names, meanings and defaults are vLLM's."""

    n: int = 1
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

    def wire(self, eos: tuple[int, ...], vocab_size: int) -> WireParams:
        """As the mesh knows them, with a seed of its own at each call if none is given. `check` first."""
        return WireParams(
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=int.from_bytes(os.urandom(8), "little") >> 1 if self.seed is None else self.seed & (2**63 - 1),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            eos_token_ids=() if self.ignore_eos else eos,
            logit_bias={token: min(100.0, max(-100.0, bias)) for token, bias in (self.logit_bias or {}).items()},
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            logprobs=_wanted(self.logprobs, vocab_size),
            prompt_logprobs=_wanted(self.prompt_logprobs, vocab_size),
        )

    def check(self, vocab_size: int) -> None:
        """ValueError names a value that is not allowed."""

        def known(ids: Iterable[int] | None) -> bool:
            return all(0 <= token < vocab_size for token in ids or ())

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
            "logprobs": -1 <= (self.logprobs or 0) <= vocab_size,
            "prompt_logprobs": -1 <= (self.prompt_logprobs or 0) <= vocab_size,
            "truncate_prompt_tokens": self.truncate_prompt_tokens is None or self.truncate_prompt_tokens >= 1,
        }
        wrong = [name for name, fine in allowed.items() if not fine]
        if wrong:
            hint = f"; this model's token ids are 0 to {vocab_size - 1}" if wrong[0] in OF_THE_VOCABULARY else ""
            raise ValueError(f"SamplingParams.{wrong[0]}: {str(getattr(self, wrong[0]))[:80]} is not allowed{hint}")

    def text(self) -> TextParams:
        stop = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        return TextParams(
            stop=tuple(stop),
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens or 0,
        )


def _wanted(logprobs: int | None, vocab_size: int) -> int:
    """-1 is the whole vocabulary here, and none in the mesh."""
    return -1 if logprobs is None else (vocab_size if logprobs == -1 else logprobs)
