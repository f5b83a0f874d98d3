"""Which weights stay in the host's memory (--cpu-offload-gb, --cpu-offload-params), chosen before the first of them is read.

Linear layers whose weights are not quantised, of whole decoder layers that lie evenly between others: the device computes what it has
while theirs are on their way. How they come to the device is formats/offloaded.py's.
"""

import torch
from torch import Tensor

from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.formats.format import UNQUANTIZED
from meshlm.workers.formats.offloaded import SLOTS, DeviceCopies, HostCopies, OffloadedFormat, OffloadedWeights
from meshlm.workers.kv_capacity import size_text
from meshlm.workers.layers.elements import Linear
from meshlm.workers.layers.moe import MoE
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights.host_copy import on_host

FLAG, NAMES_FLAG = "--cpu-offload-gb", "--cpu-offload-params"
# Our names of modules, and those of checkpoints and of vLLM
NAMES = {"attention": "self_attn", "qkv": "qkv_proj", "o": "o_proj", "gate_up": "gate_up_proj", "down": "down_proj"}


def offload(model: Decoder, wanted: int, names: tuple[str, ...], device: torch.device) -> int:
    """Has weights stay on the host, so that at least so many bytes of the device are saved; how many are. The parameters are on
    the meta device still. names: segments of the names of those that may; empty: all. ProcessFatal."""
    by_layer = [_candidates(layer, names) for layer in model.layers]
    _check_names(model, names)
    sizes = [[linear.weight.nbytes for linear in linears] for linears in by_layer]
    chosen = _chosen(sizes, wanted)
    if not chosen:
        most = size_text(max(0, _saved(sizes)))
        named = " with these names" if names else ""
        raise ProcessFatal(
            f"{FLAG} {wanted / 2**30:g}: linear layers{named} that are not quantised can save {most} of this worker's memory"
        )
    copies = DeviceCopies(device) if device.type == "cuda" else HostCopies()
    weights = OffloadedWeights(copies, device, _pinned)
    for layer in chosen:
        for linear in by_layer[layer]:
            weights.add(linear)
    model.register_forward_pre_hook(lambda *_: weights.begin())
    model.register_forward_hook(lambda *_: weights.end())
    return _saved([sizes[layer] for layer in chosen])


def _candidates(layer: torch.nn.Module, names: tuple[str, ...]) -> list[Linear]:
    """In the order of use. What routes tokens to experts stays on the device."""
    mixtures = tuple(f"{path}." for path, module in layer.named_modules() if isinstance(module, MoE))
    return [
        module
        for path, module in layer.named_modules()
        if type(module) is Linear
        and module.format is UNQUANTIZED
        and not path.startswith(mixtures)
        and (not names or _segments(path) & set(names))
    ]


def _segments(path: str) -> set[str]:
    return {NAMES.get(segment, segment) for segment in path.split(".")}


def _check_names(model: Decoder, names: tuple[str, ...]) -> None:
    there = {
        name
        for layer in model.layers
        for path, one in layer.named_modules()
        if type(one) is Linear
        for name in _segments(path)
    }
    for name in names:
        if name not in there:
            raise ProcessFatal(
                f"{NAMES_FLAG} {name}: no linear layer has that name; there are {', '.join(sorted(there))}"
            )


def _chosen(sizes: list[list[int]], wanted: int) -> list[int]:
    """The fewest layers, evenly spread and the last among them, that save so many bytes; none: all do not. sizes: of the weights, by
    layer."""
    having = [layer for layer, size in enumerate(sizes) if size]
    for count in range(1, len(having) + 1):
        found = [having[(nth + 1) * len(having) // count - 1] for nth in range(count)]
        if _saved([sizes[layer] for layer in found]) >= wanted:
            return found
    return []


def _saved(sizes: list[list[int]]) -> int:
    """Bytes of the device, less the slots."""
    return sum(map(sum, sizes)) - SLOTS * sum({size for layer in sizes for size in layer})


def _pinned(weight: Tensor) -> Tensor:
    """A copy in the host's memory, from which a GPU copies by itself. ProcessFatal."""
    if weight.device.type != "cuda":
        return weight.clone()
    host = on_host(weight)
    if not host.is_pinned():
        raise ProcessFatal(
            f"{FLAG}: the driver does not pin {size_text(weight.nbytes)} of the host's memory; give less"
        )
    return host


def is_offloaded(model: torch.nn.Module) -> bool:
    """Whether some of its weights stay on the host."""
    return bool(slots_of(model))


def slots_of(model: torch.nn.Module) -> set[int]:
    """The addresses of the slots that such weights come to: what lies there changes within a step."""
    formats = (getattr(module, "format", None) for module in model.modules())
    weights = {one.weights for one in formats if isinstance(one, OffloadedFormat)}
    return {slots.untyped_storage().data_ptr() for one in weights for slots in one.slots}
