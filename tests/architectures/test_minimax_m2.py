"""What is read of MiniMax-M2's config.json, as the hub has it."""

from pathlib import Path
from typing import Any

import pytest

from meshlm.architectures.registry import family_of
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.model_config import parse_config

M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "attn_type_list": [1, 1],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def test_the_hubs_config() -> None:
    spec, notes = parse_config(M2, Path("m"))
    assert not notes
    assert (spec.rotary_dim, spec.rope.rope_theta) == (64, 5e6)
    assert spec.moe is not None
    assert (spec.moe.scoring_func, spec.moe.correction_bias, spec.moe.norm_topk_prob) == ("sigmoid", True, True)
    family = family_of("MiniMaxM2ForCausalLM")
    assert family is not None
    assert family.rename is not None
    name = "model.layers.3.block_sparse_moe.gate.e_score_correction_bias"
    assert family.rename("model.layers.3.block_sparse_moe.e_score_correction_bias") == name
    assert family.rename(name) == name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"qk_norm_type": "per_head"}, "qk_norm_type 'per_head' is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"use_routing_bias": False}, "use_routing_bias False is not supported"),
        ({"attn_type_list": [1, 0]}, "attn_type_list holds layers"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size 64"),
        ({"layernorm_mlp_beta": 2.0}, "layernorm_mlp_beta 2.0 is not supported"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFilesError, match=said):
        parse_config(M2 | changes, Path("m"))
