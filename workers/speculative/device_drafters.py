"""The drafter that --speculative-config names, on a GPU."""

from typing import TYPE_CHECKING

import torch

from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.engine.triton_inputs import TritonInputs
from meshlm.workers.graphs.replays import Replays
from meshlm.workers.models.drafters import StateDrafter
from meshlm.workers.output.logits_sampler import LogitsSampler
from meshlm.workers.speculative.device_drafter import DeviceDrafter, DeviceNgram
from meshlm.workers.speculative.device_models import DeviceModels
from meshlm.workers.speculative.drafters import FLAG

if TYPE_CHECKING:
    from meshlm.workers.engine.engine import ModelEngine


def device_drafter_of(
    engine: "ModelEngine", inputs: TritonInputs, head: LogitsSampler, graphs: Replays
) -> DeviceDrafter:
    """ProcessFatal where a GPU drafts nothing so."""
    config, rows, compute, target = engine.config.speculative, engine.rows, engine.compute, engine.model
    if config.method == "ngram":
        return DeviceNgram(rows, config)
    model = engine.draft_model
    if model is None:
        raise ProcessFatal(f"{FLAG}: method {config.method} drafts on --device cpu alone so far")
    shared = rows, compute, inputs, head, graphs, config.num_speculative_tokens
    if not isinstance(model, StateDrafter):
        return DeviceModels(model, None, *shared)
    if len(model.local.layers) > 1:
        raise ProcessFatal(
            f"{FLAG}: method mtp: several layers draft on --device cpu alone so far; this model has them"
        )
    model.share(target)
    most = engine.most_tokens
    if model.taps:
        target.tap(model.taps, most)
        return DeviceModels(model, lambda count: target.tapped[:count], *shared)
    size = engine.resolved.spec.hidden_size
    compute.last_states = torch.zeros(most, size, dtype=engine.dtype, device=engine.device)
    return DeviceModels(model, lambda count: compute.last_states[:count], *shared)
