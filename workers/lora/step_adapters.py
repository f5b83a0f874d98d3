"""The adapters of one step: beside a layer's product, for the tokens of rows with an adapter, B (A x); or what makes it DoRA's."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from meshlm.workers.layers.ops import Ops
    from meshlm.workers.lora.weights import LinearAdapters


class TokensOfAdapter(NamedTuple):
    """The tokens of a step whose rows have one adapter."""

    tokens: Tensor | None  # int64 [m]: their places among the step's; None: all
    layers: "LinearAdapters"


class StepAdapters:
    """Layers ask for it by `Ops.adapters`, and only in a step some of whose rows have an adapter. `changed` are the layers that did."""

    def __init__(self, groups: Sequence[TokensOfAdapter]) -> None:
        self.groups = tuple(groups)
        self.changed: set[Any] = set()

    def changes(self, layer: Any) -> bool:
        """Whether an adapter of the step has something beside this layer."""
        return any(layer in group.layers for group in self.groups)

    def add(self, layer: Any, x: Tensor, out: Tensor, ops: "Ops") -> Tensor:
        """out [t, outputs], this layer's product of x [t, inputs], and what the adapters add to it, in place."""
        for tokens, layers in self.groups:
            if (found := layers.get(layer)) is None:
                continue
            self.changed.add(layer)
            low = ops.linear(x if tokens is None else x[tokens], found.a, None, found.rank)
            for one in found.slices:
                inner = low if one.rank == found.rank else low[:, one.first : one.first + one.rank]
                term, places = ops.linear(inner, one.b, None, one.end - one.begin), slice(one.begin, one.end)
                if one.magnitudes is not None:
                    whole = out[:, places] if tokens is None else out[tokens, places]
                    bias = 0.0 if layer.bias is None else layer.bias[places]
                    term = (whole - bias + term) * one.magnitudes.factors_of(ops) + bias - whole
                if tokens is None:
                    out[:, places] += term
                else:
                    out[:, places].index_add_(0, tokens, term)
        return out

    def check(self) -> None:
        """After the model. RuntimeError where it has computed past a layer with an adapter, which would change nothing in silence."""
        if left := len({layer for group in self.groups for layer in group.layers} - self.changed):
            raise RuntimeError(
                f"this model takes no adapters: {left} of the layers that one changes have not asked for it"
            )
