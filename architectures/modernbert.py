"""ModernBERT (Warner et al. 2024): rotated positions, gated MLPs, and layers most of which see a window on both sides."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer, number, shown
from meshlm.architectures.encoder import (
    KEYS,
    classifier,
    encoder_activation,
    encoder_spec,
    head_weights,
    layer_norm_eps,
    norm_weights,
)
from meshlm.architectures.family import Family, Serves, Weight
from meshlm.architectures.layers import with_attention
from meshlm.protocol.model import ModelSpec, RopeSpec

_OWN = frozenset(
    ["norm_eps", "norm_bias", "hidden_activation", "global_rope_theta", "local_rope_theta", "local_attention"]
    + ["global_attn_every_n_layers", "decoder_bias", "classifier_bias", "classifier_activation", "classifier_pooling"]
    + [
        "reference_compile",
        "repad_logits_with_grad",
        "sparse_prediction",
        "sparse_pred_ignore_index",
        "deterministic_flash_attn",
    ]
)


def _thetas(config: dict[str, Any]) -> tuple[float, float]:
    """Gives the RoPE bases of global and of local layers, from keys of their own or by kind of layer."""
    by_kind = config.get("rope_parameters") or {}
    if not isinstance(by_kind, dict) or (foreign := by_kind.keys() - {"full_attention", "sliding_attention"}):
        what = sorted(foreign)[0] if isinstance(by_kind, dict) else shown(by_kind)
        raise ValueError(f"rope_parameters holds {what}; supported: full_attention, sliding_attention")
    if config.get("position_embedding_type") not in (None, "absolute", "rope"):  # whichever it says, positions rotate
        raise ValueError(f"position_embedding_type {shown(config['position_embedding_type'])} is not supported")
    found = []
    for kind, key, default in (
        ("full_attention", "global_rope_theta", 160000.0),
        ("sliding_attention", "local_rope_theta", 10000.0),
    ):
        own = by_kind.get(kind) or {}
        if not isinstance(own, dict) or own.get("rope_type", "default") != "default":
            raise ValueError(f"rope_parameters of {kind} {shown(own)}: only rope_type default is supported")
        found.append(number(own.get("rope_theta", config.get(key) or default), key))
    return found[0], found[1]


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    layers, every = integer(config, "num_hidden_layers"), integer(config, "global_attn_every_n_layers", 3)
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer % max(1, every) else "full_attention" for layer in range(layers)
    ]
    if len(kinds) != layers or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise ValueError(f"layer_types must name the kind of each of {layers} layers, got {shown(kinds)}")
    overall, local = _thetas(config)
    spec = encoder_spec(
        config,
        architecture,
        rms_norm_eps=layer_norm_eps(config, "norm_eps", 1e-5),
        hidden_act=encoder_activation(config, "hidden_activation"),
        attention_bias=boolean(config, "attention_bias"),
        output_bias=boolean(config, "attention_bias"),
        mlp_bias=boolean(config, "mlp_bias"),
        norm_bias=boolean(config, "norm_bias"),
        rope=RopeSpec(rope_theta=overall),
        sliding_rope=RopeSpec(rope_theta=local),
    )
    return with_attention(
        spec,
        (kind == "sliding_attention" for kind in kinds),
        sliding_window=integer(config, "local_attention", 128) // 2,
    )


def _sequence_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    """A product, its function and a norm before the classifier."""
    if (kind := config.get("classifier_pooling")) not in (None, "cls", "mean"):
        raise ValueError(f"classifier_pooling {shown(kind)} is not supported; supported: cls, mean")
    act, bias = encoder_activation(config, "classifier_activation"), boolean(config, "classifier_bias")
    return replace(
        _spec(config, architecture), head=classifier(config, layers=2, bias=(bias, True), act=act, norm=True)
    )


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    hidden, wide = spec.hidden_size, spec.intermediate_size
    yield Weight("embeddings.tok_embeddings.weight", "", "word_embeddings.weight", (spec.vocab_size, hidden))
    yield from norm_weights(spec, "embeddings.norm", "embedding_norm")
    for layer in range(spec.num_hidden_layers):
        for name, parameter, shape, bias in (
            ("attn.Wqkv", "qkv", (3 * hidden, hidden), spec.attention_bias),
            ("attn.Wo", "o", (hidden, hidden), spec.output_bias),
            ("mlp.Wi", "gate_up", (2 * wide, hidden), spec.mlp_bias),
            ("mlp.Wo", "down", (hidden, wide), spec.mlp_bias),
        ):
            yield Weight(f"layers.{layer}.{name}.weight", "", f"{parameter}.weight", shape, layer=layer)
            if bias:
                yield Weight(f"layers.{layer}.{name}.bias", "", f"{parameter}.bias", shape[:1], layer=layer)
        for name in ("attn_norm", "mlp_norm") if layer else ("mlp_norm",):  # the embeddings are normed already
            for weight in norm_weights(spec, f"layers.{layer}.{name}", name.replace("attn", "attention")):
                yield weight._replace(layer=layer)
    yield from norm_weights(spec, "final_norm", "final_norm")
    yield from head_weights(spec, ("head.dense", "classifier"), "head.norm")


def _renamed(name: str) -> str:
    return name.removeprefix("model.")


FAMILY = Family(
    architecture="ModernBertModel",
    model_type="modernbert",
    serves=Serves.VECTORS,
    spec=_spec,
    weights=_weights,
    keys=KEYS | _OWN,
    compiles=False,
    model="meshlm.workers.models.modernbert:ModernBert",
    rename=_renamed,
    unread=r"head\..*|decoder\..*|classifier\..*",
)
FAMILIES = (
    FAMILY,
    FAMILY._replace(architecture="ModernBertForMaskedLM"),
    FAMILY._replace(architecture="ModernBertForSequenceClassification", spec=_sequence_spec, serves=Serves.CLASSES),
    FAMILY._replace(architecture="ModernBertForTokenClassification", spec=_sequence_spec, serves=Serves.TOKEN_CLASSES),
)
