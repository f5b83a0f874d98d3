"""Weights of linear layers that stay in the host's memory (--cpu-offload-gb) and are copied to the device ahead of their use.

A layer's weight on the device is a view of a slot, which it shares with other layers of its size: two slots for each size, so that one
layer's weight is on its way while another's is used. The copies are in a stream beside the steps', in the order of use: behind a layer,
that of the next but one of its size begins. Every step begins with the first ones anew, so a step is the same by itself, within a CUDA
graph (where the copies are nodes of it) and without one.

Which weight is where is settled while the host launches a step, or captures it: a replay decides nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshlm.workers.formats.format import ProductOps, Unquantized, WeightedLayer

SLOTS = 2  # for each size
ALIGN = 256  # bytes


class Copies(Protocol):
    """Copies to the device, in order, beside what computes there."""

    def mark(self) -> Any:
        """A mark behind what computes so far."""

    def copy(self, to: Tensor, host: Tensor, behind: Any) -> Any:
        """Begins a copy behind a mark; gives a mark behind the copy."""

    def wait(self, mark: Any) -> None:
        """What computes from now on is behind this copy."""


class HostCopies:
    """Where the device is the host: each is done at once."""

    def mark(self) -> None:
        """All is done when it is launched."""

    def copy(self, to: Tensor, host: Tensor, behind: Any) -> None:
        """As Copies has it."""
        to.copy_(host)

    def wait(self, mark: Any) -> None:
        """It is done."""


class DeviceCopies:
    """A stream of a GPU. Its events are made anew for each mark, as a graph that is captured keeps those that it has met."""

    def __init__(self, device: torch.device) -> None:
        make_stream: Any = torch.cuda.Stream  # typed in some versions of torch only
        self._stream = make_stream(device)
        self._make_event: Any = torch.cuda.Event

    def mark(self) -> Any:
        """As Copies has it."""
        event = self._make_event()
        event.record()
        return event

    def copy(self, to: Tensor, host: Tensor, behind: Any) -> Any:
        """As Copies has it. The host's memory is pinned, or this waits for each copy."""
        self._stream.wait_event(behind)
        with torch.cuda.stream(self._stream):
            to.copy_(host, non_blocking=True)
            event = self._make_event()
            event.record(self._stream)
        return event

    def wait(self, mark: Any) -> None:
        """As Copies has it."""
        torch.cuda.current_stream().wait_event(mark)


class _Weight(NamedTuple):
    host: Tensor  # as it lies in the host's memory
    device: Tensor  # the same in its slot
    slot: tuple[int, int]  # of a size, its nth
    following: int  # the number of the next weight that comes into this slot; -1: none


class OffloadedWeights:
    """The weights of one model that stay on the host, by number, in the order of use. `pin` gives a copy in pinned memory."""

    def __init__(self, copies: Copies, device: torch.device, pin: Callable[[Tensor], Tensor]) -> None:
        self.device = device
        self._copies, self._pin = copies, pin
        self._layers: list[WeightedLayer] = []
        self._hosts: dict[int, Tensor] = {}
        self._weights: list[_Weight] = []
        self._there: dict[
            tuple[int, int], tuple[int, Any]
        ] = {}  # by slot: whose weight is or comes there, and the copy's mark
        self.slots: list[Tensor] = []  # uint8 [SLOTS, bytes], by size

    def add(self, layer: WeightedLayer) -> None:
        """Before loading: its weight is on the meta device. The loader fills one of the host's memory."""
        layer.format = OffloadedFormat(self, len(self._layers))
        layer.keep("weight", torch.empty(layer.weight.shape, dtype=layer.weight.dtype, device="cpu"))
        self._layers.append(layer)

    def keep(self, number: int, weight: Tensor) -> None:
        """After loading: the weight in the form that products want, on any device. With the last of them slots are made."""
        self._hosts[number] = self._pin(weight)
        self._layers[number].keep("weight", self._hosts[number])  # what files have filled goes
        if len(self._hosts) == len(self._layers):
            self._make_slots()

    def _make_slots(self) -> None:
        sizes: dict[int, list[int]] = {}
        for number in range(len(self._layers)):
            sizes.setdefault(self._hosts[number].nbytes, []).append(number)
        found: dict[int, _Weight] = {}
        for nth, (num_bytes, numbers) in enumerate(sizes.items()):
            padded = -(-num_bytes // ALIGN) * ALIGN
            slots = torch.zeros(SLOTS, padded, dtype=torch.uint8, device=self.device)
            self.slots.append(slots)
            for place, number in enumerate(numbers):
                host, following = self._hosts[number], numbers[place + SLOTS :][:1]
                device = slots[place % SLOTS][:num_bytes].view(host.dtype).view(host.shape)
                found[number] = _Weight(host, device, (nth, place % SLOTS), following[0] if following else -1)
                self._layers[number].keep("weight", device)
        self._weights = [found[number] for number in range(len(self._layers))]
        self._hosts.clear()

    def begin(self) -> None:
        """A step begins: the first weights are on their way."""
        self._there.clear()
        behind = self._copies.mark()
        for number, weight in enumerate(self._weights):
            if weight.slot not in self._there:
                self._begin(number, behind)

    def _begin(self, number: int, behind: Any) -> Any:
        weight = self._weights[number]
        mark = self._copies.copy(weight.device, weight.host, behind)
        self._there[weight.slot] = number, mark
        return mark

    def before(self, number: int) -> None:
        """What computes next uses this weight."""
        there, mark = self._there.get(self._weights[number].slot, (-1, None))
        if there != number:  # layers were left out, or computed in another order
            mark = self._begin(number, self._copies.mark())
        self._copies.wait(mark)

    def after(self, number: int) -> None:
        """It is used by what was launched so far, and by nothing else in this step."""
        if (following := self._weights[number].following) >= 0:
            self._begin(following, self._copies.mark())

    def end(self) -> None:
        """A step ends: no copy of it is under way, whichever layers it has computed. A graph may end only then."""
        for _, mark in self._there.values():
            self._copies.wait(mark)


class OffloadedFormat(Unquantized):
    """The weight of one layer as it is, on the host. Nothing is fused with its products: they wait for the copy."""

    def __init__(self, weights: OffloadedWeights, number: int) -> None:
        self.weights, self._number = weights, number

    @property
    def is_fusible(self) -> bool:
        return False

    def finish(self, layer: WeightedLayer, ops: ProductOps) -> None:
        """As Unquantized has it, one layer after the other on the device."""
        self.weights.keep(self._number, ops.pack(layer.weight.data.to(self.weights.device)))

    def apply(self, layer: WeightedLayer, x: Tensor, ops: ProductOps) -> Tensor:
        self.weights.before(self._number)
        out = super().apply(layer, x, ops)
        self.weights.after(self._number)
        return out
