"""Mamba-2 (Dao and Gu 2024): no attention and no MLP, so a sequence of any length has one state.
Mamba (Gu and Dao 2023) and Falcon Mamba (TII 2024), which norms what its scan gets: no attention and no MLP.
"""

import re
from functools import partial
from typing import Any, Literal

from msgspec.structs import replace

from meshlm.architectures import states
from meshlm.architectures.config_values import boolean, integer, number, pairs, positive, words
from meshlm.architectures.dense import dtype_of
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError
from meshlm.architectures.weights import PRE_NORMS, transformer_weights
from meshlm.protocol.layers import Layers, LayerSpec, StateSpec
from meshlm.protocol.model import ModelSpec

_MAMBA2_NAMES = pairs("""
    mamba_n_heads=num_heads mamba_d_head=head_dim mamba_n_groups=n_groups mamba_d_state=state_size
    mamba_d_conv=conv_kernel mamba_expand=expand mamba_chunk_size=chunk_size mamba_conv_bias=use_conv_bias
    mamba_proj_bias=use_bias
""")
CONTEXT = 1 << 20  # no length is too long for a state; files name none


def _stateful_spec(config: dict[str, Any], architecture: str, state: StateSpec, heads: int) -> ModelSpec:
    """The spec of a model whose layers have states alone. heads: that ranks may split; nothing attends."""
    return ModelSpec(
        architecture=architecture, vocab_size=integer(config, "vocab_size"), hidden_size=integer(config, "hidden_size"),
        layers=Layers.alike(LayerSpec(state=state), integer(config, "num_hidden_layers")), num_attention_heads=heads,
        max_position_embeddings=integer(config, "max_position_embeddings", CONTEXT),
        rms_norm_eps=number(config.get("layer_norm_epsilon", 1e-5), "layer_norm_epsilon"),
        tie_word_embeddings=boolean(config, "tie_word_embeddings"), dtype=dtype_of(config),
    )  # fmt: skip


def _mamba2_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    state = states.mamba2_state(config, _MAMBA2_NAMES)
    return _stateful_spec(config, architecture, state, state.num_heads)


def stateful_gguf(metadata: GGUFMetadata, architecture: str, state: StateSpec, heads: int) -> ModelSpec:
    """The spec of a .gguf file whose layers have states alone. heads: that ranks may split. MetadataError."""
    get, table = metadata.get, metadata.shapes.get("token_embd.weight", ())
    layers, hidden = int(get("block_count")), int(get("embedding_length"))
    if len(table) != 2 or layers > len(metadata.shapes):
        raise MetadataError("tensor token_embd.weight is missing, or no matrix, or there are fewer tensors than layers")
    return ModelSpec(
        architecture=architecture, vocab_size=table[0], hidden_size=hidden,
        layers=Layers.alike(LayerSpec(state=state), layers), num_attention_heads=heads,
        max_position_embeddings=int(get("context_length", CONTEXT)),
        rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        tie_word_embeddings="output.weight" not in metadata.shapes, dtype="float32",
    )  # fmt: skip


def _mamba2_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    state = states.mamba2_gguf(metadata)
    return stateful_gguf(metadata, architecture, state, state.num_heads)


def renamed(name: str) -> str:
    name = name.replace("backbone.embeddings.", "model.embed_tokens.").replace("backbone.norm_f.", "model.norm.")
    name = re.sub(r"^backbone\.layers\.(\d+)\.norm\.", r"model.layers.\1.input_layernorm.", name)
    return re.sub(r"^backbone\.layers\.(\d+)\.mixer\.", r"model.layers.\1.mamba.", name)


MAMBA2 = Family(
    architecture="Mamba2ForCausalLM",
    model_type="mamba2",
    spec=_mamba2_spec,
    weights=partial(transformer_weights, norms=PRE_NORMS[:1], state=states.mamba2_weights),
    keys=frozenset(_MAMBA2_NAMES.values())
    | words(
        "layer_norm_epsilon time_step_limit time_step_rank time_step_min time_step_max "
        "time_step_floor residual_in_fp32 rescale_prenorm_residual"
    ),
    defaults={"num_heads": 128, "head_dim": 64, "num_hidden_layers": 64, "max_position_embeddings": CONTEXT}
    | {"n_groups": 8, "state_size": 128, "expand": 2, "hidden_size": 4096},
    packed=states.PACKED,
    rename=renamed,
    gguf=GGUFFamily("mamba2", _mamba2_gguf, states.GGUF_STATE, packed=states.GGUF_PACKED),
    model=states.MODEL,
)
_MAMBA_NAMES = pairs("""
    mamba_d_state=state_size mamba_d_conv=conv_kernel mamba_expand=expand mamba_dt_rank=time_step_rank
    mamba_conv_bias=use_conv_bias mamba_proj_bias=use_bias
""")
_Norms = Literal["none", "plain"]


def _mamba_spec(config: dict[str, Any], architecture: str, norms: _Norms = "none") -> ModelSpec:
    state = states.mamba_state(config, norms, _MAMBA_NAMES)
    # as with transformers, whatever expand is: Falcon-Mamba-7B's says 16
    if config.get("intermediate_size") is not None:
        state = replace(state, num_heads=positive(config, "intermediate_size"))
    return _stateful_spec(config, architecture, state, state.num_heads // 2)  # channels, two by two


def _mamba_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """llama.cpp has one name for both."""
    norms: _Norms = "plain" if metadata.get("ssm.dt_b_c_rms", False) else "none"
    if norms == "plain":
        architecture = _FALCON.architecture
    state = states.mamba_gguf(metadata, norms)
    return stateful_gguf(metadata, architecture, state, state.num_heads // 2)


_MAMBA = Family(
    architecture="MambaForCausalLM",
    model_type="mamba",
    spec=_mamba_spec,
    weights=partial(transformer_weights, norms=PRE_NORMS[:1], state=states.mamba_weights),
    keys=frozenset(_MAMBA_NAMES.values())
    | words("""
        layer_norm_epsilon residual_in_fp32 time_step_scale time_step_min time_step_max time_step_init_scheme time_step_floor
        rescale_prenorm_residual use_mambapy use_associative_scan
    """),
    defaults={"num_hidden_layers": 32, "max_position_embeddings": CONTEXT}
    | {"hidden_size": 768, "state_size": 16, "conv_kernel": 4, "expand": 2, "tie_word_embeddings": True},
    rename=renamed,
    gguf=GGUFFamily("mamba", _mamba_gguf, states.GGUF_MAMBA_STATE | {"ssm.dt_b_c_rms"}),
    model="meshlm.workers.models.hybrid:Jamba",
)
_FALCON = _MAMBA._replace(
    architecture="FalconMambaForCausalLM",
    model_type="falcon_mamba",
    spec=partial(_mamba_spec, norms="plain"),
    gguf=None,
    keys=_MAMBA.keys | words("mixer_rms_eps use_falcon_mambapy"),
)
FAMILIES = (MAMBA2, _MAMBA, _FALCON)
