"""The text model inside a model that also takes images or sound: its config.json, and the names of its tensors.

Such a model is served as its text model, whose own family (registry.py) reads it: tokens of text meet the same layers in both.
What it sees beside text says media.py; the other parts are not loaded.
"""

import re
from collections.abc import Iterable
from typing import Any

from meshlm.architectures.config_values import pairs, shown

_KINDS = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "ministral3": ("Ministral3ForCausalLM", "ministral3"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2_vl_text": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2_5_omni_text": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3_vl_text": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3_vl_moe_text": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "gemma3_text": ("Gemma3ForCausalLM", "gemma3_text"),
    "gemma3n_text": ("Gemma3nForCausalLM", "gemma3n_text"),
    "gemma4_text": ("Gemma4ForCausalLM", "gemma4_text"),
    "gemma4_unified_text": ("Gemma4ForCausalLM", "gemma4_unified_text"),
    "llama4_text": ("Llama4ForCausalLM", "llama4_text"),
    "cohere": ("CohereForCausalLM", "cohere"),
    "cohere2": ("Cohere2ForCausalLM", "cohere2"),
    "lfm2": ("Lfm2ForCausalLM", "lfm2"),
    "lfm2_moe": ("Lfm2MoeForCausalLM", "lfm2_moe"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gpt_oss": ("GptOssForCausalLM", "gpt_oss"),
    "paddleocr_vl_text": ("LlamaForCausalLM", "llama"),
    "glm4v_text": ("Glm4ForCausalLM", "glm4"),
    "glm_ocr_text": ("Glm4ForCausalLM", "glm4"),
    "glm4v_moe_text": ("Glm4MoeForCausalLM", "glm4_moe"),
}
"""By text_config.model_type: the family's architecture, and the model_type that its own files have."""
_ARCHITECTURES = pairs("""
    Gemma3ForConditionalGeneration=gemma3_text Mistral3ForConditionalGeneration=mistral
    Llama4ForConditionalGeneration=llama4_text Gemma3nForConditionalGeneration=gemma3n_text
    Gemma4ForConditionalGeneration=gemma4_text Gemma4UnifiedForConditionalGeneration=gemma4_unified_text
    LlavaForConditionalGeneration=llama LlavaNextForConditionalGeneration=llama
    LlavaOnevisionForConditionalGeneration=qwen2
    InternVLForConditionalGeneration=qwen2 Idefics3ForConditionalGeneration=llama
    SmolVLMForConditionalGeneration=llama Qwen2VLForConditionalGeneration=qwen2_vl_text
    Qwen2_5_VLForConditionalGeneration=qwen2_5_vl_text Qwen3VLForConditionalGeneration=qwen3_vl_text
    Qwen3VLMoeForConditionalGeneration=qwen3_vl_moe_text Qwen3_5ForConditionalGeneration=qwen3_5_text
    Qwen3_5MoeForConditionalGeneration=qwen3_5_moe_text Qwen2AudioForConditionalGeneration=qwen2
    AudioFlamingo3ForConditionalGeneration=qwen2 VoxtralForConditionalGeneration=llama
    Qwen2_5OmniThinkerForConditionalGeneration=qwen2_5_omni_text Qwen2_5OmniForConditionalGeneration=qwen2_5_omni_text
    Qwen2_5OmniModel=qwen2_5_omni_text Glm4vForConditionalGeneration=glm4v_text
    Glm4vMoeForConditionalGeneration=glm4v_moe_text Glm46VForConditionalGeneration=glm4v_text
    GlmOcrForConditionalGeneration=glm_ocr_text DeepseekVLForConditionalGeneration=llama
    Cohere2VisionForConditionalGeneration=cohere2 Lfm2VlForConditionalGeneration=lfm2
    PaddleOCRVLForConditionalGeneration=paddleocr_vl_text
""")
"""Models that are served so, and the model_type that a text_config without one has."""
_THINKER = "Qwen2_5OmniThinkerForConditionalGeneration"
_SPEAKING = ("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel")
"""Models that also speak. Their thinker reads, sees, hears and writes; what makes sound of that is not loaded."""
_GLM: dict[str, Any] = {"partial_rotary_factor": 1.0, "head_dim": None, "rms_norm_eps": 1e-5}
_QWEN2_VL = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_attention_heads": 64, "num_key_value_heads": 8}
_QWEN3_VL = {"rope_theta": 5e5, "max_position_embeddings": 128000, "head_dim": 128}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_5_omni_text": {"rope_theta": 1e6, "num_attention_heads": 28, "num_key_value_heads": 4},
    "qwen3_vl_text": _QWEN3_VL,
    "glm4v_text": _GLM | {"attention_bias": True, "max_position_embeddings": 32768},
    "glm_ocr_text": _GLM | {"attention_bias": False, "num_attention_heads": 16, "num_key_value_heads": 8},
    "paddleocr_vl_text": {"head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 5e5}
    | {"num_attention_heads": 16, "num_key_value_heads": 2},
    "glm4v_moe_text": {"attention_bias": True, "max_position_embeddings": 65536},
    "qwen2": {  # the files of Qwen2-Audio leave these out
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "qwen3_vl_moe_text": _QWEN3_VL
    | {"norm_topk_prob": True, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts_per_tok": 4},
    "gemma4_unified_text": {
        "hidden_size_per_layer_input": 0,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
    },
}
"""The values of missing keys, where they differ from the family's own."""
_OTHER_KEYS = re.compile(
    r"(vision|audio|image|video|mm|projector|multimodal|multi_modal)_.*|spatial_merge_size|downsample_ratio|scale_factor"
    r"|downsample_factor|alignment_intermediate_size"
    r"|(max|min)_(image_tokens|num_patches|tiles|pixels_tolerance)|do_image_splitting|encoder_patch_size|tile_size|use_thumbnail"
    r"|use_image_special_tokens|tie_embedding"
    r"|(bo|eo)[ia]_token_index|ignore_index|text_config|architectures|model_type"
    r"|position_id_per_seconds|seconds_per_chunk|user_token_id"
)
_OTHER_TENSORS = re.compile(
    r"(talker|token2wav)\..*|(thinker\.)?(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|vision_embedder|embed_vision|embed_audio|connector|image_newline|aligner|projector|mlp_AR)(\..*)?"
)
_TEXT_TENSORS = re.compile(r"(?:thinker\.)?(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?P<rest>.+)")


def architectures() -> tuple[str, ...]:
    return tuple(_ARCHITECTURES)


def is_spoken(name: str) -> bool:
    """Whether a tensor of the file belongs to the part of a model that speaks."""
    return name.startswith(("talker.", "token2wav."))


def reading_part(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the part that takes prompts: the thinker's of a model that also speaks, else the whole. ValueError."""
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in _SPEAKING:
        return config
    thinker = config.get("thinker_config")
    if not isinstance(thinker, dict):
        raise ValueError(f"thinker_config must be an object, got {shown(thinker)}")
    return {**thinker, "architectures": [_THINKER], "model_type": "qwen2_5_omni_thinker"}


def text_config(config: dict[str, Any]) -> dict[str, Any] | None:
    """The config.json of the text model; None where the model has no other part. ValueError."""
    config = reading_part(config)
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in _ARCHITECTURES:
        return None
    inner = config.get("text_config")
    if inner is not None and not isinstance(inner, dict):
        raise ValueError(f"text_config must be an object, got {shown(inner)}")
    outer = {key: value for key, value in config.items() if not _OTHER_KEYS.fullmatch(key)}
    kind = (inner or {}).get("model_type") or _ARCHITECTURES[named[0]]
    if kind not in _KINDS:
        raise ValueError(
            f"text_config.model_type {shown(kind)} is not supported for {named[0]}; supported: {', '.join(_KINDS)}"
        )
    architecture, model_type = _KINDS[kind]
    found = {
        **_DEFAULTS.get(kind, {}),
        **outer,
        **(inner or {}),
        "architectures": [architecture],
        "model_type": model_type,
    }
    if config.get("tie_word_embeddings") is not None:
        found["tie_word_embeddings"] = config["tie_word_embeddings"]  # the head is the outer model's
    return found


def text_tensor(name: str) -> str | None:
    """The name that a tensor (or a module) of the file has in the text model; None: it belongs to another part."""
    if _OTHER_TENSORS.fullmatch(name):
        return None
    found = _TEXT_TENSORS.fullmatch(name)
    if found is None:
        return name.removeprefix("thinker.")
    return found["rest"] if found["rest"].partition(".")[0] == "lm_head" else f"model.{found['rest']}"


def text_modules(names: Iterable[str]) -> tuple[str, ...]:
    """The modules of a quantization_config that belong to the text model, by its own names. ValueError for a regular expression that
    speaks of the outer model's."""
    found = []
    for name in names:
        if not name.startswith("re:"):
            own = text_tensor(name)
            found += [own] if own is not None else []
        elif "language_model" in name or "text_model" in name:
            raise ValueError(f"ignore: {shown(name)} is not supported for the text part of a model")
        else:
            found.append(name)
    return tuple(found)
