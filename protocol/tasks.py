"""The task of a request: text that goes on, or one vector of its prompt."""

from enum import Enum

from msgspec import Struct


class Generate(Struct, frozen=True, tag="generate"):
    """Output tokens, as `SamplingParams` says."""


class PoolKind(Enum):
    """Which hidden states of the last layer, after the final norm, make the vector. Names as in vLLM's PoolerConfig."""

    LAST = "last"  # the last token's
    MEAN = "mean"  # the mean of all tokens'
    CLS = "cls"  # the first token's, which models that look both ways are trained to read from


class Pool(Struct, frozen=True, tag="pool"):
    """One vector of float32 for the prompt, as it comes (not normalised), and no output token. It ends with FinishReason.STOP."""

    kind: PoolKind

    @property
    def needs_all_tokens(self) -> bool:
        """Tokens whose KV is in the prefix cache have no hidden state any more, and so all are computed."""
        return self.kind is not PoolKind.LAST


ALONE_BYTES = 64 << 10  # a longer vector travels in a message of its own, so that tokens do not wait for it
Task = Generate | Pool
GENERATE = Generate()
