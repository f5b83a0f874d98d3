"""What config.json says of DeepSeek-V2 and V3, and what of it is refused by name."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from meshlm.architectures.registry import weights_of
from meshlm.protocol.kv import Latent, make_groups, spec_of_layers
from meshlm.protocol.layers import MLASpec
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.model_config import parse_config

LITE = Path(__file__).parents[2] / "benchmarks" / "models" / "deepseek-v2-lite" / "config.json"
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
    "ep_size": 1,
    "seq_aux": True,
    "aux_loss_alpha": 0.001,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


def lite(**changes: object) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(LITE.read_text())
    return {**config, **changes}


def test_v2_lite() -> None:
    spec, notes = parse_config(lite(), Path("m"))
    assert not notes
    assert spec.mla == MLASpec(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert (spec.head_dim, spec.num_key_value_heads, spec.rotary_dim) == (192, 1, 64)
    assert spec.moe is not None
    assert (spec.moe.shared_intermediate_size, spec.moe.n_group, spec.moe.group_score) == (2816, 1, "max")
    assert [layer.experts is not None for layer in spec.layers][:3] == [False, True, True]
    assert sum(prod(weight.shape) for weight in weights_of(spec).values()) == 15_706_484_224
    (group,) = make_groups(spec_of_layers(spec), 16, 576 * 2, 4096)
    assert group.spec == Latent(512, 64)
    assert group.page_bytes == 27 * 16 * 1152


def test_kimi_k2_is_a_v3() -> None:
    assert parse_config(V3 | {"model_type": "kimi_k2"}, Path("m")) == parse_config(V3, Path("m"))
    with pytest.raises(ModelFilesError, match="model_type 'kimi_k3' beside architecture DeepseekV3ForCausalLM"):
        parse_config(V3 | {"model_type": "kimi_k3"}, Path("m"))


def test_v3() -> None:
    spec, notes = parse_config(V3, Path("m"))
    assert not notes
    assert spec.mla is not None
    assert spec.mla.q_lora_rank == 1536
    moe = spec.moe
    assert moe is not None
    assert (moe.scoring_func, moe.group_score, moe.correction_bias, moe.norm_topk_prob) == (
        "sigmoid",
        "top2",
        True,
        True,
    )
    assert (moe.num_experts, moe.n_group, moe.topk_group, moe.routed_scaling_factor) == (256, 8, 4, 2.5)
    assert sum(prod(weight.shape) for weight in weights_of(spec).values()) == 671_026_419_200


def test_experts_in_every_second_layer() -> None:
    spec, _ = parse_config(lite(moe_layer_freq=2), Path("m"))
    assert [layer.experts is not None for layer in spec.layers][:5] == [False, False, True, False, True]
    without, _ = parse_config(lite(n_routed_experts=None), Path("m"))
    assert without.moe is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": True}, "attention_bias true is not supported for DeepseekV2ForCausalLM"),
        ({"mlp_bias": True}, "mlp_bias true is not supported"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported for DeepseekV2"),
        ({"norm_topk_prob": True}, "norm_topk_prob true is not supported"),
        ({"rope_interleave": False}, "rope_interleave false is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"num_key_value_heads": 4}, "num_key_value_heads must be num_attention_heads"),
        ({"sliding_window": 4096}, "sliding_window 4096 with these layer_types is not supported"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; it must be even"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be positive"),
        ({"q_lora_rank": -1}, "q_lora_rank is -1; it must be positive"),
        ({"v_head_dim": "wide"}, "v_head_dim must be an integer"),
        ({"moe_layer_freq": 0}, "moe_layer_freq is 0"),
        ({"n_routed_experts": 4}, "num_experts_per_tok is 6"),
        ({"topk_method": "group_limited_greedy", "n_group": 7}, "n_group 7 and topk_group 1 do not fit 64 experts"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers 1 changes what the model computes"),
    ],
)
def test_what_is_not_honoured_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFilesError, match=said):
        parse_config(lite(**changes), Path("m"))


@pytest.mark.parametrize("changes", [{"topk_method": "greedy"}, {"scoring_func": "softmax"}])
def test_v3_chooses_experts_in_one_way(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFilesError, match="is not supported for DeepseekV3ForCausalLM; supported: "):
        parse_config({**V3, **changes}, Path("m"))


V32: dict[str, Any] = {
    **V3,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
}


def test_v32_keeps_a_key_of_its_index_with_each_token() -> None:
    spec, _ = parse_config(V32, Path("m"))
    assert spec.mla is not None
    assert (spec.mla.down, spec.mla.line) == (576, 704)
    (group,) = make_groups(spec_of_layers(spec), 16, spec.mla.line * 2, 4096)
    assert group.spec == Latent(512, 64, 128)
    names = [name for name in weights_of(spec) if name.startswith("model.layers.0.self_attn.indexer.")]
    assert [name.rpartition("indexer.")[2] for name in names] == [
        "wq_b.weight",
        "wk.weight",
        "k_norm.weight",
        "k_norm.bias",
        "weights_proj.weight",
    ]
    kinds = {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * (spec.num_hidden_layers - 3)}
    assert parse_config(V32 | kinds | {"first_k_dense_replace": 5}, Path("m"))[0].moe == spec.moe


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"index_topk": 0}, "index_topk is 0; it must be positive"),
        ({"index_head_dim": 32}, "index_head_dim 32 has no room"),
        ({"q_lora_rank": None}, "q_lora_rank must be given"),
        ({"layer_types": ["full_attention"] * 61}, "layer_types .* is not supported for DeepseekV32ForCausalLM"),
        ({"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types must be dense for the first layers"),
    ],
)
def test_what_v32_refuses(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFilesError, match=said):
        parse_config(V32 | changes, Path("m"))


GLM = V32 | {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_hidden_layers": 6}
NAMED = ["full", "full", "shared", "shared", "full", "shared"]


@pytest.mark.parametrize(
    "changes",
    [
        {"indexer_types": NAMED, "index_topk_freq": 5},
        {"indexer_types": [*NAMED, "full"]},
        {"index_topk_pattern": "FFSSFS"},
        {"index_topk_freq": 3},
        {"index_topk_freq": 3, "index_skip_topk_offset": 2},
    ],
)
def test_layers_that_share_an_index(changes: dict[str, Any]) -> None:
    spec, _ = parse_config(GLM | changes, Path("m"))
    assert spec.mla is not None
    assert spec.mla.index_interleave
    assert [one.mla and one.mla.index_shared for one in spec.attentions] == [False, False, True, True, False, True]
    names = [name for name in weights_of(spec) if name.endswith("indexer.wk.weight")]
    assert [name.split(".")[2] for name in names] == ["0", "1", "4"]


@pytest.mark.parametrize("kind", ["indexed_attention", "deepseek_sparse_attention"])
def test_names_of_sparse_layers(kind: str) -> None:
    assert parse_config(GLM | {"layer_types": [kind] * 6}, Path("m")) == parse_config(GLM, Path("m"))


@pytest.mark.parametrize("changes", [{}, {"indexer_types": ["full"] * 6}, {"index_topk_freq": 1}])
def test_layers_that_all_have_an_index(changes: dict[str, Any]) -> None:
    spec, _ = parse_config(GLM | changes, Path("m"))
    assert [one.mla and one.mla.index_shared for one in spec.attentions] == [False] * 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"indexer_types": ["full", "shared"]}, "must name the kind of each of 6 layers"),
        ({"index_topk_pattern": "FFSSFX"}, "full or shared .F or S., got .*X"),
        ({"indexer_types": ["shared"] * 6}, "the first layer .* is shared, and no index is before it"),
    ],
)
def test_kinds_of_index_that_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFilesError, match=said):
        parse_config(GLM | changes, Path("m"))
