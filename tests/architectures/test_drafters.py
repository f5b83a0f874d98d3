"""What drafters are that read a target's states."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from meshlm.architectures.drafters import is_own, nextn_spec
from meshlm.architectures.family import Family, Serves
from meshlm.architectures.registry import architectures, families, family_of, weights_of
from meshlm.protocol.layers import LayerSpec, MLASpec
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.model_files.model_config import parse_config

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
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


def v3(**changes: Any) -> tuple[ModelSpec, Family]:
    spec, _ = parse_config({**V3, **changes}, Path("m"))
    family = family_of(spec.architecture)
    assert family is not None
    return spec, family


def test_the_layer_behind_deepseeks_last() -> None:
    target, family = v3()
    spec = nextn_spec(target, family)
    assert list(spec.layers) == [target.layers[60]]
    names = weights_of(spec)
    assert names.keys() > {
        f"model.layers.61.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    }
    assert all(name.startswith("model.layers.61.") for name in names)
    assert names["model.layers.61.mlp.experts.255.down_proj.weight"].layer == 0
    assert names["model.layers.61.eh_proj.weight"].shape == (7168, 14336)
    own = {name for name in names if is_own(name, spec)}
    assert own == set(names)


@pytest.mark.parametrize(
    "name",
    [
        *("model.layers.0.enorm.weight", "model.layers.6.enorm.weight", "model.layers.610.enorm.weight"),
        *("lm_head.weight", "model.norm.weight", "layers.61.embed_tokens.weight"),
        "model.layers.61.shared_head.head.weight",
    ],
)
def test_tensors_of_the_target_are_not_its_own(name: str) -> None:
    assert not is_own(name, nextn_spec(*v3()))


def test_what_cannot_draft_is_said() -> None:
    with pytest.raises(ValueError, match=r"num_nextn_predict_layers: the checkpoint of DeepseekV3ForCausalLM has none"):
        nextn_spec(*v3(num_nextn_predict_layers=0))
    with pytest.raises(ValueError, match="has 2, of which each drafts a token"):
        nextn_spec(*v3(num_nextn_predict_layers=2))
    target, _ = v3()
    with pytest.raises(ValueError, match="DeepseekV3ForCausalLM has no layers that draft"):
        nextn_spec(target, families()["LlamaForCausalLM"])


def test_an_index_of_another_layer_is_none_of_its_own() -> None:
    """GLM-5: the last layer may attend to what an earlier one has chosen."""
    target, family = v3()
    attention = target.layers[60].attention
    assert attention is not None
    shared = MLASpec(
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, index_topk=4, index_shared=True
    )
    layers = target.with_layers(lambda one: replace(one, attention=replace(attention, mla=shared))).layers
    drafter = nextn_spec(replace(target, layers=layers), family).layers[0]
    assert isinstance(drafter, LayerSpec)
    assert drafter.attention is not None
    assert drafter.attention.mla == replace(shared, index_shared=False)


def test_no_drafter_is_a_model_to_serve() -> None:
    with_drafters = [name for name, family in families().items() if family.nextn]
    assert with_drafters
    for name in with_drafters:
        found = family_of(f"{name}NextN")
        assert found is not None
        assert (found.serves, f"{name}NextN" in architectures()) == (Serves.DRAFTS, False)
    assert family_of("NoneNextN") is family_of("LlamaForCausalLMNextN") is None
