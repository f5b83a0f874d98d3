"""The text model inside a model that also takes images."""

from pathlib import Path
from typing import Any

import pytest
from model_folders import folder_with, resolve_model

from meshlm.architectures.media import media_spec
from meshlm.architectures.rope import rope_spec
from meshlm.architectures.text_part import _ARCHITECTURES, _KINDS, is_spoken, text_config, text_modules, text_tensor
from meshlm.protocol.media import Modality
from meshlm.protocol.model import RopeSpec
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.model_config import parse_config

TEXT: dict[str, Any] = {
    "model_type": "mistral",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "sliding_window": None,
}
SEES: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "image_token_index": 10,
    "vision_config": {"hidden_size": 8},
    "text_config": TEXT,
}


def test_a_text_config_is_the_familys_own(tmp_path: Path) -> None:
    plain = folder_with(tmp_path / "plain", **{"config.json": TEXT | {"architectures": ["MistralForCausalLM"]}})
    sees = folder_with(tmp_path / "sees", **{"config.json": SEES})
    expected, found = (resolve_model(path, load_format="dummy") for path in (plain, sees))
    assert found.spec.text_part
    assert not expected.spec.text_part
    assert found.spec.architecture == expected.spec.architecture
    assert found.spec.media is not None
    assert found.spec.media.token_id(Modality.IMAGE) == 10
    assert found.spec.media.token_id(Modality.VIDEO) is None
    assert not any("served as its text model" in note for note in found.notes)
    blind = SEES | {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "text_config": {**TEXT, "model_type": "mistral"},
    }
    refused = resolve_model(folder_with(tmp_path / "blind", **{"config.json": blind}), load_format="dummy")
    assert refused.spec.media is None
    assert any("served as its text model, MistralForCausalLM; images are refused" in note for note in refused.notes)


def test_keys_of_the_text_model_may_stand_beside_the_others() -> None:
    """Qwen2-VL's files have no text_config."""
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    found = text_config(
        {key: value for key, value in TEXT.items() if key != "model_type"}
        | {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "rope_scaling": rope}
        | {"vision_config": {"depth": 2}, "vision_token_id": 5, "spatial_merge_size": 2}
    )
    assert found is not None
    assert found["architectures"] == ["Qwen2ForCausalLM"]
    assert found["model_type"] == "qwen2"
    assert rope_spec(found) == RopeSpec(rope_theta=1e6), "mRoPE is plain for text"
    assert not [key for key in found if "vision" in key or "merge" in key]
    assert text_config(TEXT | {"architectures": ["MistralForCausalLM"]}) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text_config": 3}, "text_config must be an object, got 3"),
        ({"text_config": TEXT | {"model_type": "t5"}}, "text_config.model_type 't5' is not supported for Mistral3For"),
        ({"text_config": TEXT | {"clip_qkv": 3.0}}, "clip_qkv 3.0 changes what the model computes"),
        ({"num_experts": 4}, "num_experts 4 changes what the model computes"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, **{"config.json": SEES | changes})
    with pytest.raises(ModelFilesError, match=said):
        resolve_model(folder, load_format="dummy")


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.text_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("vision_tower.encoder.x", None),
        ("model.visual.blocks.0.norm1.bias", None),
        ("multi_modal_projector.linear_1.weight", None),
        ("model.audio_tower.conformer.0.x", None),
        ("model.embed_vision.embedding.weight", None),
        ("model.language_model.embed_tokens_per_layer.weight", "model.embed_tokens_per_layer.weight"),
        ("something_else.weight", "something_else.weight"),
    ],
)
def test_names_of_tensors(name: str, own: str | None) -> None:
    assert text_tensor(name) == own


def test_modules_that_are_not_quantised() -> None:
    names = ["language_model.lm_head", "vision_tower.blocks.0", "re:.*mlp.gate$", "lm_head"]
    assert text_modules(names) == ("lm_head", "re:.*mlp.gate$", "lm_head")
    with pytest.raises(ValueError, match="ignore: 're:language_model"):
        text_modules(["re:language_model.*"])


def test_ministral_3_within_mistral_3() -> None:
    found = text_config(SEES | {"text_config": TEXT | {"model_type": "ministral3"}})
    assert found is not None
    spec, _ = parse_config(found, Path("m"))
    assert (spec.architecture, spec.attn_temperature) == ("Ministral3ForCausalLM", (0.1, 16384.0))
    assert (spec.rope.rope_type, spec.max_position_embeddings) == ("yarn", 128)


def test_overrides_of_the_text_model_keep_what_they_do_not_name(tmp_path: Path) -> None:
    """What vLLM does with them, too; an object that is no config is replaced."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    folder = folder_with(tmp_path, **{"config.json": SEES | {"text_config": TEXT | {"rope_parameters": rope}}})
    changed = '{"text_config": {"max_position_embeddings": 64, "rope_parameters": {"factor": 4.0}}}'
    spec = resolve_model(folder, load_format="dummy", hf_overrides=changed).spec
    assert (spec.hidden_size, spec.max_position_embeddings) == (64, 256)
    assert spec.rope == RopeSpec(rope_type="linear", rope_theta=5e5, factor=4.0)


def test_what_speaks_is_served_as_its_thinker() -> None:
    """config.json of Qwen2.5-Omni, shortened; names of its tensors begin with the part that they are of."""
    rope = {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}
    text = {key: value for key, value in TEXT.items() if key != "model_type"} | {"rope_scaling": rope}
    thinker = {
        "text_config": text | {"model_type": "qwen2_5_omni_text"},
        "audio_config": {"d_model": 8},
        "user_token_id": 872,
    }
    thinker |= {"audio_token_index": 7, "image_token_index": 8, "vision_config": {"depth": 2}, "seconds_per_chunk": 2}
    whole = {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "talker_config": {"hidden_size": 4}}
    found = text_config(whole | {"thinker_config": thinker})
    assert found is not None
    assert found["architectures"] == ["Qwen2ForCausalLM"]
    spec = media_spec(whole | {"thinker_config": thinker}, 64)
    assert spec is not None
    assert spec.placeholders == ((Modality.IMAGE, 8), (Modality.AUDIO, 7))
    assert spec.architecture == "Qwen2_5OmniThinkerForConditionalGeneration"
    with pytest.raises(ValueError, match="thinker_config must be an object"):
        text_config(whole)
    assert text_tensor("thinker.model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert text_tensor("thinker.lm_head.weight") == "lm_head.weight"
    assert text_tensor("thinker.audio_tower.conv1.weight") is None
    assert text_tensor("talker.model.layers.0.mlp.up_proj.weight") is None
    assert is_spoken("token2wav.code2wav_bigvgan_model.conv_pre.bias")


def test_keys_that_qwen2_audio_leaves_out() -> None:
    inner = {"intermediate_size": 11008, "max_position_embeddings": 8192, "model_type": "qwen2", "vocab_size": 156032}
    found = text_config({"architectures": ["Qwen2AudioForConditionalGeneration"], "text_config": inner})
    assert found is not None
    assert (found["hidden_size"], found["num_hidden_layers"], found["num_key_value_heads"]) == (4096, 32, 32)


SILENT: tuple[str, ...] = (
    "rms_norm_eps",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
SILENT += ("num_experts_per_tok", "partial_rotary_factor", "attention_bias", "norm_topk_prob")


@pytest.mark.parametrize("kind", [kind for kind, (_, model_type) in _KINDS.items() if kind != model_type])
def test_missing_keys_have_the_values_of_the_text_models_own_class(kind: str) -> None:
    """Where a wrong one would change answers in silence, since tensors have the same shapes."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    theirs, family = (CONFIG_MAPPING[name]().to_dict() for name in (kind, _KINDS[kind][1]))
    outer = next(name for name, own in _ARCHITECTURES.items() if own == kind)
    found = text_config({"architectures": [outer], "text_config": {"model_type": kind}})
    assert found is not None
    for name in SILENT:
        own = theirs.get(name)
        if own is not None and own != family.get(name):
            assert found.get(name) == own, name
    theta, of_family = ((one.get("rope_parameters") or {}).get("rope_theta") for one in (theirs, family))
    assert found.get("rope_theta", of_family) == theta
