"""Dense decoders that differ from Llama: configurations as they are published, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from model_folders import CONFIG
from tiny_models import sliding, unrotated

from meshlm.protocol.model import ModelSpec, RopeSpec
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.model_config import parse_config


def made(name: str, **keys: Any) -> ModelSpec:
    """The spec of a config.json of the class `name`ForCausalLM with four layers."""
    config = {key: value for key, value in CONFIG.items() if key != "model_type"}
    sizes = {"architectures": [f"{name}ForCausalLM"], "num_hidden_layers": 4, "max_position_embeddings": 65536}
    return parse_config(config | sizes | keys, Path("m"))[0]


def test_olmo_3_stretches_the_layers_that_see_all() -> None:
    """As the published files have it; the context counts the stretch already."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2}
    spec = made("Olmo3", rope_theta=500000, rope_scaling=yarn, sliding_window=4096)
    assert (spec.rope.rope_type, spec.rope.factor, spec.rope.rope_theta) == ("yarn", 8.0, 5e5)
    assert spec.sliding_rope == RopeSpec(rope_theta=5e5)
    assert (spec.sliding_window, sliding(spec)) == (4096, (True, True, True, False))
    assert spec.max_position_embeddings == 65536


def test_layers_without_positions() -> None:
    assert unrotated(made("SmolLM3")) == (False, False, False, True)
    assert unrotated(made("SmolLM3", no_rope_layers=[1, 0, 0, 1])) == (False, True, True, False)
    exaone = made("Exaone4", sliding_window=64, sliding_window_pattern=2)
    assert unrotated(exaone) == (False, True, False, True)
    assert sliding(exaone) == (True, False, True, False)
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    named = made("Exaone4", sliding_window=64, sliding_window_pattern="LLLG", layer_types=kinds)
    assert unrotated(named) == (False, False, False, True)
    full = made("Exaone4", sliding_window=None)
    assert (any(unrotated(full)), full.sliding_window) == (False, 0)


def test_an_alpha_stretches_the_base_of_the_rotation_once() -> None:
    """As HunYuan's published files have it."""
    rope = {"type": "dynamic", "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0}
    spec = made("HunYuanDenseV1", rope_scaling=rope, rope_theta=1e4, head_dim=128, use_qk_norm=True, norm_type="rms")
    assert spec.rope.rope_type == "default"
    assert spec.rope.rope_theta == pytest.approx(11158839.9251)
    assert made("HunYuanDenseV1", rope_theta=1e4).rope == RopeSpec(rope_theta=1e4)


def test_phi_3_5_moe_lengthens_all_texts_alike() -> None:
    """As its published file has it: one mscale, whatever the length."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 4096}
    rope = {"type": "longrope", "short_mscale": 1.243, "long_mscale": 1.243, **factors}
    spec = made("PhiMoE", rope_scaling=rope, lm_head_bias=True, sliding_window=65536, num_key_value_heads=2)
    assert (spec.rope.rope_type, spec.rope.attention_factor, spec.sliding_window) == ("longrope", 1.243, 0)
    assert spec.moe is not None
    assert spec.moe.sparse_mixer == 0.01


def test_apertus_rotates_as_its_own_code_where_a_file_says_nothing() -> None:
    spec = made("Apertus")
    assert (spec.rope.rope_type, spec.rope.factor, spec.rope.rope_theta) == ("llama3", 8.0, 12e6)


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("Olmo2", {"sliding_window": 64}, "sliding_window 64 with these layer_types is not supported"),
        ("Olmo2", {"clip_qkv": 8.0}, "clip_qkv 8.0 changes what the model computes"),
        (
            "Olmo3",
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 4},
            "sliding_window must be positive",
        ),
        ("Olmo3", {"rope_parameters": {"rope_theta": 1.0}}, "rope_parameters holds rope_theta"),
        ("SmolLM3", {"use_sliding_window": True}, "use_sliding_window and sliding layers are not supported"),
        ("SmolLM3", {"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers must be 0 or 1 for each of 4 layers"),
        ("SmolLM3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0; it must be positive"),
        ("Exaone4", {"sliding_window": 64, "sliding_window_pattern": "LLLG"}, "'LLLG' without layer_types"),
        ("Cohere", {"use_qk_norm": True}, "use_qk_norm True changes what the model computes"),
        ("Cohere", {"logit_scale": -1.0}, "logit_scale must be a number that is not negative"),
        ("Cohere2", {"use_parallel_block": False}, "use_parallel_block False is not supported"),
        ("Cohere2", {"layer_switch": 3}, "sliding_window_pattern 4 with layer_switch 3"),
        ("Glm", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported for Glm"),
        ("Glm4", {"sliding_window": 64}, "sliding_window 64 with these layer_types is not supported"),
        (
            "Granite",
            {"logits_scaling": 0},
            "logits_scaling, residual_multiplier and attention_multiplier must be positive",
        ),
        (
            "Granite",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config is not supported for Granite",
        ),
        ("Dots1", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ("Ernie4_5_Moe", {"moe_norm_min": 0.5}, "moe_norm_min 0.5 is not supported"),
        ("Ernie4_5_Moe", {"moe_layer_interval": 0}, "moe_layer_interval is 0; it must be positive"),
        ("Glm4Moe", {"use_sliding_window": True, "sliding_window": 64}, "sliding_window 64 with these layer_types"),
        ("SeedOss", {"residual_multiplier": 2.0}, "residual_multiplier 2.0 changes what the model computes"),
        ("StableLm", {"qk_layernorm": True}, "qk_layernorm True changes what the model computes"),
        ("Phi", {"qk_layernorm": True}, "qk_layernorm True changes what the model computes"),
        ("OPT", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm true is not supported"),
        ("OPT", {"enable_bias": False}, "enable_bias false is not supported"),
        ("GPTNeoX", {"num_key_value_heads": 1}, "num_key_value_heads 1 is not supported for GPTNeoXForCausalLM"),
        ("GPTNeoX", {"hidden_act": "tanh"}, "hidden_act 'tanh' is not supported; supported: silu"),
        ("Mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi False is not supported; supported: True"),
        ("Mpt", {"attn_config": {"alibi": True, "qk_ln": True}}, "attn_config.qk_ln True is not supported"),
        ("Mpt", {"attn_config": {"alibi": True, "kv_n_heads": 2}}, "attn_config.kv_n_heads 2 is not supported"),
        ("Mpt", {"attn_config": {}}, "attn_config.alibi must be true"),
        ("Mpt", {"no_bias": False}, "no_bias false is not supported"),
        ("Bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm True"),
        ("Falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn 2 is not supported with these keys"),
        ("Falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn false is not supported"),
        ("Helium", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported for Helium"),
        ("HunYuanDenseV1", {"use_qk_norm": False}, "use_qk_norm False is not supported for HunYuanDenseV1ForCausalLM"),
        ("HunYuanDenseV1", {"use_cla": True}, "use_cla True is not supported"),
        ("HunYuanDenseV1", {"rope_scaling": {"type": "dynamic", "alpha": 2.0, "beta": 1}}, "does not know beta"),
        ("HunYuanDenseV1", {"rope_scaling": {"type": "dynamic", "alpha": -2.0}}, "alpha must be a number that is not"),
        ("Apertus", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported for ApertusForCausalLM"),
        ("Phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3; SparseMixer chooses 2"),
        ("Phimoe", {"rope_scaling": {"short_mscale": 1.0, "long_mscale": 1.2}}, "short_mscale 1.0 and long_mscale 1.2"),
        ("Starcoder2", {"norm_type": "rms_norm"}, "norm_type 'rms_norm' is not supported; supported: layer_norm"),
    ],
)
def test_what_is_refused(name: str, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFilesError, match=said):
        made(name, **keys)
