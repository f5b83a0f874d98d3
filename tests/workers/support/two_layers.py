"""Decoders of two layers with random weights, and what a step leaves in their caches."""

from typing import Any

import torch
from small_models import BLOCK, CPU, batch_of, caches
from tiny_models import spec_of
from torch import Tensor

from meshlm.workers.attention.torch_backend import TorchAttention
from meshlm.workers.layers.ops import Ops, TorchOps
from meshlm.workers.models.decoder import Decoder


def two_layers(intermediate_size: int, kind: type[Decoder] = Decoder, **settings: object) -> Decoder:
    """Random weights, float32; `settings` of its ModelSpec."""
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    rest: dict[str, Any] = {**sizes, **heads, "intermediate_size": intermediate_size, **settings}
    model = kind(spec_of(**rest), 64)
    model.prepare(CPU, torch.float32)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    return model


def states(model: Decoder, ops: Ops, lengths: list[int]) -> tuple[Tensor, list[Tensor]]:
    """What comes of prompts of these lengths (1: a decode) with these operations, and what the caches hold afterwards."""
    parts = [([1 + n, *range(3, 2 + length)], 0, [n * 4 + k for k in range(4)]) for n, length in enumerate(lengths)]
    batch = batch_of(parts)
    model.ops, kv = ops, caches(model.spec, 4 * len(lengths))
    with torch.inference_mode():
        out: Tensor = model(batch, kv, TorchAttention(batch, BLOCK))
    return out, [lines for cache in kv for lines in (cache.keys, cache.values)]


def same_states(model: Decoder, ops: Ops, lengths: list[int], *, last: bool = True) -> None:
    """As plain torch finds them, in the caches too. last: with the last norm, else the stream that a pipeline's next stage takes."""
    if not last:
        model.norm = None
    expected, expected_kv = states(model, TorchOps(), lengths)
    found, kv = states(model, ops, lengths)
    for ours, theirs in zip([found, *kv], [expected, *expected_kv], strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)  # shapes and dtypes too
