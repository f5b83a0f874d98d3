"""Models that also take images are served as their text models: transformers' logits of the whole model, for text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import GEMMA, GEMMA4, MOE, SMALL, caches, load, run
from torch import Tensor

WEIGHTS = "model.safetensors"
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
SQUARE = VISION | {"image_size": 16, "patch_size": 8}
QWEN = {"hidden_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 48, "intermediate_size": 48}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
WIDE = {"head_dim": 16, "rope_parameters": AXES | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}}
HYBRID = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "rope_parameters": AXES | {"mrope_interleaved": True, "partial_rotary_factor": 0.5},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "initializer_range": 0.2}
TIED = {"tie_word_embeddings": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": ("Gemma3Config", GEMMA | {"num_hidden_layers": 7} | TIED, SQUARE, TIED),
    "Gemma4ForConditionalGeneration": (
        "Gemma4Config",
        GEMMA4["gemma4-e2b"][1] | {"pad_token_id": 0},
        VISION | {"head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 16},
        TIED | {"audio_config": None},
    ),
    "Gemma4UnifiedForConditionalGeneration": (
        "Gemma4UnifiedConfig",
        {key: value for key, value in GEMMA4["gemma4-dense"][1].items() if not key.startswith("hidden_size_per")}
        | {"pad_token_id": 0},
        {"mm_embed_dim": 32, "mm_posemb_size": 8, "patch_size": 2, "output_proj_dims": 32},
        TIED | {"audio_config": None},
    ),
    "Mistral3ForConditionalGeneration": (
        "Mistral3Config",
        {"model_type": "mistral", "sliding_window": None},
        SQUARE | {"model_type": "pixtral"},
        {"tie_word_embeddings": False},
    ),
    "Llama4ForConditionalGeneration": (
        "Llama4Config",
        MOE["llama4"][1],
        SQUARE
        | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "pixel_shuffle_ratio": 1.0},
        {"tie_word_embeddings": False},
    ),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        {"model_type": "llama"},
        SQUARE | {"model_type": "clip_vision_model"},
        {},
    ),
    "InternVLForConditionalGeneration": (
        "InternVLConfig",
        {"model_type": "qwen2"},
        VISION | {"image_size": [16, 16], "patch_size": [8, 8]},
        TIED,
    ),
    "SmolVLMForConditionalGeneration": ("SmolVLMConfig", {"model_type": "llama"}, SQUARE, {}),
    "Qwen2VLForConditionalGeneration": (
        "Qwen2VLConfig",
        {"rope_parameters": AXES},
        {"embed_dim": 32, "depth": 1, "num_heads": 2, "hidden_size": 48, "mlp_ratio": 2},
        {},
    ),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2_5_VLConfig", {"rope_parameters": AXES}, QWEN, TIED),
    "Qwen3VLMoeForConditionalGeneration": (
        "Qwen3VLMoeConfig",
        WIDE | EXPERTS,
        QWEN | {"deepstack_visual_indexes": [0]},
        {},
    ),
    "Qwen3VLForConditionalGeneration": ("Qwen3VLConfig", WIDE, QWEN | {"deepstack_visual_indexes": [0]}, {}),
}


@pytest.mark.parametrize("architecture", CASES)
def test_logits_of_text_equal_transformers(architecture: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config_class, text, vision, more = CASES[architecture]
    config = getattr(transformers, config_class)(text_config={**SMALL, **text}, vision_config=vision, **more)
    theirs = getattr(transformers, architecture)._from_config(config, attn_implementation="eager").eval().float()
    for name, parameter in theirs.named_parameters():
        if name.endswith(("norm.weight", ".bias")):
            parameter.data += torch.randn_like(parameter) * 0.3
    theirs.save_pretrained(tmp_path)
    if architecture == "Qwen3VLMoeForConditionalGeneration":
        written = dict(load(tmp_path).named_parameters())
        save_file(transposed(load_file(tmp_path / WEIGHTS)), tmp_path / WEIGHTS)
        assert all(torch.equal(parameter, written[name]) for name, parameter in load(tmp_path).named_parameters())
    ours = load(tmp_path)
    tokens = torch.randint(0, 200, (29,)).tolist()
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([tokens])).logits[0]
    kv, table = caches(ours.spec, 24), [7, 3, 11, 0, 5, 9, 1, 2]
    mine = torch.cat((run(ours, kv, [(tokens[:11], 0, table)]), run(ours, kv, [(tokens[11:], 11, table)])))
    torch.testing.assert_close(mine, expected, atol=2e-5, rtol=1e-4)


def transposed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With a row for each input of an expert's matrix, as the models on the hub have them."""
    return {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()
    }


def packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the matrices of all experts in one tensor, as the models on the hub have them."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    stems = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for stem in stems:
        gate, up, down = (
            torch.stack([tensors[f"{stem}.experts.{expert}.{part}_proj.weight"] for expert in range(4)])
            for part in ("gate", "up", "down")
        )
        found[f"{stem}.experts.gate_up_proj"], found[f"{stem}.experts.down_proj"] = torch.cat((gate, up), 1), down
    return found


@pytest.mark.parametrize(
    ("stem", "more"), [("Qwen3_5", {}), ("Qwen3_5Moe", EXPERTS | {"shared_expert_intermediate_size": 20})]
)
def test_a_hybrid_text_part_is_the_text_model(stem: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Whose tokens tests/workers/engine/test_hybrid.py compares with transformers'."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{stem}Config")(text_config={**SMALL, **HYBRID, **more}, vision_config=QWEN)
    whole = getattr(transformers, f"{stem}ForConditionalGeneration")._from_config(config)
    text = getattr(transformers, f"{stem}ForCausalLM")._from_config(config.text_config)
    text.model.load_state_dict(whole.model.language_model.state_dict())
    text.lm_head.load_state_dict(whole.lm_head.state_dict())
    for model, name in ((whole, "whole"), (text, "text")):
        model.save_pretrained(tmp_path / name)
    if more:
        save_file(packed(load_file(tmp_path / "whole" / WEIGHTS)), tmp_path / "whole" / WEIGHTS)
    found, expected = (dict(load(tmp_path / name).named_parameters()) for name in ("whole", "text"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
