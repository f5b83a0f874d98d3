"""What is read of HunYuan-A13B's config.json, which says by layer what is the same in all."""

from pathlib import Path
from typing import Any

import pytest

from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.model_config import parse_config

A13B: dict[str, Any] = {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "model_type": "hunyuan_v1_moe",
    "attention_head_dim": 128,
    "cla_share_factor": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": [3072, 3072],
    "moe_topk": [8, 8],
    "norm_type": "rms",
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "num_shared_expert": [1, 1],
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cla": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
    "vocab_size": 128167,
}


def test_numbers_of_each_layer_are_one_number() -> None:
    spec, notes = parse_config(A13B, Path("m"))
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.num_experts_per_tok, spec.moe.moe_intermediate_size) == (64, 8, 3072)
    assert (spec.moe.shared_intermediate_size, spec.moe.norm_topk_prob, spec.qk_norm) == (3072, True, True)
    assert not notes
    two, _ = parse_config(A13B | {"num_shared_expert": 2}, Path("m"))
    assert two.moe is not None
    assert two.moe.shared_intermediate_size == 6144


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"moe_topk": [8, 4]}, r"moe_topk must be an integer, got \[8, 4\]"),
        ({"num_shared_expert": [1, 2]}, "num_shared_expert must be an integer"),
        ({"moe_intermediate_size": [3072, 1024]}, "moe_intermediate_size must be an integer"),
        ({"moe_intermediate_size": 1024}, "moe_intermediate_size other than intermediate_size is not supported"),
        ({"num_experts": [64, 64], "moe_topk": 8}, "num_experts must be an integer"),
        ({"moe_topk": 65}, "num_experts_per_tok is 65"),
        ({"use_cla": True}, "use_cla True is not supported"),
    ],
)
def test_what_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelFilesError, match=says):
        parse_config(A13B | change, Path("m"))
