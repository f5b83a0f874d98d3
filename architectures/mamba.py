"""Mamba (Gu and Dao 2023) and Falcon Mamba (TII 2024), which norms what its scan gets: no attention and no MLP."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer, number, positive, words
from meshlm.architectures.dense import dtype_of
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Weight
from meshlm.architectures.mamba2 import CONTEXT, renamed, stateful_gguf
from meshlm.architectures.selective_scan import GGUF_STATE, mamba_gguf, mamba_state, mamba_weights
from meshlm.architectures.weights import PRE_NORMS, transformer_weights
from meshlm.protocol.layers import Layers, LayerSpec
from meshlm.protocol.model import ModelSpec

_NAMES = {
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_dt_rank": "time_step_rank",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
_Norms = Literal["none", "plain"]


def _spec(config: dict[str, Any], architecture: str, norms: _Norms = "none") -> ModelSpec:
    layers, hidden = integer(config, "num_hidden_layers"), integer(config, "hidden_size")
    state = mamba_state(config, norms, _NAMES)
    if (
        config.get("intermediate_size") is not None
    ):  # as with transformers, whatever expand is: Falcon-Mamba-7B's says 16
        state = replace(state, num_heads=positive(config, "intermediate_size"))
    return ModelSpec(
        architecture=architecture,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        layers=Layers.alike(LayerSpec(state=state), layers),
        num_attention_heads=state.num_heads // 2,  # nothing attends; ranks may split the channels, two by two
        max_position_embeddings=integer(config, "max_position_embeddings", CONTEXT),
        rms_norm_eps=number(config.get("layer_norm_epsilon", 1e-5), "layer_norm_epsilon"),
        tie_word_embeddings=boolean(config, "tie_word_embeddings"),
        dtype=dtype_of(config),
    )


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """llama.cpp has one name for both."""
    norms: _Norms = "plain" if metadata.get("ssm.dt_b_c_rms", False) else "none"
    if norms == "plain":
        architecture = _FALCON.architecture
    state = mamba_gguf(metadata, norms)
    return stateful_gguf(metadata, architecture, state, state.num_heads // 2)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    return transformer_weights(spec, PRE_NORMS[:1], state=mamba_weights)


_MAMBA = Family(
    architecture="MambaForCausalLM",
    model_type="mamba",
    spec=_spec,
    weights=_weights,
    keys=frozenset(_NAMES.values())
    | words("""
        layer_norm_epsilon residual_in_fp32 time_step_scale time_step_min time_step_max time_step_init_scheme time_step_floor
        rescale_prenorm_residual use_mambapy use_associative_scan
    """),
    defaults={
        "hidden_size": 768,
        "state_size": 16,
        "conv_kernel": 4,
        "expand": 2,
        "num_hidden_layers": 32,
        "tie_word_embeddings": True,
        "max_position_embeddings": CONTEXT,
    },
    rename=renamed,
    gguf=GGUFFamily("mamba", _gguf, GGUF_STATE | {"ssm.dt_b_c_rms"}),
    compiles=False,
    model="meshlm.workers.models.jamba:Jamba",
)
_FALCON = _MAMBA._replace(
    architecture="FalconMambaForCausalLM",
    model_type="falcon_mamba",
    spec=partial(_spec, norms="plain"),
    gguf=None,
    keys=_MAMBA.keys | words("mixer_rms_eps use_falcon_mambapy"),
)
FAMILIES = (_MAMBA, _FALCON)
