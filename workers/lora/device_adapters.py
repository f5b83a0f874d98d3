"""The adapters of one step on a GPU: kernels add them, whose adapter a token has the device alone knows."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from meshlm.kernels.lora.kernel import StepOrder, add_adapters
from meshlm.kernels.lora.layout import LayerPlaces, Memory
from meshlm.workers.lora.step_adapters import StepAdapters

if TYPE_CHECKING:
    from meshlm.workers.layers.ops import Ops


class DeviceStepAdapters(StepAdapters):
    """A CUDA graph is replayed with adapters that the host knew nothing of, so all layers that one may change ask for theirs."""

    def __init__(self, layers: Mapping[Any, LayerPlaces], memory: Memory, step: StepOrder, asked: set[Any]) -> None:
        """asked: gets the layers that do."""
        super().__init__(())
        self._layers, self._memory, self._step, self._asked = layers, memory, step, asked

    def changes(self, layer: Any) -> bool:
        return layer in self._layers

    def add(self, layer: Any, x: Tensor, out: Tensor, ops: "Ops") -> Tensor:
        place = self._layers.get(layer)
        if place is None:
            return out
        self._asked.add(layer)
        return add_adapters(x if x.stride(1) == 1 else x.contiguous(), out, place, self._memory, self._step)

    def check(self, *, is_first: bool = True) -> None:
        """An adapter of a layer that does not ask was refused when it was loaded (device_slots.py)."""
