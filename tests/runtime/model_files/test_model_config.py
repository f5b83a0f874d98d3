"""Keys of config.json: what is honoured, what is refused by name, and that defaults are those of transformers."""

from pathlib import Path
from typing import Any

import pytest
from model_folders import CONFIG
from tiny_models import sliding

from meshlm.architectures import config_keys
from meshlm.architectures.registry import families
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files import transformers_models
from meshlm.runtime.model_files.model_config import parse_config

HERE = Path("m")
CLASSES = {
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Phi3ForCausalLM": "Phi3Config",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def without(settings: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != key}


@pytest.mark.parametrize("architecture", CLASSES)
def test_every_key_of_transformers_is_known(architecture: str) -> None:
    import transformers

    config = getattr(transformers, CLASSES[architecture])()
    settings = {**config.to_dict(), **CONFIG, "architectures": [architecture], "num_key_value_heads": 2}
    assert families()[architecture].model_type == config.model_type
    spec, notes = parse_config(without(without(settings, "layer_types"), "head_dim"), HERE)
    assert notes == ()
    assert spec.hidden_size == 64
    for name in config.to_dict():
        known = (
            name in config_keys.HONOURED | config_keys.NEEDLESS | config_keys.MATHS
            or config_keys._NEEDLESS.fullmatch(name)
        )
        assert known, f"{name} is in no table"


@pytest.mark.parametrize("architecture", CLASSES)
def test_missing_keys_are_what_transformers_takes_them_for(architecture: str) -> None:
    import transformers

    sizes = {**without(CONFIG, "architectures"), "num_attention_heads": 32}
    theirs = getattr(transformers, CLASSES[architecture])(**sizes)
    ours, _ = parse_config({**sizes, "architectures": [architecture]}, HERE)
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", 2)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.attention_bias == (architecture == "Qwen2ForCausalLM")
    assert ours.hidden_act == theirs.hidden_act
    window = getattr(theirs, "sliding_window", None) or 0
    assert ours.sliding_window == (window if window < ours.max_position_embeddings else 0)


def test_a_window_that_is_not_written_down_is_the_familys() -> None:
    long = {**CONFIG, "max_position_embeddings": 8192, "num_key_value_heads": 4}
    assert parse_config({**long, "architectures": ["MistralForCausalLM"]}, HERE)[0].sliding_window == 4096
    assert (
        parse_config({**long, "architectures": ["MistralForCausalLM"], "sliding_window": None}, HERE)[0].sliding_window
        == 0
    )
    qwen = {**long, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "num_hidden_layers": 30}
    spec, _ = parse_config(qwen, HERE)
    assert (spec.sliding_window, sliding(spec)) == (4096, (False,) * 28 + (True,) * 2)
    assert parse_config({**qwen, "num_hidden_layers": 28}, HERE)[0].sliding_window == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"embedding_multiplier": 12.0}, "embedding_multiplier 12.0 changes what the model computes"),
        ({"residual_multiplier": 0.22}, "residual_multiplier"),
        ({"attention_multiplier": 0.015}, "attention_multiplier"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"use_rope": False}, "use_rope False"),
        ({"is_causal": False}, "is_causal False"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"vision_config": {"hidden_size": 8}}, "vision_config"),
        ({"text_config": {"hidden_size": 8}}, "text_config"),
        ({"audio_config": {"x": 1}}, "audio_config"),
        ({"mm_vision_tower": "clip"}, "mm_vision_tower"),
        ({"num_local_experts": 8}, "num_local_experts 8"),
        ({"moe_intermediate_size": 64}, "moe_intermediate_size"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"clip_qkv": 8}, "clip_qkv"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"sliding_window": 16}, "sliding_window 16 with these layer_types is not supported for Llama"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types is not supported for Llama"),
        ({"layer_types": ["full_attention"]}, "layer_types must name the kind of each of 2 layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types holds 'linear_attention'"),
        ({"sliding_window": -5}, "sliding_window is -5"),
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "several architectures"),
        ({"architectures": ["LlamaForQuestionAnswering"]}, "architecture LlamaForQuestionAnswering is not supported"),
        ({"architectures": []}, "architecture none is not supported"),
        ({"model_type": "granite"}, "model_type 'granite' beside architecture LlamaForCausalLM"),
        ({"hidden_size": 66}, "hidden_size 66 is no multiple of num_attention_heads 4"),
        ({"hidden_size": 64.5}, "hidden_size must be an integer, got 64.5"),
        ({"hidden_size": True}, "hidden_size must be an integer, got True"),
        ({"vocab_size": "256"}, "vocab_size must be an integer"),
        ({"num_attention_heads": 0}, "hidden_size 64 is no multiple"),
        ({"vocab_size": None}, "vocab_size must be an integer"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number that is not negative"),
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000.0}}, "rope_type dynamic does not know alpha"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type linear needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0; it must be above 0"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a number"),
        ({"rope_scaling": without(LLAMA3, "factor")}, "rope_type llama3 needs factor"),
        ({"rope_scaling": without(LLAMA3, "low_freq_factor")}, "rope_type llama3 needs low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}}, "high_freq_factor must not be below"),
        ({"rope_scaling": {**LLAMA3, "llama_4_scaling_beta": 0.1}}, "does not know llama_4_scaling_beta"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1] * 8}}, "rope_type longrope needs long_factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": 1, "long_factor": 1}}, "must be a list of positive"),
        ({"rope_scaling": 5}, "must be objects, got 5"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "factor": 2.0}}, "differ in factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "does not know full_attention"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0; it must be above 1"),
        ({"rope_theta": "1e4"}, "rope_theta must be a number"),
        ({"partial_rotary_factor": 1.5}, "of which 24 are rotated"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFilesError, match=said) as told:
        parse_config({**CONFIG, **changes}, HERE)
    assert str(told.value).startswith("m")
    assert "\n" not in str(told.value)


def test_values_that_ask_for_nothing() -> None:
    """Real checkpoints carry many of them."""
    neutral: dict[str, Any] = {
        "embedding_multiplier": 1.0,
        "attn_logit_softcapping": None,
        "num_experts": 0,
        "mlp_only_layers": [],
        "use_qk_norm": False,
        "is_causal": True,
        "attention_dropout": 0.1,
        "pretraining_tp": 4,
        "image_token_id": 7,
        "sliding_window": 128,
        "layer_types": ["full_attention"] * 2,
        "rope_scaling": {"type": "default", "factor": 1.0},
        "model_type": "llama",
        "some_key_of_a_trainer": None,
    }
    spec, notes = parse_config({**CONFIG, **neutral}, HERE)
    assert notes == ()
    assert spec == parse_config(CONFIG, HERE)[0]


# Of models that many people serve, as their config.json has them beside the sizes.
REAL: dict[str, dict[str, Any]] = {
    "SmolLM2": {
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_scaling": None,
        "transformers.js_config": {"dtype": "q4"},
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
    },
    "Llama-3.1": {"rope_scaling": LLAMA3, "rope_theta": 500000.0, "pretraining_tp": 1, "eos_token_id": [1, 2]},
    "Yarn-Llama-2": {
        "rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "finetuned": True},
        "_name_or_path": "x",
    },
    "Qwen2.5": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_window_layers": 1,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "use_mrope": False,
        "num_key_value_heads": 2,
    },
    "Mistral-7B-v0.3": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
        "num_key_value_heads": 2,
    },
}


@pytest.mark.parametrize("model", REAL)
def test_models_that_many_people_serve(model: str) -> None:
    assert parse_config({**CONFIG, **REAL[model]}, HERE)[1] == ()


def test_unknown_keys_are_named_once() -> None:
    _, notes = parse_config({**CONFIG, "b_of_a_trainer": 5, "a": "x", "auto_map": {"AutoModel": "m.M"}}, HERE)
    assert notes[0] == "m/config.json: unknown keys are ignored: a, b_of_a_trainer"
    assert "auto_map names code" in notes[1]


def test_rope_parameters_of_transformers_5() -> None:
    found = parse_config({**CONFIG, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, HERE)[0].rope
    assert found == parse_config({**CONFIG, "rope_scaling": LLAMA3, "rope_theta": 5e5}, HERE)[0].rope
    assert (found.rope_type, found.factor, found.rope_theta) == ("llama3", 8.0, 5e5)


@pytest.mark.parametrize(
    ("scaling", "context", "original"),
    [
        ({"type": "linear", "factor": 4.0}, 512, 0),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512, 128),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128, 32),
        ({"type": "yarn", "factor": 4.0}, 512, 128),
        ({"type": "dynamic", "factor": 4.0}, 128, 0),
        (LLAMA3, 128, 64),
    ],
)
def test_the_context_that_a_scaled_rotation_was_made_for(scaling: dict[str, Any], context: int, original: int) -> None:
    spec, _ = parse_config({**CONFIG, "rope_scaling": scaling}, HERE)
    assert (spec.max_position_embeddings, spec.rope.original_max_position_embeddings) == (context, original)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, ""),
        ({"vision_config": {"depth": 2}}, "; what it sees is refused"),
        ({"vision_config": {}, "audio_config": {"depth": 2}}, "; what it hears is refused"),
    ],
)
def test_parts_that_transformers_text_model_leaves_out_are_named(
    more: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = parse_config(CONFIG, HERE)[0]
    monkeypatch.setattr(transformers_models, "describe", lambda config, folder, code: spec)
    config = {"architectures": ["SomeForCausalLM"], "model_type": "some", **more}
    found, notes = transformers_models.parse_config(config, HERE, transformers_models.RemoteCode(), chosen=False)
    assert found is spec
    assert notes[0].endswith(f"with our attention (our own models do not know it){said}")
