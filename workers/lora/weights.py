"""Reads an adapter's values: of each of its modules what this worker's part of the model needs, beside the layer that it changes.

Query, key and value, and gate and up, are one product of the model; an adapter may have an A and a B for each of them. What tensor
ranks have of a layer they have of its adapter: of a column-parallel layer rows of B, of a row-parallel one columns of A, whose
products are parts of the same sum over the ranks (runtime/model_files/adapter_files.py has the formula).
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors.torch import load
from torch import Tensor

from meshlm.architectures.registry import weights_of
from meshlm.kernels.lora.layout import Packed
from meshlm.protocol.adapters import Adapter
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.adapter_files import Limits, read_adapter
from meshlm.runtime.model_files.adapter_modules import AdaptedModule
from meshlm.workers.layers.elements import Linear
from meshlm.workers.layers.moe import ExpertLinears
from meshlm.workers.lora.experts import ExpertAdapters, ExpertMatrix, by_layer, pairs_of_experts
from meshlm.workers.lora.magnitudes import Magnitudes, measure
from meshlm.workers.lora.tables import EmbeddingAdapter, HeadAdapter, tables_of
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights.layouts import to_halves
from meshlm.workers.weights.slices import WeightSlice, slices_of

if TYPE_CHECKING:
    from meshlm.workers.layers.ops import Ops


class OutputSlice(NamedTuple):
    """B of one of the matrices that a layer holds: for its outputs begin to end, of the inner numbers from `first` on."""

    begin: int
    end: int
    first: int
    rank: int
    b: Tensor  # [end - begin, rank] as `Ops.pack` has it, multiplied by the adapter's scale
    magnitudes: Magnitudes | None = None  # DoRA: of these outputs


class OtherWeight(NamedTuple):
    """The weight that outputs begin to end of a layer have instead of the base's."""

    begin: int
    end: int
    weight: Tensor  # [end - begin, inputs] as `Ops.pack` has it
    bias: Tensor | None


class LinearAdapter(NamedTuple):
    """One adapter in one layer."""

    a: Tensor  # [rank, inputs] as `Ops.pack` has it: A of all matrices, one below the other; rank 0: there is none
    rank: int
    slices: tuple[OutputSlice, ...]
    others: tuple[OtherWeight, ...] = ()

    def add(self, x: Tensor, out: Tensor, tokens: Tensor | None, bias: Tensor | None, ops: "Ops") -> None:
        """out [t, outputs] is the layer's product of x [t, inputs], with its bias. For these of the tokens (None: all) it becomes what
        it is with the adapter."""
        own = x if tokens is None else x[tokens]
        for other in self.others:
            places = slice(other.begin, other.end)
            term = ops.linear(own, other.weight, other.bias, other.end - other.begin)
            out[slice(None) if tokens is None else tokens, places] = term
        low = ops.linear(own, self.a, None, self.rank) if self.rank else own
        for one in self.slices:
            inner = low if one.rank == self.rank else low[:, one.first : one.first + one.rank]
            term, places = ops.linear(inner, one.b, None, one.end - one.begin), slice(one.begin, one.end)
            if one.magnitudes is not None:
                whole = out[:, places] if tokens is None else out[tokens, places]
                of_bias = 0.0 if bias is None else bias[places]
                term = (whole - of_bias + term) * one.magnitudes.factors_of(ops) + of_bias - whole
            if tokens is None:
                out[:, places] += term
            else:
                out[:, places].index_add_(0, tokens, term)


LinearAdapters = Mapping[Linear, LinearAdapter]
Target = Linear | ExpertMatrix
"""What an adapter changes of the layers of this worker."""


class LoadedAdapter(NamedTuple):
    adapter: Adapter
    layers: LinearAdapters
    embedding: EmbeddingAdapter | None = None
    head: HeadAdapter | None = None
    experts: ExpertAdapters = MappingProxyType({})
    packed: Packed | None = None  # where kernels compute with it: then it has no layers (device_slots.py)


class _Slice(NamedTuple):
    begin: int
    first: int  # inner number
    b: Tensor
    lengths: Tensor | None  # of DoRA
    over_ranks: bool  # other tensor ranks have columns of the layer, too


class _Matrices:
    """A and B of one layer, as they are found."""

    def __init__(self) -> None:
        self.a: list[Tensor] = []
        self.b: list[_Slice] = []
        self.others: list[tuple[int, Tensor, Tensor | None]] = []  # the first output, weight and bias

    @property
    def rank(self) -> int:
        return sum(map(len, self.a))


def load_adapter(
    adapter: Adapter, model: Decoder, limits: Limits, dtypes: tuple[torch.dtype, torch.dtype], *, on_host: bool = False
) -> LoadedAdapter:
    """This worker's part of an adapter. dtypes: what values are rounded to, and the model's. on_host: they stay there, as they are.
    ModelFilesError."""
    files = read_adapter(Path(adapter.path), model.spec, limits)
    if files.digest != adapter.digest:
        raise ModelFilesError(f"{adapter.path}: the files are others than when the adapter was loaded; load it again")
    tensors, found = load(files.tensors), dict[Target, _Matrices]()
    for module in files.modules:
        if module.parameter:
            continue
        if module.experts is not None:
            _place_experts(module, tensors[module.a], tensors[module.b], model, found)
        elif module.a:
            a, b = tensors[module.a].float(), tensors[module.b].float() * module.scale
            lengths = tensors[module.magnitude].float()[:, None] if module.magnitude else None
            _place(module, (a, b, lengths), model, found)
        if module.whole:
            weight, bias = tensors[module.whole].float(), tensors[module.bias].float() if module.bias else None
            _place_other(module, weight.T if module.is_transposed else weight, bias, model, found)

    def packed(values: Tensor) -> Tensor:
        rounded = values.to(dtypes[0]).to(dtypes[1])
        return rounded.contiguous() if on_host else model.ops.pack(rounded.contiguous().to(model.rope.device))

    def slice_of(one: _Slice) -> OutputSlice:
        lengths = None if one.lengths is None else one.lengths[:, 0].to(model.rope.device)
        marks = None if lengths is None else Magnitudes.of(lengths, over_ranks=one.over_ranks, dtype=dtypes[1])
        return OutputSlice(one.begin, one.begin + len(one.b), one.first, one.b.shape[1], packed(one.b), marks)

    def other_of(begin: int, weight: Tensor, bias: Tensor | None) -> OtherWeight:
        own = None if bias is None else bias.to(dtypes[0]).to(dtypes[1]).to(model.rope.device)
        return OtherWeight(begin, begin + len(weight), packed(weight), own)

    targets = {
        target: LinearAdapter(
            packed(torch.cat(matrices.a)) if matrices.a else torch.empty(0),
            matrices.rank,
            tuple(map(slice_of, matrices.b)),
            tuple(other_of(*one) for one in matrices.others),
        )
        for target, matrices in found.items()
    }
    layers = {target: values for target, values in targets.items() if isinstance(target, Linear)}
    experts = by_layer({target: values for target, values in targets.items() if isinstance(target, ExpertMatrix)})
    measure(layers, model.ops)
    return LoadedAdapter(adapter, layers, *tables_of(files.modules, tensors, model, dtypes), experts)


Values = tuple[Tensor, Tensor, Tensor | None]
"""A [rank, inputs], B [outputs, rank], and of DoRA the lengths [outputs, 1]."""


def _place_experts(module: AdaptedModule, a: Tensor, b: Tensor, model: Decoder, found: dict[Target, _Matrices]) -> None:
    """Gives the experts of this worker their part of one module."""
    places = slices_of(model.spec, model.shard)
    for own, low, high in pairs_of_experts(module, a, b):
        if any(name in places for name in own.weights):
            _place(own, (low.float(), high.float() * module.scale, None), model, found)


def _place(module: AdaptedModule, values: Values, model: Decoder, found: dict[Target, _Matrices]) -> None:
    """Gives the layers of this worker their part of one module."""
    places, known, begin = slices_of(model.spec, model.shard), weights_of(model.spec), 0
    a, b, lengths = values
    firsts: dict[Target, int] = {}  # where A stands in a layer: matrices of a module share it
    for name in module.weights:
        rows = slice(begin, begin + known[name].shape[0])
        begin = rows.stop
        place = places.get(name)
        if place is None or place.begin == place.end:  # another worker's
            continue
        target = _target_of(module, place, model)
        matrices = found.setdefault(target, _Matrices())
        if target not in firsts:
            firsts[target] = matrices.rank
            matrices.a.append(a[:, place.begin : place.end] if place.dim else a)
        own = [_own(one[rows], place) for one in (b, lengths) if one is not None]
        over_ranks = bool(place.dim) and place.end - place.begin < a.shape[1]
        matrices.b.append(_Slice(place.row, firsts[target], own[0], own[1] if own[1:] else None, over_ranks))


def _target_of(module: AdaptedModule, place: WeightSlice, model: Decoder) -> Target:
    stem = place.parameter.removesuffix(".weight")
    if place.expert is not None:
        parent, _, product = stem.rpartition(".")
        experts = model.get_submodule(parent)
        assert isinstance(experts, ExpertLinears)
        return ExpertMatrix(experts, product, place.expert)
    layer = model.get_submodule(stem)
    if type(layer) is not Linear:
        raise ModelFilesError(
            f"{module.name} is no plain linear layer of {model.spec.architecture}; no adapter changes it"
        )
    return layer


def _place_other(
    module: AdaptedModule, weight: Tensor, bias: Tensor | None, model: Decoder, found: dict[Target, _Matrices]
) -> None:
    """Gives the layers of this worker their part of a module that was trained whole."""
    places, known, begin = slices_of(model.spec, model.shard), weights_of(model.spec), 0
    for name in module.weights:
        rows = slice(begin, begin + known[name].shape[0])
        begin = rows.stop
        place = places.get(name)
        if place is None or place.begin == place.end:  # another worker's
            continue
        own, of_bias = _own(weight[rows], place), places.get(f"{name.removesuffix('.weight')}.bias")
        own = own[:, place.begin : place.end] if place.dim else own
        own_bias: Tensor | None = None
        if bias is not None and of_bias is not None and of_bias.end > of_bias.begin:  # else the first rank adds it
            own_bias = _own(bias[rows][:, None], of_bias)[:, 0]
        matrices = found.setdefault(_target_of(module, place, model), _Matrices())
        matrices.others.append((place.row, own, own_bias))


def _own(rows: Tensor, place: WeightSlice) -> Tensor:
    """Of what stands beside a weight's rows, that of the rows which this worker has, in their order."""
    own = rows if place.dim else rows[place.begin : place.end]
    return (to_halves(own, *place.neighbours) if place.neighbours[1] else own) * place.times
