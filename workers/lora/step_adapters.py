"""The adapters of one step: beside a layer's product, for the tokens of rows with an adapter, B (A x); or what makes it DoRA's."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from meshlm.runtime.model_files.adapter_modules import EMBEDDING

if TYPE_CHECKING:
    from meshlm.workers.layers.ops import Ops
    from meshlm.workers.lora.tables import EmbeddingAdapter, HeadAdapter
    from meshlm.workers.lora.weights import LinearAdapters
    from meshlm.workers.models.decoder import Decoder

Places = slice | Tensor
Sum = Callable[[Tensor], Tensor]


class TokensOfAdapter(NamedTuple):
    """The tokens of a step whose rows have one adapter."""

    tokens: Tensor | None  # int64 [m]: their places among the step's; None: all
    layers: "LinearAdapters"
    embedding: "EmbeddingAdapter | None" = None
    head: "HeadAdapter | None" = None


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
        for group in self.groups:
            if (found := group.layers.get(layer)) is None:
                continue
            tokens = group.tokens
            self.changed.add(layer)
            own = x if tokens is None else x[tokens]
            for other in found.others:
                places, term = (
                    slice(other.begin, other.end),
                    ops.linear(own, other.weight, other.bias, other.end - other.begin),
                )
                out[slice(None) if tokens is None else tokens, places] = term
            low = ops.linear(own, found.a, None, found.rank) if found.rank else own
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

    def in_embedding(self) -> bool:
        """Whether an adapter of the step changes the table of embeddings."""
        return any(group.embedding is not None for group in self.groups)

    def embedded(self, ids: Tensor, own: Tensor, rows: tuple[int, int], total: Sum, ops: "Ops") -> Tensor:
        """The embeddings [t, hidden] of ids [t], of which own are the base's as far as this rank has them. total: over the ranks."""
        for tokens, adapter in self._of_embedding():
            own[tokens] = adapter.rank_rows(ids[tokens], own[tokens], rows)
        found = total(own)
        for tokens, adapter in self._of_embedding():
            found[tokens] = adapter.whole_rows(ids[tokens], found[tokens], ops)
        self.changed.add(EMBEDDING)
        return found

    def _of_embedding(self) -> Iterator[tuple[Places, "EmbeddingAdapter"]]:
        for group in self.groups:
            if group.embedding is not None:
                yield slice(None) if group.tokens is None else group.tokens, group.embedding

    def of_lines(self, tokens: Tensor) -> "LineAdapters | None":
        """Those that change the head, for lines whose hidden states are of these of the step's tokens, int64 [l]. None: none does."""
        found = list[tuple[Places, Any]]()
        for group in self.groups:
            if group.head is None:
                continue
            if group.tokens is None:
                found.append((slice(None), group.head))
            elif len(lines := torch.isin(tokens, group.tokens).nonzero()[:, 0]):
                found.append((lines, group.head))
        return LineAdapters(tuple(found)) if found else None

    def check(self, *, is_first: bool = True) -> None:
        """After the model. RuntimeError where it has computed past a layer with an adapter, which would change nothing in silence."""
        if self.in_embedding() and EMBEDDING not in self.changed and is_first:
            raise RuntimeError("this model takes no adapters of its embeddings: it has not asked for them")
        if left := len({layer for group in self.groups for layer in group.layers} - self.changed):
            raise RuntimeError(
                f"this model takes no adapters: {left} of the layers that one changes have not asked for it"
            )


class LineAdapters(NamedTuple):
    """The adapters that change the head, of lines of logits."""

    of_lines: tuple[tuple[Places, "HeadAdapter"], ...]

    def logits(self, model: "Decoder", hidden: Tensor) -> Tensor:
        """[l, hidden] -> [l, vocab]: see `Decoder.logits`."""
        return model.scaled(model.projected(hidden, None, self))

    def change(self, hidden: Tensor, product: Tensor, ops: "Ops") -> Tensor:
        """hidden [l, hidden], product [l, this rank's columns] of the base's head, in place."""
        for lines, head in self.of_lines:
            product[lines] = head.logits(hidden[lines], product[lines], ops)
        return product
