"""What drafters are that read a target's states."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from meshlm.architectures.drafters import DRAFTERS, fitted, is_own, nextn_spec
from meshlm.architectures.family import Family, Serves
from meshlm.architectures.registry import architectures, families, family_of, weights_of
from meshlm.protocol.layers import LayerSpec, MLASpec
from meshlm.protocol.model import LayerNormSpec, ModelSpec, PerLayerInputSpec, TransformersSpec
from meshlm.runtime.errors import ModelFilesError
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


def test_several_layers_behind_the_last() -> None:
    spec = nextn_spec(*v3(num_nextn_predict_layers=2))
    names = weights_of(spec)
    assert {name.split(".")[2] for name in names} == {"61", "62"}
    assert names["model.layers.62.mlp.experts.255.down_proj.weight"].layer == 1
    assert names["model.layers.62.shared_head.norm.weight"].parameter == "around.1.norm.weight"
    assert all(is_own(name, spec) for name in names)
    assert not is_own("model.layers.63.enorm.weight", spec)
    assert not is_own("model.layers.62.embed_tokens.weight", spec)


NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
}


def test_a_layer_with_names_of_its_own() -> None:
    """Qwen3-Next's, which attends whatever the target's last one does; norms have one more than the files."""
    target, _ = parse_config(NEXT | {"layer_types": ["full_attention"] + ["linear_attention"] * 47}, Path("m"))
    spec = nextn_spec(target, families()["Qwen3NextForCausalLM"])
    assert list(spec.layers) == [target.layers[0]]
    assert spec.state is None
    names = weights_of(spec)
    assert all(name.startswith("mtp.") for name in names)
    own = {name: weight for name, weight in names.items() if weight.layer is None}
    assert {name: weight.parameter for name, weight in own.items()} == {
        "mtp.pre_fc_norm_embedding.weight": "around.0.enorm.weight",
        "mtp.pre_fc_norm_hidden.weight": "around.0.hnorm.weight",
        "mtp.norm.weight": "around.0.norm.weight",
        "mtp.fc.weight": "around.0.eh_proj.weight",
    }
    assert [weight.plus for weight in own.values()] == [1.0, 1.0, 1.0, 0.0]
    assert "mtp.layers.0.mlp.experts.511.down_proj.weight" in names
    assert names["mtp.layers.0.self_attn.q_proj.weight"].shape == (2 * 16 * 256, 2048)
    own_names = ("mtp.fc.weight", "model.mtp.fc.weight", "mtp.layers.1.mlp.gate.weight")
    assert [is_own(name, spec) for name in (*own_names, "lm_head.weight", "mtp.embed_tokens.weight")] == [True] * 3 + [
        False
    ] * 2


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
    family = families()["Qwen3NextForCausalLM"]
    two = replace(v3()[0], architecture="Qwen3NextForCausalLM", num_nextn_predict_layers=2)
    with pytest.raises(ValueError, match="num_nextn_predict_layers 2: of Qwen3NextForCausalLM one layer is read"):
        nextn_spec(two, family)
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


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
EAGLE3: dict[str, Any] = LLAMA | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "max_position_embeddings": 2048,
    "draft_vocab_size": 32000,
}


def spec_of(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return parse_config({**config, **changes}, Path("m"))[0]


@pytest.mark.parametrize("name", ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"])
def test_a_drafter_of_eagle_3(name: str) -> None:
    spec = fitted(spec_of(EAGLE3, architectures=[name]), spec_of(LLAMA), "eagle3")
    assert spec.draft is not None
    assert spec.draft.taps == (2, 16, 29)
    weights = weights_of(spec)
    assert {weight: found.shape for weight, found in weights.items() if found.layer is None} == {
        "fc.weight": (4096, 12288),
        "midlayer.hidden_norm.weight": (4096,),
        "norm.weight": (4096,),
        "lm_head.weight": (32000, 4096),
        "d2t": (32000,),
    }
    assert weights["midlayer.self_attn.k_proj.weight"].shape == (1024, 8192)
    assert weights["midlayer.self_attn.o_proj.weight"].shape == (4096, 4096)
    assert name in DRAFTERS.keys() - set(architectures())


@pytest.mark.parametrize(
    ("keys", "taps"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 28]}}, (2, 15, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 32]}, (2, 16, 32)),
    ],
)
def test_the_layers_whose_states_are_read(keys: dict[str, Any], taps: tuple[int, ...]) -> None:
    found = fitted(spec_of(EAGLE3, **keys), spec_of(LLAMA), "eagle3").draft
    assert found is not None
    assert found.taps == taps


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported for LlamaForCausalLMEagle3; supported: 1"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config .* is not supported"),
        ({"eagle_config": 3}, "eagle_config 3 is not supported"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"must name 3 layers, got \[1, 2\]"),
        ({"draft_vocab_size": 128257}, "draft_vocab_size is 128257; it may be vocab_size, 128256, at most"),
        ({"bias": True}, "bias True changes what the model computes"),
    ],
)
def test_what_no_drafter_can_be(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFilesError, match=said):
        spec_of(EAGLE3, **keys)


@pytest.mark.parametrize(
    ("of_target", "said"),
    [
        ({"vocab_size": 128000}, "for a vocabulary of 128256 tokens, and LlamaForCausalLM has a vocabulary of 128000"),
        ({"hidden_size": 2048}, "it is for states of 4096 numbers, and LlamaForCausalLM has states of 2048 numbers"),
        ({"num_hidden_layers": 3}, r"it reads states behind \(2, 1, 0\) layers, and LlamaForCausalLM has 3"),
    ],
)
def test_a_drafter_of_another_model(of_target: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fitted(spec_of(EAGLE3), spec_of(LLAMA, **of_target), "eagle3")


@pytest.mark.parametrize(
    ("changes", "methods"),
    [
        ({"transformers": TransformersSpec(architecture="A", config="{}")}, ("eagle", "eagle3")),
        ({"layer_norms": LayerNormSpec(embedding_dim=512)}, ("eagle", "eagle3")),
        (
            {"per_layer_input": PerLayerInputSpec(hidden_size_per_layer_input=4, vocab_size_per_layer_input=4)},
            ("eagle3",),
        ),
    ],
)
def test_models_that_give_no_states(changes: dict[str, Any], methods: tuple[str, ...]) -> None:
    for method, name in (("eagle", "LlamaForCausalLMEagle"), ("eagle3", "LlamaForCausalLMEagle3")):
        drafter, target = spec_of(EAGLE3, architectures=[name]), replace(spec_of(LLAMA), **changes)
        if method in methods:
            with pytest.raises(ValueError, match="LlamaForCausalLM does not give the states that it reads"):
                fitted(drafter, target, method)
        else:
            assert fitted(drafter, target, method).draft == drafter.draft


def test_a_model_is_no_drafter_of_states() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM reads no states of another model"):
        fitted(spec_of(LLAMA), spec_of(LLAMA), "eagle3")
    with pytest.raises(ValueError, match="LlamaForCausalLMEagle3 drafts by the method eagle3"):
        fitted(spec_of(EAGLE3), spec_of(LLAMA), "eagle")


@pytest.mark.parametrize(("keys", "bias"), [({}, True), ({"bias": True}, True), ({"bias": False}, False)])
@pytest.mark.parametrize("name", ["LlamaForCausalLMEagle", "EagleLlamaForCausalLM"])
def test_a_drafter_of_eagle(name: str, keys: dict[str, Any], bias: bool) -> None:
    config = {**EAGLE3, "draft_vocab_size": None, "architectures": [name], **keys}
    weights = weights_of(fitted(spec_of(config), spec_of(LLAMA), "eagle"))
    own = {weight: found.shape for weight, found in weights.items() if found.layer is None}
    assert own == {"fc.weight": (4096, 8192)} | ({"fc.bias": (4096,)} if bias else {})
    assert "layers.0.post_attention_layernorm.weight" in weights
    assert "layers.0.input_layernorm.weight" not in weights
