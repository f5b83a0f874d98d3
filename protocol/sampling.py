"""What a request asks of the sampler and of the stop conditions.

Built by the frontend from a request body, carried unchanged to the scheduler (stop conditions on ids) and
the worker (the sampler). Stop *strings* are the detokenizer's: see `TextParams` in `edges/text.py`.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from meshlm.protocol.samplers import LlamaSamplers


class RepetitionDetection(Struct, frozen=True):
    """An answer ends where its last tokens are one pattern, min_count times in a row."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def ends(self, tokens: Sequence[int], begin: int) -> bool:
        """Whether `tokens` end with such a pattern, none of which stands before `begin`."""
        length, last = len(tokens), tokens[-1]
        longest = min(self.max_pattern_size, (length - begin) // self.min_count)
        for size in range(self.min_pattern_size, longest + 1):
            if tokens[-1 - size] == last:  # nearly always it is not, and nothing is copied
                first = length - size * self.min_count
                if tokens[first : length - size] == tokens[first + size :]:
                    return True
        return False


class SamplingParams(LlamaSamplers, frozen=True, omit_defaults=True):
    """Sampling and id-level stop conditions of one sequence. Field names and meanings are vLLM's.

    The draw of output token i is a pure function of (seed, i), so a resumed stream continues the draws
    it would have made. `seed` is always set by the time a request is admitted: the frontend draws one
    when the client gave none."""

    max_tokens: int = 16  # output tokens at most, >= 1; the detokenizer clamps it to the context
    min_tokens: int = 0  # no stop token may be sampled before this many output tokens
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0  # [0, 1]
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    repetition_penalty: float = 1.0  # > 0
    seed: int = 0  # 64 bits
    stop_token_ids: tuple[int, ...] = ()  # the client's own and the model's (eos) unless ignore_eos
    eos_token_ids: tuple[int, ...] = ()  # the model's end-of-sequence ids; empty with ignore_eos
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    begin_suppress_token_ids: tuple[int, ...] = ()  # that output does not begin with
    logprobs: int = -1  # -1: none; k >= 0: the sampled token's and the k most likely
    prompt_logprobs: int = -1  # -1: none; k >= 0, for every prompt token but the first
    logprob_token_ids: tuple[int, ...] = ()  # with `logprobs`, their number: these tokens' instead of the likeliest
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # sequences whose last token may not follow the rest
    repetition_detection: RepetitionDetection | None = None
    extra_args: dict[str, Any] = field(default_factory=dict)  # for logits processors; JSON values
