"""Whether packed weights of 4 or 8 bits (GPTQ, AWQ, ...) are in a GPU's memory decoded, too (--decoded-copy). Called by load.py.

For a few rows a product waits for memory, and packed weights are the faster; for many it computes, and values need no decoding. A model
that is small beside its GPU can have both.
"""

import structlog
import torch

from meshlm.workers.formats.packed import PackedFormat
from meshlm.workers.kv_capacity import size_text
from meshlm.workers.layers.linear import Linear, Matrix
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights.gguf_form import ACTIVATIONS_SHARE, WeightsPlan

COPY_SHARE = 4  # of what the weights leave for a KV cache the copy takes one in so many bytes at most
_log = structlog.get_logger()


def pays(plan: WeightsPlan, weights: int, copy: int) -> tuple[bool, str]:
    """Whether there is one, and why. weights, copy: bytes of this worker's weights without it, and of the copy alone."""
    if plan.copy != "auto":
        return plan.copy == "always", f"--decoded-copy {plan.copy}"
    if plan.ranks > 1:
        return (
            False,
            "all ranks must do the same, and each knows its own GPU alone; --decoded-copy always would keep them",
        )
    left = plan.available - plan.available // ACTIVATIONS_SHARE - weights
    parts = f"decoded they take {size_text(copy)}, of {size_text(max(0, left))} that the packed ones leave"
    room = left - copy >= (plan.request if plan.cache is None else plan.cache)
    return copy * COPY_SHARE <= left and room, parts


def keep_values(model: Decoder, plan: WeightsPlan, weights: int, dtype: torch.dtype) -> int:
    """Has the packed layers of the model keep their values, where that pays; the bytes that these will take.

    weights: bytes of the model's parameters as files fill them.
    """
    linears = [one for one in model.modules() if isinstance(one, Linear) and not isinstance(one, Matrix)]
    packed = [linear for linear in linears if isinstance(linear.format, PackedFormat)]
    if plan.device != "cuda" or not packed:
        return 0
    copy = sum(linear.outputs * linear.inputs for linear in packed) * dtype.itemsize
    kept, why = pays(plan, weights, copy)
    _log.info("packed weights", decoded_copy=kept, reason=why)
    if not kept:
        return 0
    for linear in packed:
        assert isinstance(linear.format, PackedFormat)
        linear.format.keeps_values = True
    return copy
