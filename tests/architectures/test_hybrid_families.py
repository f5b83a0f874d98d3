"""Families with recurrent states: configurations as they are published, and what is refused by the name of field and layer."""

from pathlib import Path
from typing import Any

import pytest
from model_folders import CONFIG

from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.model_config import parse_config

STATES = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}


def made(name: str, **keys: Any) -> ModelSpec:
    """The spec of a config.json of the class `name`ForCausalLM with four layers."""
    config = {key: value for key, value in CONFIG.items() if key not in ("model_type", "intermediate_size")}
    wide = {} if "Mamba" in name else {"intermediate_size": 64}
    sizes = {
        "architectures": [f"{name}ForCausalLM"],
        "num_hidden_layers": 4,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 4,
    }
    return parse_config(config | wide | sizes | keys, Path("m"))[0]


def test_lfm2_computes_the_width_of_its_mlp() -> None:
    """As LFM2-1.2B has it: 12,288 in the file are 8,192."""
    keys = {"block_ff_dim": 12288, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0}
    spec = made("Lfm2", full_attn_idxs=[2], block_multiple_of=256, **keys)
    assert (spec.intermediate_size, spec.tie_word_embeddings, spec.qk_norm) == (8192, True, True)
    assert [layer.attention is not None for layer in spec.layers] == [False, False, True, False]
    assert spec.state is not None
    assert (spec.state.conv_dim, spec.state.conv_kernel) == (64, 3)
    assert made("Lfm2", block_auto_adjust_ff_dim=False).intermediate_size == 64


def test_falcon_h1_has_both_in_each_layer() -> None:
    spec = made("FalconH1", **STATES, mamba_d_ssm=128, embedding_multiplier=4.0, lm_head_multiplier=0.5)
    assert all(layer.attention and layer.state for layer in spec.layers)
    assert spec.logit_scale == 0.5
    assert (
        made("FalconH1", **STATES, mamba_d_ssm=128, tie_word_embeddings=True, embedding_multiplier=4.0).logit_scale
        == 0.25
    )


def test_the_width_that_a_mamba_names_counts() -> None:
    """As Falcon-Mamba-7B has it: `expand` would say 65,536 channels."""
    spec = made("FalconMamba", hidden_size=4096, intermediate_size=8192, expand=16, time_step_rank=256)
    assert spec.state is not None
    assert (spec.state.inner, spec.state.conv_dim, spec.state.time_step_rank) == (8192, 8192, 256)


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("Lfm2", {"conv_L_cache": 1}, "conv_L_cache is 1; it must be two or more"),
        ("Lfm2", {"layer_types": ["conv", "mamba", "conv", "conv"]}, "layer_types holds 'mamba' for layer 1"),
        ("Lfm2", {"full_attn_idxs": [4]}, r"full_attn_idxs must be numbers of layers below 4, got \[4\]"),
        ("Lfm2", {"block_multiple_of": 0}, "block_multiple_of is 0; it must be positive"),
        ("FalconH1", {**STATES, "mamba_d_ssm": 128, "mlp_multipliers": [1.0]}, "mlp_multipliers must be 2 numbers"),
        (
            "FalconH1",
            {**STATES, "mamba_d_ssm": 128, "ssm_multipliers": [1, 1, 1, 1, -1]},
            "ssm_multipliers must be a number that is not negative",
        ),
        ("FalconH1", {**STATES, "mamba_d_ssm": 100}, "mamba_d_ssm 100 is not mamba_n_heads 8 heads of 16"),
        ("FalconH1", {**STATES, "mamba_d_ssm": 128, "projectors_bias": True}, "projectors_bias is not supported"),
        (
            "FalconH1",
            {**STATES, "mamba_d_ssm": 128, "embedding_multiplier": 0},
            "embedding_multiplier is 0; it must be",
        ),
        (
            "FalconH1",
            {**STATES, "mamba_d_ssm": 128, "mamba_n_groups": 3},
            "mamba_n_heads 8 is no multiple of mamba_n_groups 3",
        ),
        ("Mamba", {"time_step_rank": 0}, "time_step_rank is 0; it must be positive"),
        ("Mamba", {"intermediate_size": 0}, "intermediate_size is 0; it must be positive"),
        ("Mamba", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        (
            "Bamba",
            {**STATES, "attn_layer_indices": [7]},
            r"attn_layer_indices must be numbers of layers below 4, got \[7\]",
        ),
        (
            "Bamba",
            {**STATES, "time_step_limit": ["inf", 1.0]},
            "time_step_limit begins with 'inf'; it must be a number",
        ),
        ("NemotronH", {"hybrid_override_pattern": "MX*-"}, "hybrid_override_pattern holds 'X' for layer 1"),
        ("Qwen2", {"layer_types": ["full_attention"] * 3 + ["mamba"]}, "layer_types holds 'mamba' for layer 3"),
    ],
)
def test_what_is_refused(name: str, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFilesError, match=said) as error:
        made(name, **keys)
    assert "\n" not in str(error.value)


def test_a_window_larger_than_the_context_is_none() -> None:
    """Nobody can outgrow it: the layer sees all, as with transformers."""
    assert made("Mistral", sliding_window=8192).sliding_window == 0
    assert made("Mistral", sliding_window=100).sliding_window == 100
    with pytest.raises(ModelFilesError, match="sliding_window is -1; it must be positive, or null"):
        made("Mistral", sliding_window=-1)
