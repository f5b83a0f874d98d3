"""An adapter outside the layers: in the table of embeddings, and in the head, whose rows tensor ranks share.

Either has a product of low rank beside it (LoRA), is another matrix altogether (modules_to_save), or has other rows for some tokens
(trainable_token_indices). The head may be tied: then it is the base's table, and an adapter of the table alone leaves it as it is.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.architectures.registry import weights_of
from meshlm.runtime.model_files.adapter_modules import EMBEDDING, HEAD, AdaptedModule
from meshlm.workers.weights.slices import slices_of

if TYPE_CHECKING:
    from meshlm.workers.layers.ops import Ops
    from meshlm.workers.models.decoder import Decoder


class OtherRows(NamedTuple):
    """Rows of a table that are others, in the order of their numbers."""

    ids: Tensor  # int64 [n]
    rows: Tensor  # [n, hidden]; of a head as `Ops.pack` has it


class EmbeddingAdapter(NamedTuple):
    table: Tensor | None  # [this rank's rows, hidden]; None: the base's
    other: OtherRows | None
    a: Tensor | None  # [tokens, rank]
    b: Tensor | None  # [hidden, rank] as `Ops.pack` has it, multiplied by the adapter's scale

    def rank_rows(self, ids: Tensor, own: Tensor, rows: tuple[int, int]) -> Tensor:
        """own [t, hidden], of the base's table: zeros where another rank than this has the row. rows: that this rank has."""
        if self.table is None:
            return own
        begin, end = rows
        inside = (ids >= begin) & (ids < end)
        return F.embedding(torch.where(inside, ids - begin, 0), self.table) * inside[:, None]

    def whole_rows(self, ids: Tensor, found: Tensor, ops: "Ops") -> Tensor:
        """found [t, hidden], the sum over the ranks: with what each of them adds alike."""
        if self.other is not None:
            at = torch.searchsorted(self.other.ids, ids).clamp_(max=len(self.other.ids) - 1)
            is_other = self.other.ids[at] == ids
            found = torch.where(is_other[:, None], self.other.rows[at], found)
        if self.a is not None and self.b is not None:
            found = found + ops.linear(F.embedding(ids, self.a), self.b, None, found.shape[1])
        return found


class HeadAdapter(NamedTuple):
    rows: int  # that this rank has, without padding
    weight: Tensor | None  # [rows, hidden] as `Ops.pack` has it; None: the base's
    other: OtherRows | None  # of this rank's rows
    a: Tensor | None  # [rank, hidden] as `Ops.pack` has it
    b: Tensor | None  # [rows, rank] likewise, multiplied by the adapter's scale
    rank: int

    def logits(self, hidden: Tensor, base: Tensor, ops: "Ops") -> Tensor:
        """hidden [l, hidden], base [l, rows and padding] of the model's own head -> the adapter's."""
        found = base.clone()
        if self.weight is not None:
            found[:, : self.rows] = ops.linear(hidden, self.weight, None, self.rows)
        if self.other is not None and len(self.other.ids):
            found[:, self.other.ids] = ops.linear(hidden, self.other.rows, None, len(self.other.ids))
        if self.a is not None and self.b is not None:
            low = ops.linear(hidden, self.a, None, self.rank)
            found[:, : self.rows] += ops.linear(low, self.b, None, self.rows)
        return found


class _Values(NamedTuple):
    """The tensors of a module in the dtype that they are kept in; None: it has none."""

    whole: Tensor | None
    rows: Tensor | None
    a: Tensor | None
    b: Tensor | None


def tables_of(
    modules: tuple[AdaptedModule, ...], tensors: Mapping[str, Tensor], model: "Decoder", dtypes: tuple[torch.dtype, ...]
) -> tuple[EmbeddingAdapter | None, HeadAdapter | None]:
    """What this worker needs of an adapter's modules outside the layers. dtypes: what values are rounded to, and the model's."""
    embedding: EmbeddingAdapter | None = None
    head: HeadAdapter | None = None
    places, known, device = slices_of(model.spec, model.shard), weights_of(model.spec), model.rope.device

    def kept(values: Tensor) -> Tensor:
        return values.to(dtypes[0]).to(dtypes[1]).to(device).contiguous()

    for module in modules:
        if not module.parameter or (place := places.get(module.weights[0])) is None:
            continue
        times, plus = known[module.weights[0]].times, known[module.weights[0]].plus
        get = {name: tensors[name].float() for name in (module.whole, module.rows, module.a, module.b) if name}
        whole = kept(get[module.whole][place.begin : place.end] * times + plus) if module.whole else None
        rows = kept(get[module.rows] * times + plus) if module.rows else None
        b = kept(get[module.b] * (module.scale * times)) if module.b else None
        values = _Values(whole, rows, kept(get[module.a]) if module.a else None, b)
        ids = torch.tensor(module.row_ids, dtype=torch.int64, device=device)
        if module.parameter == EMBEDDING and model.shard.is_first:
            embedding = _embedding(values, ids, (place.begin, place.end), model)
        elif module.parameter == HEAD and model.shard.is_last:
            head = _head(values, ids, (place.begin, place.end), model)
    return embedding, head


def _embedding(values: _Values, ids: Tensor, rows: tuple[int, int], model: "Decoder") -> EmbeddingAdapter:
    ops, table, other = model.ops, values.whole, None
    assert model.embed is not None
    if table is not None:  # peft saves the base's table beside a LoRA of it
        own = ops.rows(torch.arange(len(table), device=table.device), model.embed.weight, table.shape[1])
        table = None if torch.equal(own.to(table.dtype), table) else table
    if values.rows is not None:
        order = ids.argsort()
        other = OtherRows(ids[order], values.rows[order])
    b = None if values.b is None else ops.pack(values.b)
    return EmbeddingAdapter(table, other, None if values.a is None else values.a.T.contiguous(), b)


def _head(values: _Values, ids: Tensor, rows: tuple[int, int], model: "Decoder") -> HeadAdapter:
    ops, (begin, end) = model.ops, rows
    weight, other = values.whole, None
    if weight is not None:
        weight = ops.pack(weight)
    if values.rows is not None:
        mine = (ids >= begin) & (ids < end)
        other = OtherRows(ids[mine] - begin, ops.pack(values.rows[mine]) if bool(mine.any()) else values.rows[:0])
    a = None if values.a is None else ops.pack(values.a)
    b = None if values.b is None else ops.pack(values.b[begin:end].contiguous())
    return HeadAdapter(end - begin, weight, other, a, b, 0 if values.a is None else len(values.a))
