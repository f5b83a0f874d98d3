"""The .gguf files of models with recurrent states, written as llama.cpp does, are the models of the folders they were made of."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_model
from model_folders import resolve_model
from msgspec.structs import asdict, replace
from safetensors import safe_open
from served_engines import made

from meshlm.architectures.registry import weights_of
from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ModelFilesError
from meshlm.workers.weights.sources import sources

_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_SSM = {"conv_kernel": 4, "inner_size": 96, "state_size": 16, "time_step_rank": 6, "group_count": 2}
_SSM = {f"ssm.{name}": size for name, size in _SSM.items()}
_SCALES = {"embedding_multiplier": 3.0, "logits_scaling": 1.5, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
_GRANITE: dict[str, Any] = {
    **_SCALES,
    **_MAMBA2,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "position_embedding_type": "nope",
    "shared_intermediate_size": 40,
}
_GRANITE_KEYS: dict[str, Any] = {
    **_SSM,
    "embedding_scale": 3.0,
    "logit_scale": 1.5,
    "residual_scale": 0.4,
    "attention.scale": 0.2,
    "rope.scaling.finetuned": False,
    "expert_shared_feed_forward_length": 40,
}
_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
_MAMBA = {"state_size": 16, "time_step_rank": 5, "intermediate_size": 96}
_MAMBA_KEYS = {"ssm.conv_kernel": 4, "ssm.inner_size": 96, "ssm.state_size": 16, "ssm.time_step_rank": 5}
_FALCON = {
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.8,
    "mlp_multipliers": [0.9, 1.1],
    "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 0.7],
}
_NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "head_dim": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
    "moe_shared_expert_intermediate_size": 60,
    "routed_scaling_factor": 1.5,
}
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 8,
    "linear_key_head_dim": 8,
}
_DELTA_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
    "shared_expert_intermediate_size": 60,
}
_DELTA_KEYS: dict[str, Any] = {
    **_SSM,
    "ssm.inner_size": 48,
    "ssm.state_size": 8,
    "full_attention_interval": 4,
    "rope.dimension_count": 4,
}
_SECTIONS = {"rope.dimension_sections": [11, 11, 10, 0], "attention.recurrent_layers": [True, True, True, False]}
_DELTA_MOE = {
    "expert_count": 6,
    "expert_used_count": 2,
    "expert_feed_forward_length": 36,
    "expert_shared_feed_forward_length": 60,
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "lfm2": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_multiple_of": 8},
        {"shortconv.l_cache": 3},
    ),
    "lfm2moe": (
        "Lfm2MoeConfig",
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1, "num_experts": 6}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 36},
        {"shortconv.l_cache": 3, "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 36}
        | {"leading_dense_block_count": 1, "expert_gating_func": 2},
    ),
    "mamba": ("MambaConfig", _MAMBA, _MAMBA_KEYS),
    "falcon-mamba": ("FalconMambaConfig", _MAMBA, _MAMBA_KEYS | {"ssm.dt_b_c_rms": True}),
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 16, "conv_kernel": 4},
        _SSM,
    ),
    "jamba": (
        "JambaConfig",
        {"mamba_d_state": 16, "mamba_dt_rank": 5, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4},
        _MAMBA_KEYS | {"expert_count": 4, "expert_used_count": 2},
    ),
    "granitehybrid": (
        "GraniteMoeHybridConfig",
        _GRANITE | _EXPERTS,
        _GRANITE_KEYS | {"expert_count": 6, "expert_used_count": 2},
    ),
    "granitehybrid-dense": (
        "GraniteMoeHybridConfig",
        _GRANITE | {"num_local_experts": 0, "num_experts_per_tok": 0},
        _GRANITE_KEYS | {"expert_count": 0, "expert_used_count": 0},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        _NEMOTRON | {"layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"]},
        _SSM | {"feed_forward_length": [0, 0, 80, 0]},
    ),
    "nemotron_h_moe": (
        "NemotronHConfig",
        _NEMOTRON | {"layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention"]},
        {
            **_SSM,
            "feed_forward_length": [0, 0, 36, 0],
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_feed_forward_length": 36,
            "expert_shared_feed_forward_length": 60,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "rope.dimension_count": 8,
        },
    ),
    "qwen3next": ("Qwen3NextConfig", _DELTA | _DELTA_EXPERTS, _DELTA_KEYS | _DELTA_MOE),
    "qwen35": ("Qwen3_5TextConfig", _DELTA | {"mamba_ssm_dtype": "float32"}, _DELTA_KEYS | _SECTIONS),
    "qwen35moe": (
        "Qwen3_5MoeTextConfig",
        _DELTA | _DELTA_EXPERTS | {"mamba_ssm_dtype": "float32"},
        _DELTA_KEYS | _SECTIONS | _DELTA_MOE,
    ),
    "falcon-h1": ("FalconH1Config", _FALCON | _MAMBA2 | {"mamba_d_ssm": 96, "head_dim": 16}, _SSM),
}
NAMES = (
    "model.layers.0.mamba.in_proj.weight",
    "model.layers.0.mamba.conv1d.weight",
)  # tensors that hold several weights
_KINDS = {"falcon-mamba": "mamba", "granitehybrid-dense": "granitehybrid"}
_LAYERS = {"num_hidden_layers": 4, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}


def keys_of(spec: ModelSpec) -> dict[str, Any]:
    """The metadata of heads, norms and rotation."""
    attends = [layer.attention is not None for layer in spec.layers]
    keys: dict[str, Any] = {
        "attention.layer_norm_rms_epsilon": spec.rms_norm_eps,
        "rope.freq_base": spec.rope.rope_theta,
        "attention.head_count_kv": [spec.num_key_value_heads * one for one in attends]
        if spec.state is not None and spec.state.kind != "gated_delta_net" and not all(attends)
        else spec.num_key_value_heads,
    }
    if any(attends) and spec.head_dim * spec.num_attention_heads != spec.hidden_size:
        keys |= {"attention.key_length": spec.head_dim, "attention.value_length": spec.head_dim}
    return keys


def comparable(spec: ModelSpec) -> ModelSpec:
    """Without what files of llama.cpp do not say, or say in float32, and without what they have in their weights."""

    def known(layer: LayerSpec) -> LayerSpec:
        state = layer.state
        return layer if state is None else replace(layer, state=replace(state, chunk_size=0, norm_before_gate=False))

    return replace(
        spec.with_layers(known),
        rms_norm_eps=0.0,
        num_nextn_predict_layers=0,  # of a file, those that it has
        logit_scale=1.0,
        multipliers=tuple(round(one, 5) for one in spec.multipliers) if len(spec.multipliers) == 3 else (),
        query_pre_attn_scalar=round(spec.query_pre_attn_scalar, 4),
    )


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_file_is_the_same_model(case: str, tmp_path: Path) -> None:
    """In shape and in all weights; that such a model computes what transformers' does is held for folders (engine/test_hybrid.py)."""
    (name, extra, keys), kind = CASES[case], _KINDS.get(case, case)
    made((name, {**_LAYERS, **extra}), tmp_path)
    spec, path = resolve_model(str(tmp_path)).spec, tmp_path / "m.gguf"
    with safe_open(next(tmp_path.glob("*.safetensors")), framework="pt") as opened:
        names = list(opened.keys())
    write_model(tmp_path, path, kind, spec, names, keys_of(spec) | keys)
    read = resolve_model(str(path)).spec
    assert asdict(comparable(read)) == asdict(comparable(spec))
    assert read.rms_norm_eps == pytest.approx(spec.rms_norm_eps)
    ours = {name: source.whole() for name, source in sources(path, "gguf", read, torch.device("cpu"), 0)}
    found = weights_of(read)
    folder = {name: source.whole() for name, source in sources(tmp_path, "safetensors", spec, torch.device("cpu"), 0)}
    assert ours.keys() == folder.keys() == found.keys()
    for weight in weights_of(spec).values():
        times = weight.times * (spec.logit_scale / read.logit_scale if weight.name == "lm_head.weight" else 1.0)
        mine = ours[weight.name] * found[weight.name].times
        wanted = folder[weight.name] * times + weight.plus
        torch.testing.assert_close(mine, wanted, msg=f"{weight.name} differs")


def test_what_a_file_of_states_cannot_be(tmp_path: Path) -> None:
    name, extra, keys = CASES["falcon-h1"]
    made((name, {**_LAYERS, **extra}), tmp_path)
    spec, path = resolve_model(str(tmp_path)).spec, tmp_path / "m.gguf"
    tied = replace(spec, tie_word_embeddings=True)
    for keys_here, shape, text in (
        (keys, tied, "output.weight is missing"),
        (keys | {"ssm.group_count": 5}, spec, "96 numbers of 6 heads in 5 groups"),
        (keys | {"ssm.dt_b_c_rms": True}, spec, "ssm.dt_b_c_rms True changes what the model computes"),
    ):
        write_model(tmp_path, path, "falcon-h1", shape, NAMES, keys_of(spec) | keys_here)
        with pytest.raises(ModelFilesError, match=text):
            resolve_model(str(path))
