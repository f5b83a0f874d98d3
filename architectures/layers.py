"""Changes of some of a model's layers, for families whose layers differ, and the sizes of mixtures of experts as files give them.
`which` names layers from the first on; empty: all of them.
"""

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer, positive, shown
from meshlm.architectures.family import GGUFMetadata, MetadataError
from meshlm.protocol.layers import MLP, Layers, LayerSpec, MoESpec, StateSpec
from meshlm.protocol.model import ModelSpec


def with_attention(spec: ModelSpec, which: Iterable[bool] = (), **changes: Any) -> ModelSpec:
    """The model of whose layers those that attend do so with these changes."""

    def changed(layer: LayerSpec) -> LayerSpec:
        attention = layer.attention
        return layer if attention is None else replace(layer, attention=replace(attention, **changes))

    return spec.with_layers(changed, which)


def all_but_each(every: int, count: int) -> tuple[bool, ...]:
    """Whether each of so many layers is none of the last of `every`."""
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
    return [layer.cache_of is not None for layer in spec.layers]


GGUF_KEYS = frozenset(("expert_count", "expert_used_count", "expert_feed_forward_length"))


def layers_with_experts(config: dict[str, Any]) -> tuple[bool, ...]:
    """Reads decoder_sparse_step and mlp_only_layers of a config.json; which layers have experts. ValueError."""
    step, layers = positive(config, "decoder_sparse_step", 1), integer(config, "num_hidden_layers")
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise ValueError(f"mlp_only_layers must be a list of numbers of layers, got {shown(dense)}")
    found = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    if not any(found):
        raise ValueError("decoder_sparse_step and mlp_only_layers leave no layer with experts")
    return found


def moe_spec(config: dict[str, Any], num_experts: str = "num_experts", wide: str = "moe_intermediate_size") -> MoESpec:
    """The sizes of a config.json. num_experts, wide: the family's keys for them. KeyError, ValueError."""
    count = integer(config, num_experts)
    return checked(
        MoESpec(
            num_experts=count,
            num_experts_per_tok=integer(config, "num_experts_per_tok"),
            moe_intermediate_size=integer(config, wide),
            norm_topk_prob=boolean(config, "norm_topk_prob"),
        ),
        num_experts,
    )


def checked(moe: MoESpec, num_experts: str = "num_experts") -> MoESpec:
    """ValueError names the key that cannot be so."""
    if moe.num_experts < 1:
        raise ValueError(f"{num_experts} is {moe.num_experts}; it must be positive")
    if not 0 < moe.num_experts_per_tok <= moe.num_experts:
        raise ValueError(
            f"num_experts_per_tok is {moe.num_experts_per_tok}; it must be positive, and {num_experts} is {moe.num_experts}"
        )
    if moe.moe_intermediate_size < 1 or moe.shared_intermediate_size < 0:
        raise ValueError("moe_intermediate_size must be positive")
    if moe.num_experts % moe.n_group or not 0 < moe.topk_group <= moe.n_group:
        raise ValueError(f"n_group {moe.n_group} and topk_group {moe.topk_group} do not fit {moe.num_experts} experts")
    if moe.num_experts_per_tok > moe.topk_group * (moe.num_experts // moe.n_group):
        raise ValueError(f"topk_group {moe.topk_group} has fewer experts than num_experts_per_tok")
    return moe


def gguf_moe(metadata: GGUFMetadata, **family: Any) -> MoESpec:
    """The sizes of a .gguf file. family: what llama.cpp knows of it and the file does not say. MetadataError."""
    get = metadata.get
    try:
        return checked(
            MoESpec(
                num_experts=int(get("expert_count")),
                num_experts_per_tok=int(get("expert_used_count")),
                moe_intermediate_size=int(get("expert_feed_forward_length", get("feed_forward_length"))),
                **family,
            )
        )
    except ValueError as error:
        raise MetadataError(str(error)) from None
