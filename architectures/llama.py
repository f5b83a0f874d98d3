"""Llama (Touvron et al. 2023; Grattafiori et al. 2024).
Helium (Kyutai 2025): a Llama that turns neighbours.
Seed-OSS (ByteDance Seed 2025): a Llama whose output projection may have a bias of its own.
SmolLM3 (Bakouch et al. 2025): a Llama of which every fourth layer has no positions.
AFM (Arcee AI 2025): a Llama whose MLP has no gate, but a squared ReLU.
CWM (Meta FAIR 2025): a Llama of which the first of every four layers sees all and the others slide.
Apertus (Swiss AI 2025): a Llama with norms of its query and key heads, and an MLP without a gate whose function is learned (xIELU).
Numbers of that function are tensors of a checkpoint; a .gguf file has them in its metadata.
Mistral (Jiang et al. 2023): a Llama whose layers may all slide. llama.cpp calls it llama.
Ministral (Mistral AI 2024): Mistral of which some layers slide and the others see all.
Ministral 3 and its like (Mistral AI 2025): Mistral with YaRN, whose queries grow with their position, as some of Llama 4's do.
Mixtral (Jiang et al. 2024): Mistral with experts in each layer, whose weights are a softmax over the chosen ones.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from meshlm.architectures import config_values, weights
from meshlm.architectures.dense import dense_gguf, dense_spec, full_spec, one_window, sliding_layers, windowed_spec
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError, Weight
from meshlm.architectures.layers import GGUF_KEYS, gguf_moe, moe_spec, with_attention, with_experts
from meshlm.architectures.weights import ExpertNames, transformer_weights
from meshlm.protocol.layers import MLP, Layers, LayerSpec
from meshlm.protocol.model import ModelSpec

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    spec=full_spec,
    weights=weights.transformer_weights,
    gguf=GGUFFamily("llama", dense_gguf, interleaved_heads=True),
)


def _helium_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    config_values.refuse_quantised(config, architecture, "heads rotate neighbours")
    return replace(full_spec(config, architecture), output_bias=False)


HELIUM = Family(
    architecture="HeliumForCausalLM",
    model_type="helium",
    spec=_helium_spec,
    weights=lambda spec: weights.rotating_neighbours(spec, weights.transformer_weights(spec)),
    defaults={"head_dim": 128, "num_key_value_heads": 20, "rope_theta": 100000.0, "max_position_embeddings": 4096}
    | {"rms_norm_eps": 1e-8},
)


def _seed_oss_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    return replace(full_spec(config, architecture), output_bias=config_values.boolean(config, "attention_out_bias"))


SEED_OSS = Family(
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    spec=_seed_oss_spec,
    weights=lambda spec: weights.transformer_weights(spec, weights.POST_ATTENTION_NORMS),
    keys=frozenset(("attention_out_bias",)),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "max_position_embeddings": 524288},
    gguf=GGUFFamily("seed_oss", dense_gguf),
)
_EVERY = 4  # of so many layers the last has no positions


def _smollm3_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    if config_values.boolean(config, "use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise ValueError(f"use_sliding_window and sliding layers are not supported for {architecture}")
    spec = dense_spec(config, architecture)
    return with_attention(spec, without_positions(config, spec.num_hidden_layers), rotates=False)


def without_positions(config: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """The layers that rotate nothing; the file says 1 of those that do. ValueError."""
    given = config.get("no_rope_layers")
    if given is None:
        every = config_values.positive(config, "no_rope_layer_interval", _EVERY)
        return tuple((layer + 1) % every == 0 for layer in range(layers))
    if not isinstance(given, list) or len(given) != layers or any(one not in (0, 1) for one in given):
        raise ValueError(f"no_rope_layers must be 0 or 1 for each of {layers} layers, got {config_values.shown(given)}")
    return tuple(not one for one in given)


def _smollm3_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec = dense_gguf(metadata, architecture)
    return with_attention(spec, without_positions({}, spec.num_hidden_layers), rotates=False)


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    spec=_smollm3_spec,
    weights=weights.transformer_weights,
    keys=frozenset(("no_rope_layers", "no_rope_layer_interval")),
    defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    gguf=GGUFFamily("smollm3", _smollm3_gguf, interleaved_heads=True),
)
NUMBERS = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
"""The parameters of xIELU (Huang and Schlag 2024), and the shapes of their tensors."""
_NORMS: weights.Norms = (
    ("attention_layernorm", "attn_norm", "input_norm"),
    ("feedforward_layernorm", "ffn_norm", "post_norm"),
)
_ROPE = {"rope_type": "llama3", "rope_theta": 12e6, "original_max_position_embeddings": 8192} | {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _apertus_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    if config.get("hidden_act", "xielu") != "xielu":
        raise ValueError(
            f"hidden_act {config_values.shown(config['hidden_act'])} is not supported for {architecture}; supported: xielu"
        )
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = {**config, "rope_parameters": _ROPE}
    spec = dense_spec({**config, "hidden_act": "silu", "mlp_bias": False}, architecture)
    return replace(spec, hidden_act="xielu", qk_norm=True)


def _apertus_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec, get = dense_gguf(metadata, architecture), metadata.fields.get
    columns = [get(f"xielu.{name}") for name in NUMBERS]
    for name, column in zip(NUMBERS, columns, strict=True):
        if not isinstance(column, list) or len(column) != spec.num_hidden_layers:
            raise MetadataError(
                f"metadata xielu.{name} is {config_values.shown(column)}; it must be a number for each layer"
            )
    numbers = tuple(tuple(map(float, row)) for row in zip(*columns, strict=True))
    records = (
        replace(layer, mlp=MLP(intermediate_size=layer.intermediate_size, xielu=row))
        for layer, row in zip(spec.layers, numbers, strict=True)
    )
    return replace(spec, hidden_act="xielu", qk_norm=True, layers=Layers.from_records(records))


_RELU2 = "relu2"


def _arcee_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    config_values.only_these(config, {"hidden_act": _RELU2}, architecture)
    return replace(full_spec({**config, "hidden_act": "silu"}, architecture), hidden_act=_RELU2)


def _ungated_weights(spec: ModelSpec) -> Iterator[Weight]:
    def in_layer(layer: LayerSpec) -> Iterator[Weight]:
        yield from weights.attention_weights(spec, layer)
        yield from weights.ungated_weights(spec, layer.intermediate_size)
        yield from weights.norm_weights(spec, layer)

    return weights.decoder_weights(spec, in_layer)


ARCEE = Family(
    architecture="ArceeForCausalLM",
    model_type="arcee",
    spec=_arcee_spec,
    weights=_ungated_weights,
    defaults={"hidden_act": _RELU2, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    gguf=GGUFFamily("arcee", partial(dense_gguf, hidden_act=_RELU2), interleaved_heads=True),
    model="meshlm.workers.models.llama_variants:Arcee",
)
_CWM_EVERY = 4  # of so many layers the first sees all
_CWM_ROPE = _ROPE | {"rope_theta": 1e6, "factor": 16.0}


def _cwm_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = {**config, "rope_parameters": _CWM_ROPE}
    if config.get("layer_types") is None:
        count = config_values.positive(config, "num_hidden_layers")
        kinds = [f"{'sliding' if layer % _CWM_EVERY else 'full'}_attention" for layer in range(count)]
        config = {**config, "layer_types": kinds}
    window, sliding = sliding_layers(config, _CWM_EVERY)
    return with_attention(dense_spec(config, architecture), sliding, sliding_window=window)


CWM = Family(
    architecture="CwmForCausalLM",
    model_type="cwm",
    spec=_cwm_spec,
    weights=weights.transformer_weights,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
    | {"sliding_window": 8192, "max_position_embeddings": 131072},
)


def _apertus_weights(spec: ModelSpec) -> Iterator[Weight]:
    def in_layer(layer: LayerSpec) -> Iterator[Weight]:
        yield from weights.attention_weights(spec, layer)
        yield from weights.ungated_weights(spec, layer.intermediate_size)
        yield from weights.norm_weights(spec, layer, _NORMS)
        for name, shape in NUMBERS.items() if layer.mlp is not None and not layer.mlp.xielu else ():
            yield Weight(f"mlp.act_fn.{name}", f"xielu.{name}", f"mlp.{name}", shape, quantises=False)

    return weights.decoder_weights(spec, in_layer)


APERTUS = Family(
    architecture="ApertusForCausalLM",
    model_type="apertus",
    spec=_apertus_spec,
    weights=_apertus_weights,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 12e6, "max_position_embeddings": 65536},
    gguf=GGUFFamily("apertus", _apertus_gguf, frozenset(f"xielu.{name}" for name in NUMBERS)),
    model="meshlm.workers.models.llama_variants:Apertus",
)
MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    spec=windowed_spec,
    weights=transformer_weights,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)


def _ministral_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    layers = config["num_hidden_layers"]
    # all, unless the file names them
    window, sliding = sliding_layers(config, layers + 1 if type(layers) is int else 1)
    return with_attention(dense_spec(config, architecture), sliding, sliding_window=window)


MINISTRAL = Family(
    architecture="MinistralForCausalLM",
    model_type="ministral",
    spec=_ministral_spec,
    weights=transformer_weights,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
)
_BETA, _CONTEXT = "llama_4_scaling_beta", "max_position_embeddings"
_MISTRAL_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "original_max_position_embeddings": 16384} | {
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    _BETA: 0.1,
}


def _ministral3_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    given = ((config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})) or _MISTRAL_ROPE
    plain = {key: value for key, value in given.items() if key not in (_BETA, _CONTEXT)}
    spec = dense_spec({**config, "rope_scaling": None, "rope_parameters": plain}, architecture)
    window = one_window(config, spec, slides=True)
    spec = with_attention(replace(spec, max_position_embeddings=int(config[_CONTEXT])), sliding_window=window)
    missing = ValueError(f"{_BETA} needs original_max_position_embeddings (rope_parameters)")
    return _growing(spec, config_values.number(given.get(_BETA) or 0.0, _BETA), missing)


def _growing(spec: ModelSpec, beta: float, missing: ValueError) -> ModelSpec:
    """The spec whose queries grow with their position, where beta is not 0. missing: raised where no context is known."""
    floor = spec.rope.original_max_position_embeddings
    if beta and floor < 1:
        raise missing
    return replace(spec, attn_temperature=(beta, float(floor))) if beta else spec


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """Newer files of Mistral Small are of this kind too, without YaRN and with queries that do not grow."""
    spec, get = dense_gguf(metadata, architecture), metadata.get
    if float(get("rope.scaling.yarn_log_multiplier", 0.0)):  # rotation is not multiplied then
        spec = replace(spec, rope=replace(spec.rope, attention_factor=1.0))
    missing = MetadataError(f"metadata {metadata.kind}.rope.scaling.original_context_length is missing")
    return _growing(spec, float(get("attention.temperature_scale", 0.0)), missing)


MINISTRAL3 = Family(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    spec=_ministral3_spec,
    weights=transformer_weights,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144},
    gguf=GGUFFamily(
        "mistral3",
        _gguf,
        frozenset(("rope.scaling.yarn_log_multiplier", "attention.temperature_scale")),
        interleaved_heads=True,
    ),
    model="meshlm.workers.models.llama_variants:Ministral3",
)
MIXTRAL_NAMES = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts.{}", "w1", "w3", "w2")


def _mixtral_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    moe = replace(moe_spec(config, "num_local_experts", "intermediate_size"), norm_topk_prob=True)
    return with_experts(windowed_spec(config, architecture), moe)


def _mixtral_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    return with_experts(dense_gguf(metadata, architecture), gguf_moe(metadata, norm_topk_prob=True))


MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    spec=_mixtral_spec,
    weights=lambda spec: transformer_weights(spec, experts=MIXTRAL_NAMES),
    keys=frozenset(("num_local_experts", "num_experts_per_tok", "router_jitter_noise")),
    defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5}
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    gguf=GGUFFamily("llama", _mixtral_gguf, GGUF_KEYS, experts=True, interleaved_heads=True),
    compiles=False,
)
FAMILIES = (LLAMA, HELIUM, SEED_OSS, SMOLLM3, ARCEE, CWM, APERTUS, MISTRAL, MINISTRAL, MINISTRAL3, MIXTRAL)
