"""Whether the weights of a .gguf file stay packed in memory or are decoded while they are loaded (--gguf-weights). Pure.

Packed weights take a quarter to a half of the memory. On a GPU products with them are slower than with decoded ones from some 16 rows
on, and prompts always are; so they stay packed where the decoded ones would leave too little for a KV cache.
"""

from enum import Enum, auto
from typing import NamedTuple

from meshlm.workers.kv_capacity import size_text

CACHE_SHARE = (
    4  # a KV cache is useful with one in so many bytes of what a worker may take, and one request at its longest
)
ACTIVATIONS_SHARE = 20  # a step is taken to need one in so many


class Form(Enum):
    """The form of a file's weights in a worker's memory."""

    PANELS = auto()  # packed for the compiled kernels of a CPU
    PACKED = auto()  # packed for everything else
    DECODED = auto()  # loaded as the file has them, then decoded on the device
    VALUES = auto()  # decoded as they are read


class WeightsPlan(NamedTuple):
    """The facts that decide, also whether packed weights are decoded beside (decoded_copy.py)."""

    wanted: str = "auto"  # --gguf-weights
    device: str = "cpu"
    compiled: bool = True  # whether a CPU computes by compiled kernels (float32)
    available: int = 0  # bytes of a GPU that this worker may take
    request: int = 0  # bytes of KV cache of one request of --max-model-len
    cache: int | None = None  # --kv-cache-memory
    ranks: int = 1  # that compute one model together
    exact: bool = True  # --cpu-exact
    copy: str = "auto"  # --decoded-copy


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
