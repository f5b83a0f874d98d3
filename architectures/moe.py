"""What mixtures of experts have in common: their sizes in config.json and .gguf files, and the weights of a layer's experts."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from meshlm.architectures.config_values import boolean, integer, shown
from meshlm.architectures.dense import PRE_NORMS, Norms, attention_weights, decoder_weights, mlp_weights, norm_weights
from meshlm.architectures.family import GGUFMetadata, MetadataError, Split, Weight
from meshlm.protocol.model import ModelSpec, MoESpec

GGUF_KEYS = frozenset(("expert_count", "expert_used_count", "expert_feed_forward_length"))


class ExpertNames(NamedTuple):
    """The names that a family's checkpoints give a layer's experts."""

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"


NAMES = ExpertNames()


def layers_with_experts(config: dict[str, Any]) -> tuple[bool, ...]:
    """Reads decoder_sparse_step and mlp_only_layers of a config.json; empty: all layers have experts. ValueError."""
    step, layers = integer(config, "decoder_sparse_step", 1), integer(config, "num_hidden_layers")
    dense = config.get("mlp_only_layers") or []
    if step < 1:
        raise ValueError(f"decoder_sparse_step is {step}; it must be positive")
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise ValueError(f"mlp_only_layers must be a list of numbers of layers, got {shown(dense)}")
    found = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    if not any(found):
        raise ValueError("decoder_sparse_step and mlp_only_layers leave no layer with experts")
    return () if all(found) else found


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


def moe_weights(spec: ModelSpec, names: ExpertNames = NAMES, norms: Norms = PRE_NORMS) -> Iterator[Weight]:
    """Every tensor of a decoder with experts in some layers and an MLP in the others."""

    def in_layer(layer: int) -> Iterator[Weight]:
        yield from attention_weights(spec)
        yield from expert_weights(spec, names) if spec.has_experts(layer) else mlp_weights(spec, spec.intermediate_size)
        yield from norm_weights(spec, norms)

    return decoder_weights(spec, in_layer)


def expert_weights(spec: ModelSpec, names: ExpertNames = NAMES) -> Iterator[Weight]:
    """A layer's router, experts, and those that every token goes to."""
    moe, hidden = spec.moe, spec.hidden_size
    assert moe is not None
    count, wide = moe.num_experts, moe.moe_intermediate_size
    router = Weight(f"{names.router}.weight", "ffn_gate_inp.weight", "mlp.router.weight", (count, hidden))
    yield router._replace(quantises=False)
    if moe.router_bias:
        yield Weight(f"{names.router}.bias", "ffn_gate_inp.bias", "mlp.router.bias", (count,))
    if moe.correction_bias:
        name, parameter = f"{names.router}.e_score_correction_bias", "mlp.router.correction_bias"
        yield Weight(name, "exp_probs_b.bias", parameter, (count,))
    for expert in range(count):
        stem = names.expert.format(expert)
        for name, gguf, linear, shape, dim in (
            (names.gate, "ffn_gate_exps", "gate_up", (wide, hidden), 0),
            (names.up, "ffn_up_exps", "gate_up", (wide, hidden), 0),
            (names.down, "ffn_down_exps", "down", (hidden, wide), 1),
        ):
            if gguf == "ffn_gate_exps" and not moe.gated:
                continue
            parameter = f"mlp.experts.{linear}.weight"
            yield Weight(f"{stem}.{name}.weight", f"{gguf}.weight", parameter, shape, Split.EXPERT, dim, expert=expert)
            if moe.expert_bias:
                split = Split.FIRST_RANK if linear == "down" else Split.EXPERT
                yield Weight(
                    f"{stem}.{name}.bias", f"{gguf}.bias", f"mlp.experts.{linear}.bias", shape[:1], split, expert=expert
                )
    if moe.shared_intermediate_size:
        yield from mlp_weights(spec, moe.shared_intermediate_size, (names.shared, "ffn_{}_shexp", "mlp.shared"))
    if moe.shared_gate:
        yield Weight(f"{names.shared_gate}.weight", "ffn_gate_inp_shexp.weight", "mlp.shared_gate.weight", (1, hidden))
