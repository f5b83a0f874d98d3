"""Falcon-H1 (TII 2025): attention and Mamba-2 beside one another in each layer, over one norm and into one sum; numbers multiply both.

They are multiplied into the weights while these load, so one product makes the inputs of both, and one takes their outputs.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import integer, number, refuse_quantised, shown, words
from meshlm.architectures.dense import dense_gguf, dense_spec
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError, Weight
from meshlm.architectures.granite import MULTIPLIED
from meshlm.architectures.states import GGUF_PACKED, GGUF_STATE, KEYS, PACKED, mamba2_gguf, mamba2_state, mamba2_weights
from meshlm.architectures.weights import attention_weights, decoder_weights, mlp_weights, norm_weights
from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec

_NORMS = (("input_layernorm", "attn_norm", "input_norm"), ("pre_ff_layernorm", "ffn_norm", "post_norm"))
_ONE = words("""
    embedding_multiplier lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier
    ssm_in_multiplier ssm_out_multiplier
""")
_SEVERAL = {"mlp_multipliers": 2, "ssm_multipliers": 5}  # of gate and down; of z, x, B, C and dt
_BIASES = ("attention_bias", "projectors_bias", "mamba_proj_bias", "mlp_bias")


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    refuse_quantised(config, architecture, MULTIPLIED)
    for key in _BIASES:
        if config.get(key):
            raise ValueError(f"{key} is not supported for {architecture}")
    spec = dense_spec(config, architecture)
    inner = config.get("mamba_d_ssm")
    heads = integer(config, "mamba_n_heads")
    if inner is not None:
        each = config.get("mamba_d_head", "auto")
        if heads < 1 or integer(config, "mamba_d_ssm") != heads * (inner // heads if each in (None, "auto") else each):
            raise ValueError(f"mamba_d_ssm {shown(inner)} is not mamba_n_heads {heads} heads of {shown(each)}")
        config = {**config, "mamba_d_head": inner // heads}
    state = replace(
        mamba2_state(config, expands=inner is None),
        gated_norm=bool(config.get("mamba_rms_norm")),
        norm_before_gate=config.get("mamba_norm_before_gate") is not False,
    )
    return replace(
        spec.with_layers(lambda layer: replace(layer, state=state)),
        multipliers=_multipliers(config),
        logit_scale=_logit_scale(config, tied=spec.tie_word_embeddings),
    )


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """A file's weights have been multiplied already."""
    spec = dense_gguf(metadata, architecture)
    if spec.tie_word_embeddings:
        raise MetadataError("tensor output.weight is missing: a file without it has no multiplier of logits")
    state = mamba2_gguf(metadata)
    return replace(
        spec.with_layers(lambda layer: replace(layer, state=state)),
        multipliers=(1.0,) * (len(_ONE) + sum(_SEVERAL.values())),
    )


def _multipliers(config: dict[str, Any]) -> tuple[float, ...]:
    """By name: _ONE in the order of the alphabet, then _SEVERAL. ValueError."""
    found = [_number(config[key], key) for key in sorted(_ONE)]
    for key, count in _SEVERAL.items():
        given = config.get(key) or [1.0] * count
        if not isinstance(given, list | tuple) or len(given) != count:
            raise ValueError(f"{key} must be {count} numbers, got {shown(given)}")
        found += [_number(one, key) for one in given]
    return tuple(found)


def _number(value: Any, key: str) -> float:
    return 1.0 if value is None else number(value, key)


def _logit_scale(config: dict[str, Any], *, tied: bool) -> float:
    embedding, head = (_number(config[key], key) for key in ("embedding_multiplier", "lm_head_multiplier"))
    if not embedding:
        raise ValueError("embedding_multiplier is 0; it must be positive")
    return head / embedding if tied else head


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    assert spec.state is not None
    names = sorted(_ONE)
    of, rest = dict(zip(names, spec.multipliers, strict=False)), spec.multipliers[len(names) :]
    (gate, down), rows = rest[:2], rest[2:]
    attention, states = of["attention_in_multiplier"], of["ssm_in_multiplier"]
    times = {
        "model.embed_tokens.weight": of["embedding_multiplier"],
        "self_attn.q_proj.weight": attention,
        "self_attn.k_proj.weight": attention * of["key_multiplier"],
        "self_attn.v_proj.weight": attention,
        "self_attn.o_proj.weight": of["attention_out_multiplier"],
        "mamba.out_proj.weight": of["ssm_out_multiplier"],
        "feed_forward.gate_proj.weight": gate,
        "feed_forward.down_proj.weight": down,
    }
    times |= {f"mamba.{name}_proj.weight": states * one for name, one in zip("zxbc", rows, strict=False)}
    times["mamba.dt_proj.weight"] = states * rows[4]

    def in_layer(layer: LayerSpec) -> Iterator[Weight]:
        for weight in (*attention_weights(spec, layer), *mamba2_weights(spec)):
            last = weight.parameter == "attention.o.weight"
            yield weight._replace(beside=last, quantises=weight.quantises and not last)
        yield from mlp_weights(spec, layer.intermediate_size, ("feed_forward", "ffn_{}", "mlp"))
        for weight in norm_weights(spec, layer, _NORMS):
            yield weight._replace(gguf=weight.gguf.replace("ffn_norm.weight", "ffn_norm"))

    for weight in decoder_weights(spec, in_layer):
        name = weight.name if weight.layer is None else weight.name.partition(f".{weight.layer}.")[2]
        yield weight._replace(times=times.get(name, 1.0))


def _renamed(name: str) -> str:
    return name.replace("model.final_layernorm.", "model.norm.")


FAMILY = Family(
    architecture="FalconH1ForCausalLM",
    model_type="falcon_h1",
    spec=_spec,
    weights=_weights,
    keys=KEYS
    | _ONE
    | words("""
        mlp_multipliers ssm_multipliers mamba_d_ssm mamba_rms_norm mamba_norm_before_gate mamba_use_mlp projectors_bias
        num_logits_to_keep
    """),
    defaults={
        **dict.fromkeys(_ONE, 1.0),
        "rms_norm_eps": 1e-5,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 8,
    },
    packed=PACKED,
    rename=_renamed,
    gguf=GGUFFamily("falcon-h1", _gguf, GGUF_STATE, packed=GGUF_PACKED),
    compiles=False,
    model="meshlm.workers.models.falcon_h1:FalconH1",
)
