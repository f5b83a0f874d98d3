"""Which layers of a worker's part of a model adapters may change, the matrices that these hold, and how an adapter lies in a slot of a
GPU's memory (kernels/lora/layout.py)."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from meshlm.architectures.registry import family_of, weights_of
from meshlm.kernels.lora.kernel import OUTPUTS
from meshlm.kernels.lora.layout import LINE, LayerPlaces, Packed, Pair, num_values, pack, padded
from meshlm.kernels.lora.self_test import LayerShape
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.adapter_files import Limits
from meshlm.runtime.model_files.adapter_modules import is_adaptable
from meshlm.workers.layers.elements import Linear
from meshlm.workers.lora.weights import LinearAdapter, LoadedAdapter
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights.slices import slices_of


class SlotLayout:
    """`layers`: the places of their matrices. num_values: the most that an adapter takes."""

    def __init__(self, model: Decoder, limits: Limits, device: torch.device) -> None:
        found: dict[Linear, list[tuple[int, int]]] = {}
        self.max_rank, size = limits.max_rank, 0
        for layer, begin, end, is_taken in _matrices(model, limits.target_modules):
            found.setdefault(layer, []).append((begin, end))
            size += num_values(limits.max_rank, layer.inputs, end - begin) if is_taken else 0
        self.num_values, self.num_matrices = max(LINE, padded(size)), sum(map(len, found.values()))
        self.layers: Mapping[Linear, LayerPlaces] = {}
        first, layers = 0, {}
        for layer, slices in found.items():
            place = layers[layer] = LayerPlaces(first, sorted(slices), device)
            for outputs in OUTPUTS:
                place.blocks(outputs)  # nothing comes from the host while a graph is captured
            first += len(slices)
        self.layers = layers

    def shapes(self) -> list[LayerShape]:
        """The sizes of all layers, each once."""
        return list({LayerShape(layer.inputs, place.slices): None for layer, place in self.layers.items()})

    def pack(self, loaded: LoadedAdapter, dtype: torch.dtype) -> Packed:
        """ModelFilesError: it changes what no kernel adds to."""
        pairs: dict[int, Pair] = {}
        for layer, adapter in loaded.layers.items():
            place = self.layers.get(layer)
            for which, pair in _pairs(adapter, place.slices if place is not None else ()):
                if place is None or which is None or place.first + which in pairs:
                    raise ModelFilesError(
                        f"{loaded.adapter.path}: it changes outputs of a layer twice, or such as this device adds nothing to"
                    )
                pairs[place.first + which] = pair
        return pack(pairs, self.num_matrices, dtype)


def _pairs(adapter: LinearAdapter, slices: Sequence[tuple[int, int]]) -> Iterator[tuple[int | None, Pair]]:
    """One adapter's pairs in a layer, and which of its matrices each changes; None: none of these."""
    known = {both: nth for nth, both in enumerate(slices)}
    for one in adapter.slices:
        yield known.get((one.begin, one.end)), Pair(adapter.a[one.first : one.first + one.rank], one.b)


def _matrices(model: Decoder, targets: Sequence[str]) -> Iterator[tuple[Linear, int, int, bool]]:
    """Layers, and of each of their matrices the outputs, begin and end, and whether an adapter of these targets may change it."""
    family, known = family_of(model.spec.architecture), weights_of(model.spec)
    assert family is not None
    holders: dict[str, set[str]] = {}  # names of modules that hold a weight of this name, as `qkv_proj` does
    for holder, stems in family.packed.items():
        for stem in stems:
            holders.setdefault(_last(stem), set()).add(_last(holder))
    for name, place in slices_of(model.spec, model.shard).items():
        if not is_adaptable(known[name]) or place.begin == place.end:
            continue
        layer = model.get_submodule(place.parameter.removesuffix(".weight"))
        if type(layer) is not Linear:
            continue
        word = _last(name.removesuffix(".weight"))
        is_taken = not targets or family.rename is not None or not {word, *holders.get(word, ())}.isdisjoint(targets)
        rows = place.shape[0] if place.dim else place.end - place.begin
        yield layer, place.row, place.row + rows, is_taken


def _last(name: str) -> str:
    return name.rpartition(".")[2]
