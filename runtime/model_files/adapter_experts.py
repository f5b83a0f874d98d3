"""Finds the experts that an adapter's tensors change, by the names and shapes of these. No torch. Called by adapter_modules.py.

An adapter has matrices for one expert, by the checkpoint's name (`mlp.experts.3.gate_proj`), or for all of a layer in one tensor, as
peft writes what its target_parameters name: lora_A [experts * rank, inputs], the experts' rows behind one another, and
lora_B [outputs, rank * experts], whose column j * experts + e is of expert e. Where a layer has both gate_up_proj and down_proj, one
of them stands behind `experts` and the other behind `experts.base_layer`; the sizes say which is which. A parameter that transformers
keeps as [experts, inputs, outputs], without saying so to peft, has A and B in one another's place.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from meshlm.architectures.family import Weight
from meshlm.architectures.registry import family_of, weights_of
from meshlm.protocol.model import ModelSpec

_ALL = re.compile(r"(?:model\.)?layers\.(?P<layer>\d+)\.(?:\w+\.)?experts(?:\.base_layer)*")
_NAMES = {"gate_up": ("gate_up_proj", "up_proj"), "down": ("down_proj", "down_proj")}
"""transformers' names of parameters, of experts with a gate and without."""


class StackedExperts(NamedTuple):
    """How a pair of tensors holds the matrices of so many experts."""

    num_experts: int
    is_swapped: bool = False  # A and B are in one another's place
    is_interleaved: bool = False  # outputs of gate and up take turns


class ExpertsOfPair(NamedTuple):
    parameter: str  # by transformers' name
    weights: tuple[str, ...]  # the base's: those of the first expert, of the second, ...
    rank: int
    stacked: StackedExperts


@cache
def _experts_of(spec: ModelSpec) -> Mapping[int, Mapping[str, tuple[Weight, ...]]]:
    """By the number of a layer and the name of a product, the weights of all experts, those of one behind one another."""
    found: dict[int, dict[str, list[Weight]]] = {}
    for weight in weights_of(spec).values():
        if weight.expert is not None and weight.layer is not None and len(weight.shape) == 2:
            product = weight.parameter.split(".")[-2]
            found.setdefault(weight.layer, {}).setdefault(product, []).append(weight)
    return {layer: {name: tuple(own) for name, own in products.items()} for layer, products in found.items()}


def is_of_all(module: str, spec: ModelSpec) -> bool:
    """Whether a module's name is that of all experts of a layer."""
    match = _ALL.fullmatch(module)
    return match is not None and int(match["layer"]) in _experts_of(spec)


class _Product(NamedTuple):
    """One product of all experts of a layer."""

    name: str
    weights: tuple[Weight, ...]
    num_experts: int
    sizes: tuple[int, int]  # inputs and outputs of one expert
    has_gate: bool


def _products(module: str, spec: ModelSpec) -> Iterator[_Product]:
    match = _ALL.fullmatch(module)
    assert match is not None
    products = _experts_of(spec)[int(match["layer"])]
    for name, weights in products.items():
        count = 1 + max(weight.expert or 0 for weight in weights)
        own = weights[: len(weights) // count]
        sizes = own[0].shape[1], sum(weight.shape[0] for weight in own)
        yield _Product(name, weights, count, sizes, len(products["gate_up"]) == 2 * count)


def find_pair(module: str, a: tuple[int, ...], b: tuple[int, ...], spec: ModelSpec) -> ExpertsOfPair | None:
    """What a pair of these shapes changes of a layer's experts (`is_of_all`). None: no parameter of theirs has such sizes, or sizes do
    not tell whether A and B are in one another's place."""
    family = family_of(spec.architecture)
    files = None if family is None else family.experts
    for product in _products(module, spec):
        given, swapped = (a[1], b[0]), product.sizes[::-1]
        may_be_swapped = product.has_gate and given == swapped  # without a gate they may be the other product's
        fits = a[0] == b[1] and a[0] > 0 and a[0] % product.num_experts == 0
        if not fits or not (may_be_swapped or given == product.sizes):
            continue
        if given == swapped == product.sizes and files is not None and not files.interleaved:
            return None
        names = tuple(weight.name for weight in product.weights)
        takes_turns = files is not None and files.interleaved and product.name == "gate_up"
        stacked = StackedExperts(product.num_experts, given != product.sizes, takes_turns)
        return ExpertsOfPair(_NAMES[product.name][not product.has_gate], names, a[0] // product.num_experts, stacked)
    return None


def sizes_of_all(module: str, spec: ModelSpec) -> str:
    """The sizes that a pair may have, in words."""
    return " or ".join(
        f"({product.num_experts} rank, {product.sizes[0]}) and ({product.sizes[1]}, {product.num_experts} rank)"
        for product in _products(module, spec)
    )
