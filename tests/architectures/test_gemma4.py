"""Configurations of Gemma 4: what transformers takes missing keys for, both forms of unequal heads, and what cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
from model_folders import resolve_model
from tiny_models import sliding

from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ModelFilesError

CONFIG: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 12,
}
SPARSE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
BY_LAYER = {str(layer): {"head_dim": 128, "num_key_value_heads": 2} for layer in (5, 11)}


def spec_of(folder: Path, changes: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return resolve_model(str(folder), load_format="dummy").spec


def test_missing_keys_are_what_transformers_takes_them_for(tmp_path: Path) -> None:
    import transformers

    spec = spec_of(tmp_path, {})
    theirs = transformers.Gemma4TextConfig(**{k: v for k, v in CONFIG.items() if k != "architectures"})
    assert ["sliding_attention" if one else "full_attention" for one in sliding(spec)] == theirs.layer_types
    for layer in range(12):
        own, other = spec.attentions[layer], theirs.per_layer_config[layer]
        assert (own.num_key_value_heads, own.head_dim) == (other.num_key_value_heads, other.head_dim)
    for name in ("sliding_window", "num_attention_heads", "max_position_embeddings"):
        assert getattr(spec, name) == getattr(theirs, name)
    assert sum(layer.cache_of is not None for layer in spec.layers) == theirs.num_kv_shared_layers
    assert spec.final_logit_softcapping == 0
    assert spec.per_layer_input is not None
    assert spec.per_layer_input.hidden_size_per_layer_input == theirs.hidden_size_per_layer_input
    assert spec.tie_word_embeddings == theirs.tie_word_embeddings
    ropes = {"full_attention": spec.rope, "sliding_attention": spec.sliding_rope}
    for kind, rope in ropes.items():
        assert rope is not None
        assert (rope.rope_type, rope.rope_theta) == tuple(
            theirs.rope_parameters[kind][k] for k in ("rope_type", "rope_theta")
        )
    assert spec.rope.partial_rotary_factor == 0.25
    assert spec.rotary_dim == 512


@pytest.mark.parametrize(
    ("changes", "heads"),
    [
        ({"global_head_dim": 128}, (4, 128, False)),
        ({"num_global_key_value_heads": 2}, (4, 512, False)),  # read with attention_k_eq_v alone
        ({"num_global_key_value_heads": 2, "attention_k_eq_v": True}, (2, 512, True)),
        ({"attention_k_eq_v": True, "per_layer_config": BY_LAYER}, (2, 128, True)),
        ({"per_layer_config": BY_LAYER}, (2, 128, False)),
    ],
)
def test_heads_of_layers_that_see_all(changes: dict[str, Any], heads: tuple[int, int, bool], tmp_path: Path) -> None:
    full = {one for one in spec_of(tmp_path, changes).attentions if not one.slides}
    assert {(one.num_key_value_heads, one.head_dim, one.keys_are_values) for one in full} == {heads}


def test_layers_may_all_be_alike(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, {"global_head_dim": 256, "hidden_size_per_layer_input": 0})
    assert spec.per_layer_input is None
    assert len({(one.num_key_value_heads, one.head_dim, one.keys_are_values) for one in spec.attentions}) == 1


def test_experts_stand_beside_the_mlp(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, SPARSE)
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.num_experts_per_tok, spec.moe.norm_topk_prob) == (4, 2, True)
    assert spec.wide_sizes() == (128, 8), "ranks split both"


def test_the_last_layer_sees_all(tmp_path: Path) -> None:
    assert not spec_of(tmp_path, {"layer_types": ["sliding_attention"] * 12}).attentions[11].slides


def test_the_text_model_of_one_that_also_sees(tmp_path: Path) -> None:
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "tie_word_embeddings": True}
    inner = {key: value for key, value in CONFIG.items() if key != "architectures"}
    (tmp_path / "config.json").write_text(
        json.dumps(outer | {"text_config": inner | {"use_bidirectional_attention": "vision"}, "image_token_id": 258880})
    )
    spec = resolve_model(str(tmp_path), load_format="dummy").spec
    assert spec.architecture == "Gemma4ForCausalLM"
    assert spec.text_part


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({"num_kv_shared_layers": 12}, "num_kv_shared_layers 12 of 12 leaves a layer"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers 7 of 12 leaves a layer"),
        ({"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input 99 no less than vocab_size 100"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input -1 must be positive"),
        ({"per_layer_config": {"5": {"head_dim": 128}}}, "must be the same for all layers that see all"),
        ({"per_layer_config": {**BY_LAYER, "0": {"head_dim": 8}}}, "say nothing of the others"),
        ({"per_layer_config": {**BY_LAYER, "12": {"head_dim": 8}}}, "holds '12', which is no layer's number"),
        ({"per_layer_config": {"5": {"sliding_window": 8}}}, "per_layer_config holds sliding_window of layer 5"),
        ({"per_layer_config": [1]}, "per_layer_config must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "says nothing of sliding_attention layers"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"global_head_dim": 2048}, "head_dim 2048 of which 2048 are rotated"),
        (SPARSE | {"top_k_experts": 5}, "num_experts_per_tok is 5"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 changes what the model computes"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=said):
        spec_of(tmp_path, changes)
