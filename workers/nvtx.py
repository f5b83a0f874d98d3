"""NVTX ranges around the layers of a model (--profile-layers), for Nsight Systems and Nsight Compute.

A range is pushed and popped by the host around what it launches, so a replayed CUDA graph has none: with the flag there are no graphs.
Called once, when the model is loaded.
"""

from collections.abc import Callable

from torch import nn

from meshlm.workers.models.decoder import Decoder


def mark_layers(model: Decoder, push: Callable[[str], object], pop: Callable[[], object]) -> int:
    """Has each layer, and the attention and the MLP in it, in a range of its own; gives the number of modules."""
    marked = 0
    for number, layer in enumerate(model.layers):
        name = f"layers.{number}"
        for module, shown in [(layer, name), *((part, f"{name}.{at}") for at, part in layer.named_children())]:
            _mark(module, f"{shown} ({type(module).__name__})", push, pop)
            marked += 1
    _mark(model, type(model).__name__, push, pop)
    return marked + 1


def _mark(module: nn.Module, name: str, push: Callable[[str], object], pop: Callable[[], object]) -> None:
    def begin(*_: object) -> None:
        push(name)

    def end(*_: object) -> None:
        pop()

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=True)
