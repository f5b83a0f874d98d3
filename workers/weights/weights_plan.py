"""Whether packed weights are decoded: those of a .gguf file while they are loaded (--gguf-weights), others beside (--decoded-copy).

Packed weights take a quarter to a half of the memory. On a GPU products with them wait for memory with few rows, and are the faster
ones; from some 16 rows on, as prompts always have, values need no decoding. So weights stay packed where decoded ones would leave too
little for a KV cache, and a model that is small beside its GPU can have both.
"""

from enum import Enum, auto
from typing import NamedTuple

import structlog
import torch

from meshlm.protocol.config import MeshConfig
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.formats.packed import PackedFormat
from meshlm.workers.kv_capacity import size_text
from meshlm.workers.layers.elements import Linear, Matrix
from meshlm.workers.models.decoder import Decoder

# A KV cache is useful with one in so many bytes of what a worker may take, and one request at its longest
CACHE_SHARE = 4
ACTIVATIONS_SHARE = 20  # a step is taken to need one in so many


class Form(Enum):
    """The form of a file's weights in a worker's memory."""

    PANELS = auto()  # packed for the compiled kernels of a CPU
    PACKED = auto()  # packed for everything else
    DECODED = auto()  # loaded as the file has them, then decoded on the device
    VALUES = auto()  # decoded as they are read


class WeightsPlan(NamedTuple):
    """The facts that decide, also whether packed weights are decoded beside (weights_plan.py)."""

    wanted: str = "auto"  # --gguf-weights
    device: str = "cpu"
    compiled: bool = True  # whether a CPU computes by compiled kernels (float32)
    available: int = 0  # bytes of a GPU that this worker may take
    request: int = 0  # bytes of KV cache of one request of --max-model-len
    cache: int | None = None  # --kv-cache-memory
    ranks: int = 1  # that compute one model together
    exact: bool = True  # --cpu-exact
    copy: str = "auto"  # --decoded-copy
    offload_bytes: int = 0  # --cpu-offload-gb ...
    offload_names: tuple[str, ...] = ()  # ... and --cpu-offload-params


def form_of(plan: WeightsPlan, decoded: int) -> tuple[Form, str]:
    """The form, and why. decoded: bytes of this worker's weights once they are decoded."""
    if plan.device == "cpu":
        return _on_a_cpu(plan)
    if plan.device != "cuda":
        return Form.VALUES, f"--device {plan.device} has no products with packed weights"
    if plan.wanted != "auto":
        return (Form.PACKED if plan.wanted == "packed" else Form.DECODED), f"--gguf-weights {plan.wanted}"
    if plan.ranks > 1:
        return (
            Form.PACKED,
            "all ranks must do the same, and each knows its own GPU alone; --gguf-weights decoded would decode",
        )
    cache = max(plan.request, plan.available // CACHE_SHARE) if plan.cache is None else plan.cache
    needed = decoded + cache + plan.available // ACTIVATIONS_SHARE
    parts = (
        f"decoded they take {size_text(decoded)} beside {size_text(cache)} of KV cache, of {size_text(plan.available)}"
    )
    return (Form.DECODED if needed <= plan.available else Form.PACKED), parts


def _on_a_cpu(plan: WeightsPlan) -> tuple[Form, str]:
    if plan.wanted == "decoded":
        return Form.VALUES, "--gguf-weights decoded"
    if plan.compiled:
        return Form.PANELS, "the CPU's kernels compute with the file's codes"
    if plan.wanted == "packed":
        return Form.PACKED, "--gguf-weights packed"
    return Form.VALUES, "only float32 has kernels for the file's codes"


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

    weights: bytes of the model's parameters as files fill them."""
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


def weights_plan(
    config: MeshConfig, device: torch.device, others: int, shard: Shard, cache_dtype: torch.dtype
) -> WeightsPlan:
    """The facts that decide whether packed weights are decoded. others: see `memory.taken_by_others`."""
    resolved, wanted = config.require_resolved(), config.model.gguf_weights
    if device.type != "cuda":
        return WeightsPlan(wanted, device.type, resolved.dtype == "float32", exact=config.model.cpu_exact)
    local = shard.local(resolved.spec)
    request = local.kv_bytes_per_token_f32 * cache_dtype.itemsize // 4 * resolved.max_model_len
    available = int(torch.cuda.mem_get_info()[1] * config.cache.gpu_memory_utilization) - others
    return WeightsPlan(
        wanted, "cuda", False, available, request, config.cache.kv_cache_memory, shard.size,
        copy=config.model.decoded_copy, offload_bytes=int(config.model.cpu_offload_gb * 2**30),
        offload_names=config.model.cpu_offload_params,
    )  # fmt: skip
