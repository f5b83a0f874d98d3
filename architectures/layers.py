"""Changes of some of a model's layers, for families whose layers differ. `which` names them from the first on; empty: all of them."""

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from meshlm.protocol.layers import MLP, Layers, LayerSpec, MoESpec, StateSpec
from meshlm.protocol.model import ModelSpec


def with_attention(spec: ModelSpec, which: Iterable[bool] = (), **changes: Any) -> ModelSpec:
    """The model of whose layers those that attend do so with these changes."""

    def changed(layer: LayerSpec) -> LayerSpec:
        attention = layer.attention
        return layer if attention is None else replace(layer, attention=replace(attention, **changes))

    return spec.with_layers(changed, which)


def all_but_each(every: int, count: int) -> tuple[bool, ...]:
    """Of so many layers, all but the last of each `every`."""
    return tuple((layer + 1) % every > 0 for layer in range(count))


def rotating_where_sliding(spec: ModelSpec) -> ModelSpec:
    """The model whose layers have no positions where they see all tokens before."""
    return with_attention(spec, [not one.slides for one in spec.attentions], rotates=False)


def with_mlps(spec: ModelSpec, which: Iterable[bool] = (), **changes: Any) -> ModelSpec:
    """The model of whose layers those with an MLP have one with these changes."""

    def changed(layer: LayerSpec) -> LayerSpec:
        return layer if layer.mlp is None else replace(layer, mlp=replace(layer.mlp, **changes))

    return spec.with_layers(changed, which)


def with_sparsity(spec: ModelSpec, shares: Iterable[float]) -> ModelSpec:
    """The model whose MLPs have these shares of their gates, by layer, at zero."""
    pairs = zip(spec.layers, shares, strict=True)
    records = (
        replace(layer, mlp=MLP(intermediate_size=layer.intermediate_size, sparsity=share)) for layer, share in pairs
    )
    return replace(spec, layers=Layers.from_records(records))


def with_experts(spec: ModelSpec, experts: MoESpec | None, which: Iterable[bool] = ()) -> ModelSpec:
    """The model with these experts in the place of MLPs; None: with MLPs alone."""
    return spec if experts is None else spec.with_layers(lambda one: replace(one, mlp=None, experts=experts), which)


def with_states(spec: ModelSpec, state: StateSpec, which: Iterable[bool] = ()) -> ModelSpec:
    """The model with such a state in the place of attention."""
    return spec.with_layers(lambda one: replace(one, attention=None, state=state), which)


def with_shared_caches(spec: ModelSpec, count: int, key: str, error: type[ValueError] = ValueError) -> ModelSpec:
    """The model whose last `count` layers attend to what the last layer of their kind before them keeps. `error` names the key."""
    records, first = list(spec.layers), spec.num_hidden_layers - count
    last = {
        attends.attention.slides: number for number, attends in enumerate(records[: max(first, 0)]) if attends.attention
    }
    for number in range(first, len(records)) if 0 <= count < len(records) else (-1,):
        attention = records[number].attention
        if number < 0 or attention is None or attention.slides not in last:
            raise error(
                f"{key} {count} of {len(records)} leaves a layer without one to share with, which is an earlier one of its kind"
            )
        records[number] = replace(records[number], cache_of=last[attention.slides])
    return replace(spec, layers=Layers.from_records(records))


def sharing(spec: ModelSpec) -> list[bool]:
    """Which layers attend to keys and values of another."""
    return [layer.cache_of is not None for layer in spec.layers]
