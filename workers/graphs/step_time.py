"""How long the GPU is busy with a step at the least, contexts included. Pure; the dispatcher asks whether launching it takes longer.

A CUDA graph of mixed steps holds any requests, so its attention is launched for as many as fit and as if their contexts were short: the
contexts of its decodes are not split among programs, and its prompts have the kernel that is faster where they see few keys. Those
for a few requests with long contexts do both. A decode's tiles are of the longest context that a request may have (--max-model-len),
but for a few requests which all have short ones.
"""

from typing import NamedTuple

from meshlm.protocol.model import ModelSpec

FLOP_PER_S = 6e14  # of a large matrix product, at most
BYTES_PER_S = 4e12  # of keys and values, at most
LONG_CONTEXT = 4096  # tokens; steps in which nobody sees more are as they were measured, in graphs


class Contexts(NamedTuple):
    """What a step's requests see."""

    longest: int  # tokens that a request has when the step is computed
    num_pairs: float  # of prompt tokens and the keys that each sees
    num_keys: int  # of all decodes; those that are read once for several count once


class StepTime(NamedTuple):
    """The least seconds of a model's step."""

    token_s: float  # for a token,
    pair_s: float = 0.0  # for each key that a prompt token sees,
    key_s: float = 0.0  # and for each that a decode sees

    def of(self, num_tokens: int, contexts: Contexts) -> float:
        return self.token_s * num_tokens + self.pair_s * contexts.num_pairs + self.key_s * contexts.num_keys


def of_model(spec: ModelSpec, num_parameters: int, key_bytes: int) -> StepTime:
    """Contexts count in layers that see all of them. spec, num_parameters: this worker's; key_bytes: of a number in the cache."""
    token_s = 2 * num_parameters / FLOP_PER_S
    kinds = [one for one in spec.attentions if not one.slides]
    if spec.mla is not None or any(one.attention_chunk_size for one in spec.attentions):
        return StepTime(token_s)
    pairs = sum(4 * spec.num_attention_heads * kind.head_dim for kind in kinds)
    keys = sum(2 * kind.num_key_value_heads * kind.head_dim * key_bytes for kind in kinds)
    return StepTime(token_s, pairs / FLOP_PER_S, keys / BYTES_PER_S)
