"""An adapter of a layer's experts: beside each product of an expert, for the tokens that are routed to it and whose rows have the
adapter, B (A x). Tokens without an adapter are computed as if there were none. See runtime/model_files/adapter_experts.py.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from meshlm.runtime.model_files.adapter_modules import AdaptedModule
from meshlm.workers.layers.moe import ExpertLinears

if TYPE_CHECKING:
    from meshlm.workers.layers.ops import Ops
    from meshlm.workers.lora.weights import LinearAdapter


class ExpertMatrix(NamedTuple):
    """One expert's weight in a layer of this worker."""

    layer: ExpertLinears
    product: str  # gate_up or down
    number: int  # as this worker counts its experts


ExpertAdapter = Mapping[tuple[str, int], "LinearAdapter"]
"""One adapter in one layer: by product and number of the expert."""
ExpertAdapters = Mapping[ExpertLinears, ExpertAdapter]


def by_layer(matrices: Mapping[ExpertMatrix, "LinearAdapter"]) -> ExpertAdapters:
    found: dict[ExpertLinears, dict[tuple[str, int], LinearAdapter]] = {}
    for (layer, product, number), adapter in matrices.items():
        found.setdefault(layer, {})[product, number] = adapter
    return found


def pairs_of_experts(module: AdaptedModule, a: Tensor, b: Tensor) -> Iterator[tuple[AdaptedModule, Tensor, Tensor]]:
    """Of the tensors of a module of experts each expert's A [rank, inputs] and B [outputs, rank], with what they change."""
    assert module.experts is not None
    num_experts, is_swapped, is_interleaved = module.experts
    each, rank = len(module.weights) // num_experts, module.rank
    for number in range(num_experts):
        low, high = a[number * rank : (number + 1) * rank], b[:, number::num_experts]
        if is_swapped:
            low, high = high.T, low.T
        if is_interleaved:
            high = high.view(-1, 2, rank).transpose(0, 1).reshape(-1, rank)
        yield module._replace(weights=module.weights[number * each : (number + 1) * each]), low, high


class StepExperts(NamedTuple):
    """What the adapters of a step change of one layer's experts (workers/moe/experts/reference.py: ExpertChanges)."""

    adapters: tuple[tuple[int, ExpertAdapter], ...]  # beside their numbers
    owners: Tensor | None  # [t]: the number of each token's adapter, -1: none; None: all have the only one
    ops: "Ops"

    def add(self, product: str, number: int, x: Tensor, tokens: Tensor, out: Tensor) -> None:
        """x [m, inputs], of these of the step's tokens; out [m, outputs], the expert's product of it, in place."""
        owners = None if self.owners is None else self.owners[tokens]
        for owner, adapter in self.adapters:
            if (found := adapter.get((product, number))) is None:
                continue
            places = None if owners is None else (owners == owner).nonzero()[:, 0]
            if places is None or len(places):
                found.add(x, out, places, None, self.ops)
