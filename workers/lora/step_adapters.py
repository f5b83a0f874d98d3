"""The adapters of one step: beside a layer's product, for the tokens of rows with an adapter, B (A x); or what makes it DoRA's."""

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from meshlm.runtime.model_files.adapter_modules import EMBEDDING

if TYPE_CHECKING:
    from meshlm.workers.layers.ops import Ops
    from meshlm.workers.lora.experts import ExpertAdapters, StepExperts
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
    experts: "ExpertAdapters" = MappingProxyType({})


class StepAdapters:
    """Layers ask for it by `Ops.adapters`, and only in a step some of whose rows have an adapter. `changed` are the layers that did."""

    def __init__(self, groups: Sequence[TokensOfAdapter]) -> None:
        self.groups = tuple(groups)
        self.changed: set[Any] = set()
        self._owners: Tensor | None = None  # what `StepExperts` has, of all groups

    def changes(self, layer: Any) -> bool:
        """Whether an adapter of the step has something beside this layer."""
        return any(layer in group.layers for group in self.groups)

    def add(self, layer: Any, x: Tensor, out: Tensor, ops: "Ops") -> Tensor:
        """out [t, outputs], this layer's product of x [t, inputs], and what the adapters add to it, in place."""
        for group in self.groups:
            if (found := group.layers.get(layer)) is None:
                continue
            self.changed.add(layer)
            found.add(x, out, group.tokens, layer.bias, ops)
        return out

    def of_experts(self, layer: Any, tokens: int, ops: "Ops") -> "StepExperts | None":
        """What adapters change of a layer's experts in this step of so many tokens; None: nothing."""
        from meshlm.workers.lora.experts import StepExperts  # which knows the layers, as those know this

        adapters = tuple((nth, group.experts[layer]) for nth, group in enumerate(self.groups) if layer in group.experts)
        if not adapters:
            return None
        self.changed.add(layer)
        if self.groups[0].tokens is None:  # it is the only one
            return StepExperts(adapters, None, ops)
        if self._owners is None:
            self._owners = torch.full((tokens,), -1, device=self.groups[0].tokens.device)
            for nth, group in enumerate(self.groups):
                self._owners[group.tokens] = nth
        return StepExperts(adapters, self._owners, ops)

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
        if left := len({layer for group in self.groups for layer in (*group.layers, *group.experts)} - self.changed):
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
