"""Gemma 3n, its text models (Gemma Team 2025): several residuals, embeddings for each layer, layers that share keys and values.
The .gguf files of Gemma 3n: llama.cpp's keys, which give a gate's cut in deviations; some sizes are those of tensors.
"""

from collections.abc import Iterator
from statistics import NormalDist
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer, number, refuse_quantised, shown, words
from meshlm.architectures.dense import dense_gguf
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError, Weight
from meshlm.architectures.gemma import DEFAULTS, KEYS, SANDWICH_NORMS, gemma_spec, per_layer_tables, per_layer_weights
from meshlm.architectures.layers import with_attention, with_shared_caches, with_sparsity
from meshlm.architectures.rope import ropes_by_kind
from meshlm.architectures.weights import attention_weights, decoder_weights, mlp_weights, norm_weights
from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import AltUpSpec, ModelSpec, PerLayerInputSpec, RopeSpec

_LOCAL_THETA = 10_000.0
_TABLE, _LAUREL = "per_layer_token_embd.weight", "blk.0.laurel_l.weight"


def _gguf_spec(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    get, layers = metadata.get, int(metadata.get("block_count"))
    wide = _of_layers(metadata, "feed_forward_length", get("feed_forward_length"), layers)
    if len(set(wide)) != 1:
        raise MetadataError(f"feed_forward_length {shown(wide)} of layers that differ is not supported")
    fields = {**metadata.fields, f"{metadata.kind}.feed_forward_length": wide[0]}
    spec = dense_gguf(metadata._replace(fields=fields), architecture)
    sliding = tuple(
        map(
            bool,
            _of_layers(metadata, "attention.sliding_window_pattern", get("attention.sliding_window_pattern"), layers),
        )
    )
    spec = with_attention(spec, sliding, sliding_window=int(get("attention.sliding_window")) if any(sliding) else 0)
    key = "attention.shared_kv_layers"
    spec = with_shared_caches(with_sparsity(spec, _gguf_sparsity(metadata, layers)), int(get(key)), key, MetadataError)
    return replace(
        spec, hidden_act="gelu_pytorch_tanh", query_pre_attn_scalar=1.0, qk_norm=True,
        sliding_rope=RopeSpec(rope_theta=float(get("rope.freq_base_swa", _LOCAL_THETA))),
        final_logit_softcapping=float(get("final_logit_softcapping", 0.0)), altup=_gguf_altup(metadata),
    )  # fmt: skip


def _gguf_altup(metadata: GGUFMetadata) -> AltUpSpec:
    get, shapes = metadata.get, metadata.shapes
    for name in (_TABLE, _LAUREL):
        if len(shapes.get(name, ())) != 2:
            raise MetadataError(f"tensor {name} is missing, or no matrix")
    count, active = int(get("altup.num_inputs")), int(get("altup.active_idx"))
    if count < 2 or not 0 <= active < count:
        raise MetadataError(f"altup.num_inputs is {count}, altup.active_idx {active}, which no model can have")
    return AltUpSpec(
        altup_num_inputs=count,
        altup_active_idx=active,
        altup_correct_scale=True,
        laurel_rank=shapes[_LAUREL][0],
        hidden_size_per_layer_input=int(get("embedding_length_per_layer_input")),
        vocab_size_per_layer_input=shapes[_TABLE][0],
    )


def _gguf_sparsity(metadata: GGUFMetadata, layers: int) -> list[float]:
    """By layer: the share of an MLP's gates that is to be zero."""
    scales = _of_layers(metadata, "activation_sparsity_scale", metadata.get("activation_sparsity_scale"), layers)
    return [NormalDist().cdf(scale) for scale in scales]


def _of_layers(metadata: GGUFMetadata, key: str, value: Any, layers: int) -> list[Any]:
    found = value if isinstance(value, list) else [value] * layers
    if len(found) != layers or not all(isinstance(one, int | float) for one in found):
        raise MetadataError(
            f"{metadata.kind}.{key} is {shown(value)}; it must be a number, or one for each of {layers} layers"
        )
    return found


GEMMA3N_GGUF = GGUFFamily(
    "gemma3n",
    _gguf_spec,
    keys=words("""
        attention.sliding_window attention.sliding_window_pattern attention.shared_kv_layers rope.freq_base_swa
        final_logit_softcapping altup.num_inputs altup.active_idx embedding_length_per_layer_input
        activation_sparsity_scale
    """),
)
_EVERY = 5  # of so many layers the last sees all
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_SPARSE, _FIRST_SPARSE, _FEWEST = 0.95, 10, 10  # where the file says nothing, of models with more layers


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    refuse_quantised(config, architecture)
    rope, sliding_rope = ropes_by_kind(
        config, config.get("rope_theta") or _THETA, config.get("rope_local_base_freq") or _LOCAL_THETA
    )
    wide = config["intermediate_size"]
    sizes = set(wide) if isinstance(wide, list) else {wide}
    if len(sizes) != 1:
        raise ValueError(f"intermediate_size {shown(wide)} of layers that differ is not supported for {architecture}")
    spec = gemma_spec(
        {**config, "intermediate_size": sizes.pop(), "query_pre_attn_scalar": 1}, architecture, _EVERY, rope
    )
    spec = with_sparsity(spec, _sparsity(config, spec.num_hidden_layers))
    spec = with_shared_caches(spec, integer(config, "num_kv_shared_layers"), "num_kv_shared_layers")
    return replace(spec, qk_norm=True, sliding_rope=sliding_rope, altup=_altup(config))


def _sparsity(config: dict[str, Any], layers: int) -> list[float]:
    """By layer: the share of an MLP's gates that is to be zero. ValueError."""
    pattern = config.get("activation_sparsity_pattern")
    if pattern is None:
        sparse = _FIRST_SPARSE if layers > _FEWEST else 0
        pattern = [_SPARSE] * sparse + [0.0] * (layers - sparse)
    pattern = pattern if isinstance(pattern, list) else [pattern] * layers
    if len(pattern) != layers or any(not 0 <= number(one, "activation_sparsity_pattern") < 1 for one in pattern):
        raise ValueError(
            f"activation_sparsity_pattern must have a number below 1 for each of {layers} layers, got {shown(pattern)}"
        )
    return list(map(float, pattern))


def _altup(config: dict[str, Any]) -> AltUpSpec:
    names = "altup_num_inputs altup_active_idx laurel_rank hidden_size_per_layer_input vocab_size_per_layer_input"
    sizes = {name: integer(config, name) for name in names.split()}
    few = next((name for name, size in sizes.items() if size < (name != "altup_active_idx")), None)
    if few is not None or sizes["altup_active_idx"] >= sizes["altup_num_inputs"]:
        few = few or "altup_active_idx"
        raise ValueError(f"{few} is {sizes[few]}, which no model can have")
    return AltUpSpec(altup_correct_scale=boolean(config, "altup_correct_scale"), **sizes)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    altup, hidden = spec.altup, spec.hidden_size
    assert altup is not None
    count, own = altup.altup_num_inputs, altup.hidden_size_per_layer_input

    def in_layer(layer: LayerSpec) -> Iterator[Weight]:
        shares = layer.cache_of is not None
        for weight in (*attention_weights(spec, layer), *norm_weights(spec, layer, SANDWICH_NORMS)):
            if not (shares and weight.name.startswith(("self_attn.k", "self_attn.v"))):
                yield weight
        yield from mlp_weights(spec, layer.intermediate_size)
        for name, gguf, parameter, shape in (
            ("altup.correct_output_scale", "altup_correct_scale", "correct_output_scale", (hidden,)),
            ("altup.correction_coefs.weight", "altup_correct_coef", "correction_coefs", (count, count)),
            ("altup.prediction_coefs.weight", "altup_predict_coef", "prediction_coefs", (count**2, count)),
            ("altup.modality_router.weight", "altup_router", "modality_router", (count, hidden)),
            ("altup.router_norm.weight", "altup_router_norm", "router_norm.weight", (hidden,)),
            ("laurel.linear_left.weight", "laurel_l", "laurel_left.weight", (altup.laurel_rank, hidden)),
            ("laurel.linear_right.weight", "laurel_r", "laurel_right.weight", (hidden, altup.laurel_rank)),
            ("laurel.post_laurel_norm.weight", "laurel_post_norm", "laurel_norm.weight", (hidden,)),
        ):
            yield Weight(name, f"{gguf}.weight", parameter, shape)
        yield from per_layer_weights(own, hidden)

    yield from decoder_weights(spec, in_layer)
    sizes = PerLayerInputSpec(
        hidden_size_per_layer_input=own, vocab_size_per_layer_input=altup.vocab_size_per_layer_input
    )
    yield from per_layer_tables(sizes, spec.num_hidden_layers, hidden)
    square, others = (hidden, hidden), range(count - 1)
    for name, gguf, parameter, shape in (
        *((f"altup_projections.{n}", "altup_proj", f"projections.{n}", square) for n in others),
        *((f"altup_unembed_projections.{n}", "altup_unembd_proj", f"unembed.{n}", square) for n in others),
    ):
        yield Weight(f"model.{name}.weight", f"{gguf}.weight", f"{parameter}.weight", shape)


FAMILY = Family(
    architecture="Gemma3nForCausalLM",
    model_type="gemma3n_text",
    spec=_spec,
    weights=_weights,
    keys=(KEYS - {"attn_logit_softcapping", "query_pre_attn_scalar"})
    | {
        "rope_local_base_freq",
        "vocab_size_per_layer_input",
        "hidden_size_per_layer_input",
        "altup_active_idx",
        "altup_coef_clip",  # while it is trained
        "altup_correct_scale",
        "altup_lr_multiplier",
        "altup_num_inputs",
        "num_kv_shared_layers",
        "laurel_rank",
        "activation_sparsity_pattern",
    },
    defaults=DEFAULTS
    | {"num_key_value_heads": 2, "max_position_embeddings": 32768, "sliding_window": 512}
    | {"num_kv_shared_layers": 15}
    | {"intermediate_size": 16384, "final_logit_softcapping": 30.0, "vocab_size_per_layer_input": 262144}
    | {"hidden_size_per_layer_input": 256, "altup_active_idx": 0, "altup_correct_scale": True}
    | {"altup_num_inputs": 4, "laurel_rank": 64},
    gguf=GEMMA3N_GGUF,
    float16=False,
    model="meshlm.workers.models.gemma3n:Gemma3n",
    rename=str,
    # Of layers that share, where files have them.
    unread=r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight|blk\.\d+\.attn_(k|v|k_norm)\.weight",
)
