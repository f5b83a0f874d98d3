"""Small models that see, each with its configuration and its processor (media_processors.py)."""

from collections.abc import Callable
from typing import Any, NamedTuple

from media_processors import (
    IDS,
    IMAGE,
    TILES,
    deepseek_processor,
    gemma3_processor,
    gemma4_processor,
    glm_processor,
    idefics3_processor,
    internvl_processor,
    lfm2_processor,
    llava_next_processor,
    llava_processor,
    onevision_processor,
    paddle_processor,
    pixtral_processor,
    qwen_processor,
    tiles_processor,
)
from small_models import GEMMA4, MOE


class Case(NamedTuple):
    architecture: str
    config: str
    text: dict[str, Any]
    vision: dict[str, Any]
    more: dict[str, Any]  # of the outer configuration
    processor: Callable[[Any], Any]  # of a tokenizer
    merge: int = 0  # patches of a side that are a vector, where items have grids
    sees: tuple[str, ...] = ("image_token_id",)  # keys of the configuration that name the placeholder
    uncut: bool = False
    placeholder: str = IMAGE  # what a chat template renders for an image
    vector: str = IMAGE  # in whose places vectors come


_BOTH = ("image_token_id", "image_token_index")
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_WIDE = {"head_dim": 16, "rope_parameters": _AXES | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "initializer_range": 0.2}
_QWEN = _TOWER | {"depth": 4, "num_heads": 2, "out_hidden_size": 48, "patch_size": 4, "temporal_patch_size": 2}
_QWEN |= {"spatial_merge_size": 2}
_QWEN3 = _QWEN | {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 36}
_SQUARE = _TOWER | {"num_hidden_layers": 2, "image_size": 16, "patch_size": 4}
_GEMMA4 = _TOWER | {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4}
_GEMMA4 |= {"pooling_kernel_size": 2, "position_embedding_size": 24}
_HEARS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 12}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 36}
_GLM: dict[str, Any] = {"head_dim": 16, "rope_parameters": _AXES | {"partial_rotary_factor": 0.5}}
_GLM_DENSE = {"num_attention_heads": 3, "num_key_value_heads": 1, "rope_parameters": _GLM["rope_parameters"]}
_GLM_TOWER = _TOWER | {"depth": 2, "num_heads": 2, "image_size": 16, "patch_size": 4, "out_hidden_size": 48}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 36}
_DELTA: dict[str, Any] = {"head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_DELTA |= {"rope_parameters": _AXES | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
CASES: dict[str, Case] = {
    "qwen2.5-vl": Case(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {"rope_parameters": _AXES},
        _QWEN | {"window_size": 16, "fullatt_block_indexes": [1, 3]},
        {"tie_word_embeddings": True},
        qwen_processor("Qwen2_5_VLProcessor"),
        merge=2,
    ),
    "qwen2-vl": Case(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {"rope_parameters": _AXES},
        {"embed_dim": 32, "depth": 2, "num_heads": 2, "hidden_size": 48, "mlp_ratio": 2, "patch_size": 4}
        | {"initializer_range": 0.2},
        {},
        qwen_processor("Qwen2VLProcessor"),
        merge=2,
    ),
    "qwen3-vl": Case(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        _WIDE,
        _QWEN3,
        {},
        qwen_processor("Qwen3VLProcessor"),
        merge=2,
    ),
    "qwen3-vl-moe": Case(
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        _WIDE | _EXPERTS,
        _QWEN3,
        {},
        qwen_processor("Qwen3VLProcessor"),
        merge=2,
    ),
    "qwen3.5": Case(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        _DELTA,
        _QWEN | {"num_position_embeddings": 36},
        {},
        qwen_processor("Qwen3VLProcessor"),
        merge=2,
    ),
    "qwen3.5-moe": Case(
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeConfig",
        _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 20},
        _QWEN | {"num_position_embeddings": 36},
        {"tie_word_embeddings": True},
        qwen_processor("Qwen3VLProcessor"),
        merge=2,
    ),
    "llava": Case(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"model_type": "llama"},
        _SQUARE | {"model_type": "clip_vision_model"},
        {},
        llava_processor,
        sees=_BOTH,
    ),
    "llava-next": Case(
        "LlavaNextForConditionalGeneration",
        "LlavaNextConfig",
        {"model_type": "llama"},
        _SQUARE | {"model_type": "clip_vision_model"},
        {"image_grid_pinpoints": TILES},
        llava_next_processor,
        sees=_BOTH,
    ),
    "llava-onevision": Case(
        "LlavaOnevisionForConditionalGeneration",
        "LlavaOnevisionConfig",
        {"model_type": "qwen2"},
        _SQUARE | {"model_type": "siglip_vision_model"},
        {"image_grid_pinpoints": TILES},
        onevision_processor,
        sees=_BOTH,
    ),
    "gemma3": Case(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {"head_dim": 16, "num_hidden_layers": 4, "query_pre_attn_scalar": 24, "sliding_window": 9}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        _SQUARE | {"model_type": "siglip_vision_model"},
        {"mm_tokens_per_image": 4, "boi_token_index": IDS["<boi>"], "eoi_token_index": IDS["<eoi>"]}
        | {"tie_word_embeddings": True},
        gemma3_processor,
        sees=_BOTH,
        uncut=True,
        placeholder="<boi>",
    ),
    "gemma4-e2b": Case(
        "Gemma4ForConditionalGeneration",
        "Gemma4Config",
        GEMMA4["gemma4-e2b"][1] | {"pad_token_id": 5},
        _GEMMA4 | {"use_clipped_linears": True},
        {"audio_config": _HEARS, "tie_word_embeddings": True},
        gemma4_processor("Gemma4Processor", patch=4, pooling=2),
    ),
    "gemma4-26b": Case(
        "Gemma4ForConditionalGeneration",
        "Gemma4Config",
        GEMMA4["gemma4-moe"][1] | {"use_bidirectional_attention": "vision", "sliding_window": 5, "pad_token_id": 0},
        _GEMMA4 | {"standardize": True},
        {"audio_config": None, "tie_word_embeddings": True},
        gemma4_processor("Gemma4Processor", patch=4, pooling=2),
        uncut=True,
    ),
    "gemma4-unified": Case(
        "Gemma4UnifiedForConditionalGeneration",
        "Gemma4UnifiedConfig",
        GEMMA4["gemma4-dense"][1] | {"pad_token_id": 0},
        {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 24, "output_proj_dims": 32}
        | {"initializer_range": 0.2},
        {"audio_config": None, "tie_word_embeddings": True},
        gemma4_processor("Gemma4UnifiedProcessor", patch=8, pooling=1),
        uncut=True,
    ),
    "glm4.1v": Case(
        "Glm4vForConditionalGeneration",
        "Glm4vConfig",
        _GLM_DENSE,
        _GLM_TOWER,
        {},
        glm_processor("Glm4vProcessor"),
        merge=2,
    ),
    "glm4.5v": Case(
        "Glm4vMoeForConditionalGeneration",
        "Glm4vMoeConfig",
        _GLM | _ROUTED,
        _GLM_TOWER,
        {},
        glm_processor("Glm4vProcessor"),
        merge=2,
    ),
    "glm4.6v": Case(
        "Glm46VForConditionalGeneration",
        "Glm46VConfig",
        _GLM_DENSE,
        _GLM_TOWER,
        {},
        glm_processor("Glm46VProcessor"),
        merge=2,
    ),
    "glm-ocr": Case(
        "GlmOcrForConditionalGeneration",
        "GlmOcrConfig",
        _GLM,
        _GLM_TOWER,
        {},
        glm_processor("Glm46VProcessor"),
        merge=2,
    ),
    "deepseek-vl": Case(
        "DeepseekVLForConditionalGeneration",
        "DeepseekVLConfig",
        {"model_type": "llama"},
        _SQUARE | {"model_type": "siglip_vision_model"},
        {},
        deepseek_processor,
    ),
    "cohere2-vision": Case(
        "Cohere2VisionForConditionalGeneration",
        "Cohere2VisionConfig",
        {"model_type": "cohere2", "sliding_window": 9, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
        _SQUARE | {"model_type": "siglip_vision_model"},
        {"alignment_intermediate_size": 64},
        tiles_processor("Cohere2VisionProcessor"),
    ),
    "lfm2-vl": Case(
        "Lfm2VlForConditionalGeneration",
        "Lfm2VlConfig",
        {"model_type": "lfm2", "num_hidden_layers": 4, "block_multiple_of": 8}
        | {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
        _TOWER | {"model_type": "siglip2_vision_model", "num_hidden_layers": 2, "patch_size": 4, "num_patches": 16},
        {"projector_hidden_size": 40},
        lfm2_processor,
    ),
    "paddleocr-vl": Case(
        "PaddleOCRVLForConditionalGeneration",
        "PaddleOCRVLConfig",
        {"head_dim": 8, "rope_parameters": _AXES},
        _SQUARE | {"image_size": 24},
        {},
        paddle_processor,
        merge=2,
    ),
    "internvl-moe": Case(
        "InternVLForConditionalGeneration",
        "InternVLConfig",
        {"model_type": "qwen3_moe", "head_dim": 16} | _EXPERTS,
        _TOWER | {"num_hidden_layers": 2, "image_size": [16, 16], "patch_size": [4, 4]},
        {"image_seq_length": 4},
        internvl_processor,
    ),
    "llava-pixtral": Case(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"model_type": "mistral", "sliding_window": None},
        _SQUARE | {"model_type": "pixtral", "image_size": 32},
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        pixtral_processor(1),
        sees=_BOTH,
    ),
    "llama4": Case(
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        MOE["llama4"][1],
        _SQUARE
        | {"intermediate_size": 128, "vision_output_dim": 24}
        | dict.fromkeys(("projector_input_dim", "projector_output_dim"), 24),
        {},
        tiles_processor("Llama4Processor", patch_size=4),
        sees=("image_token_index",),
        placeholder="<|image|>",
        vector="<|patch|>",
    ),
    "idefics3": Case(
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        {"model_type": "llama"},
        _SQUARE,
        {"scale_factor": 2},
        idefics3_processor,
    ),
    "smolvlm": Case(
        "SmolVLMForConditionalGeneration",
        "SmolVLMConfig",
        {"model_type": "llama"},
        _SQUARE,
        {"scale_factor": 2},
        idefics3_processor,  # its own needs num2words, for videos
    ),
    "internvl": Case(
        "InternVLForConditionalGeneration",
        "InternVLConfig",
        {"model_type": "qwen2"},
        _TOWER | {"num_hidden_layers": 2, "image_size": [16, 16], "patch_size": [4, 4]},
        {"image_seq_length": 4},
        internvl_processor,
    ),
    "mistral3": Case(
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {"model_type": "mistral", "sliding_window": None},
        _SQUARE | {"model_type": "pixtral", "image_size": 32},
        {"spatial_merge_size": 2},
        pixtral_processor(2),
        sees=_BOTH,
    ),
}
