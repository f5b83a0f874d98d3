"""The scales of an FP8 KV cache, by layer: the checkpoint's, or those that this worker calculates before it has a cache.

    scale = max |x| / range        range: 200 for keys and 100 for values, so that larger numbers than those seen still fit

Calculated scales are those of one step over tokens that are the same at every start. So a worker that is started again has the scales
of the one before, requests change nothing, and ranks need not agree: each has its own heads, whose blocks nobody else reads.
"""

from typing import TYPE_CHECKING

import structlog
import torch
from torch import Tensor

from meshlm.kernels.float8 import largest
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.attention.backend import TorchBackend
from meshlm.workers.batch import LayerCache, RequestLens, StepInputs
from meshlm.workers.kv.layout import KVLayout
from meshlm.workers.memory import make_caches

if TYPE_CHECKING:
    from meshlm.workers.engine.engine import ModelEngine

KEY_RANGE, VALUE_RANGE = 200.0, 100.0  # vLLM's
TOKENS = 512
STRIDE = 7919  # between the ids of two tokens: a prime, so that they come from the whole vocabulary
_log = structlog.get_logger()


def scales_of(engine: "ModelEngine") -> list[tuple[float, float]]:
    """The scales of keys and values. ProcessFatal: no numbers to divide by. The engine has a model and its ranks, but no cache."""
    if not largest(engine.layout.dtype):
        return [(1.0, 1.0)] * engine.layout.num_layers
    wanted = engine.config.cache.calculate_kv_scales
    found = _calculated(engine) if wanted else _of_checkpoint(engine)
    found += [(1.0, 1.0)] * (engine.layout.num_layers - len(found))  # of a drafter
    source = "calculated" if wanted else "checkpoint"
    if set(found) == {(1.0, 1.0)}:
        source = "none in the checkpoint: 1"
    spans = {
        name: f"{min(values):.3g} to {max(values):.3g}"
        for name, values in zip(("keys", "values"), zip(*found, strict=True), strict=True)
    }
    _log.info("scales of the FP8 KV cache", source=source, **spans)
    return found


def _of_checkpoint(engine: "ModelEngine") -> list[tuple[float, float]]:
    """1 where it has none."""
    first = engine.shard.layers(engine.resolved.spec.num_hidden_layers)[0]
    found = []
    for layer, (keys, values) in enumerate(engine.model.kv_scales(), first):
        if (keys is None) != (values is None):
            there, missing = ("v_scale", "k_scale") if keys is None else ("k_scale", "v_scale")
            raise ProcessFatal(f"layers.{layer}.self_attn.{missing}: it is missing, and {there} is there")
        found.append((keys or 1.0, values or 1.0))
    return found


def _calculated(engine: "ModelEngine") -> list[tuple[float, float]]:
    """One prompt goes through this stage's layers, with caches of the model's dtype that are one block long."""
    resolved, shard, model = engine.resolved, engine.shard, engine.model
    count = min(TOKENS, resolved.max_model_len, resolved.max_num_batched_tokens)
    layout = KVLayout(resolved.spec, count, resolved.max_model_len, engine.dtype, shard)
    caches = make_caches(layout, len(layout.specs), engine.device)
    states = engine.intermediate_tensors[:count]
    batch = _prompt(count, resolved.spec.vocab_size, layout.shares, engine.device)
    executor, model.executor = model.executor, None  # torch's compiler would compile a shape that never comes again
    with torch.inference_mode():
        if not shard.is_first:
            engine.comm.receive(states)
        hidden = model(batch, caches, TorchBackend().step(batch, count), None if shard.is_first else states)
        if not shard.is_last:
            states.copy_(hidden)
            engine.comm.send(states)
    model.executor = executor
    first = shard.layers(resolved.spec.num_hidden_layers)[0]
    return [
        _of_layer(layer, cache, cache.group * layout.shares[cache.group]) for layer, cache in enumerate(caches, first)
    ]


def _prompt(count: int, vocab_size: int, shares: tuple[int, ...], device: torch.device) -> StepInputs:
    """Group g has block g, by the virtual pages that its layers see (`KVLayout.shares`)."""
    blocks = [group * share for group, share in enumerate(shares)]
    places = torch.arange(count, device=device)
    lens = RequestLens(torch.tensor([count], device=device), (count,), (count,), 0)
    return StepInputs(
        places * STRIDE % vocab_size,
        places,
        tuple(places + block * count for block in blocks),
        tuple(torch.tensor([[block]], device=device) for block in blocks),
        None,
        0,
        lens,
    )


def _of_layer(layer: int, cache: LayerCache, block: int) -> tuple[float, float]:
    def scale(pages: Tensor, most: float, what: str) -> float:
        found = float(pages[block].abs().max()) / most
        if not found < float("inf"):
            raise ProcessFatal(f"--calculate-kv-scales: layer {layer} has {what} that are no finite numbers")
        return found or 1.0

    return scale(cache.keys, KEY_RANGE, "keys"), scale(cache.values, VALUE_RANGE, "values")
