"""Drafters that read a target's states, computed without an engine."""

import torch
from small_models import BLOCK, CPU, batch_of, caches
from torch import Tensor

from meshlm.protocol.config import Resolved
from meshlm.workers.attention.backend import choose
from meshlm.workers.batch import LayerCache
from meshlm.workers.distributed.shard import WHOLE, Shard
from meshlm.workers.layers.ops import TorchOps
from meshlm.workers.layers.summing_ops import SummingOps
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.models.drafters import StateDrafter
from meshlm.workers.weights.load import load_model

TABLE = [7, 3, 11, 0, 5, 9, 1, 2, 8, 4]
PASSES = 3  # on the drafter's own states, behind the first
LENGTH = 21  # of prompts


def loaded(found: Resolved, shard: Shard = WHOLE) -> StateDrafter:
    with torch.inference_mode():
        model = load_model(found, CPU, 0, lambda done, total: None, shard)
    assert isinstance(model, StateDrafter)
    return model


def states_of(
    model: Decoder, kv: list[LayerCache], ids: list[int], start: int, given: Tensor | None = None, nth: int = 0
) -> Tensor:
    """[t, hidden] of a step. given: states that a drafter takes; nth: of which of its layers."""
    batch = batch_of([(ids, start, TABLE)])
    with torch.inference_mode():
        ops = model.ops.base if isinstance(model.ops, SummingOps) else model.ops
        backend = choose("torch" if isinstance(ops, TorchOps) else "cpu", model.local, CPU, torch.float32, BLOCK)
        found: Tensor = model(batch, kv, backend.step(batch, BLOCK), given, *((nth,) if nth else ()))
        return found


def drafted(drafter: StateDrafter, states: Tensor, tokens: list[int]) -> Tensor:
    """[passes, vocab]: logits behind a prompt, all but the last of whose tokens have states of the target, and then behind drafts: of
    each layer, and behind the last one's."""
    kv, layers, ids = caches(drafter.local, 24), len(drafter.layers), list(tokens)
    found = torch.cat(
        [states_of(drafter, kv, ids[1 + at : 9 + at], at, states[at : at + 8]) for at in range(0, LENGTH - 1, 8)]
    )
    with torch.inference_mode():
        logits = [drafter.logits(found[-1:])]
        for nth in range(1, 1 + PASSES):
            ids.append(int(logits[-1].argmax()))
            if nth < layers:
                found = states_of(drafter, kv, ids[1 + nth :], 0, found, nth)
            else:
                found = states_of(drafter, kv, ids[-1:], len(ids) - 1 - layers, found[-1:], layers - 1)
            logits.append(drafter.logits(found[-1:]))
    return torch.cat(logits)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
