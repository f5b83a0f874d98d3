"""A small model of every family in the registry: the class of transformers' configuration, and what it gets beside SMALL."""

import json
from pathlib import Path
from typing import Any

import encoder_models
import hybrid_cases
from byte_vocabulary import byte_tokenizer
from small_models import CLASSIC, DEEPSEEK, DENSE, GEMMA, GEMMA3N, GEMMA4, MOE, SMALL

from meshlm.architectures.family import stem_of

STATES = hybrid_cases.CASES
QWEN: dict[str, Any] = {
    **{key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
    "model_type": "qwen",
    "intermediate_size": 160,
    "kv_channels": 8,
    "seq_length": 128,
    "layer_norm_epsilon": 1e-6,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "no_bias": True,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "scale_attn_weights": True,
}
"""Qwen of 2023, whose configuration transformers has not."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", {}),
    "MistralForCausalLM": ("MistralConfig", {"sliding_window": 7}),
    "Qwen2ForCausalLM": ("Qwen2Config", {}),
    "Qwen3ForCausalLM": ("Qwen3Config", {"head_dim": 16}),
    "GemmaForCausalLM": ("GemmaConfig", {"head_dim": 16}),
    "Gemma2ForCausalLM": ("Gemma2Config", GEMMA),
    "VaultGemmaForCausalLM": ("VaultGemmaConfig", GEMMA),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", GEMMA),
    "Gemma3nForCausalLM": ("Gemma3nTextConfig", GEMMA3N),
    "Gemma4ForCausalLM": GEMMA4["gemma4-e2b"],
    "Phi3ForCausalLM": ("Phi3Config", {}),
    "PhimoeForCausalLM": CLASSIC["phimoe"],
    "PhiMoEForCausalLM": CLASSIC["phimoe"],
    "HeliumForCausalLM": CLASSIC["helium"],
    "HunYuanDenseV1ForCausalLM": CLASSIC["hunyuan"],
    "HunYuanMoEV1ForCausalLM": CLASSIC["hunyuan-moe"],
    "ArceeForCausalLM": CLASSIC["arcee"],
    "CwmForCausalLM": CLASSIC["cwm"],
    "ApertusForCausalLM": CLASSIC["apertus"],
    "MixtralForCausalLM": MOE["mixtral"],
    "Qwen2MoeForCausalLM": MOE["qwen2-moe"],
    "Qwen3MoeForCausalLM": MOE["qwen3-moe"],
    "DeepseekV2ForCausalLM": DEEPSEEK["deepseek-v2"],
    "DeepseekV3ForCausalLM": DEEPSEEK["deepseek-v3"],
    "Llama4ForCausalLM": MOE["llama4"],
    "GptOssForCausalLM": MOE["gpt-oss"],
    "DeepseekV32ForCausalLM": DEEPSEEK["deepseek-v3.2"],
    "Glm4MoeLiteForCausalLM": DEEPSEEK["glm4-moe-lite"],
    "YoutuForCausalLM": DEEPSEEK["youtu"],
    "GlmMoeDsaForCausalLM": DEEPSEEK["glm-5"],
    "GraniteForCausalLM": CLASSIC["granite"],
    "GraniteMoeForCausalLM": CLASSIC["granite-moe"],
    "GraniteMoeSharedForCausalLM": CLASSIC["granite-moe-shared"],
    "Glm4MoeForCausalLM": CLASSIC["glm4-moe"],
    "SolarOpenForCausalLM": CLASSIC["solar-open"],
    "Dots1ForCausalLM": CLASSIC["dots1"],
    "SeedOssForCausalLM": CLASSIC["seed-oss"],
    "MinistralForCausalLM": CLASSIC["ministral"],
    "Ministral3ForCausalLM": CLASSIC["ministral3"],
    "Ernie4_5ForCausalLM": CLASSIC["ernie4.5"],
    "Ernie4_5_MoeForCausalLM": CLASSIC["ernie4.5-moe"],
    "MiniMaxM2ForCausalLM": CLASSIC["minimax-m2"],
    "OlmoeForCausalLM": CLASSIC["olmoe"],
    "Olmo2ForCausalLM": DENSE["olmo2"],
    "Olmo3ForCausalLM": DENSE["olmo3"],
    "SmolLM3ForCausalLM": DENSE["smollm3"],
    "Exaone4ForCausalLM": DENSE["exaone4"],
    "CohereForCausalLM": DENSE["cohere"],
    "Cohere2ForCausalLM": DENSE["cohere2"],
    "GlmForCausalLM": DENSE["glm"],
    "Glm4ForCausalLM": DENSE["glm4"],
    "Starcoder2ForCausalLM": DENSE["starcoder2"],
    "GPT2LMHeadModel": CLASSIC["gpt2"],
    "GPTBigCodeForCausalLM": CLASSIC["gpt-bigcode"],
    "GPTNeoXForCausalLM": CLASSIC["gpt-neox"],
    "PhiForCausalLM": CLASSIC["phi"],
    "OPTForCausalLM": CLASSIC["opt"],
    "StableLmForCausalLM": CLASSIC["stablelm"],
    "GPTJForCausalLM": CLASSIC["gptj"],
    "NemotronForCausalLM": CLASSIC["nemotron"],
    "OlmoForCausalLM": CLASSIC["olmo"],
    "BloomForCausalLM": CLASSIC["bloom"],
    "MptForCausalLM": CLASSIC["mpt"],
    "MPTForCausalLM": CLASSIC["mpt"],
    "FalconForCausalLM": CLASSIC["falcon-40b"],
    "Mamba2ForCausalLM": STATES["mamba2"],
    "BambaForCausalLM": STATES["bamba"],
    "GraniteMoeHybridForCausalLM": STATES["granite"],
    "NemotronHForCausalLM": (STATES["nemotron-experts"][0], STATES["nemotron-experts"][1] | {"time_step_min": 1e-12}),
    "FalconH1ForCausalLM": STATES["falcon-h1"],
    "MambaForCausalLM": STATES["mamba"],
    "FalconMambaForCausalLM": STATES["falcon-mamba"],
    "Lfm2ForCausalLM": STATES["lfm2"],
    "Lfm2MoeForCausalLM": STATES["lfm2-moe"],
    "JambaForCausalLM": STATES["jamba"],
    "RecurrentGemmaForCausalLM": STATES["recurrentgemma"],
    "Qwen3NextForCausalLM": STATES["qwen3-next"],
    "Qwen3_5ForCausalLM": (
        "Qwen3_5TextConfig",
        {key: value for key, value in STATES["qwen3.5"][1].items() if "expert" not in key and "moe" not in key},
    ),
    "Qwen3_5MoeForCausalLM": STATES["qwen3.5"],
}
"""Those that give text, by the name of their architecture: all but QWenLMHeadModel."""


_ENCODERS = ("Bert", "Roberta", "XLMRoberta", "ModernBert")
_OF_STEM = {stem_of(name): name for name in (*CASES, "QWenLMHeadModel")}
_LABELS = {"id2label": {str(nth): f"label {nth}" for nth in range(3)}}
_OTHERS = {
    "HF_ColBERT": ("Bert", {"dim": 12}),
    "BertSpladeSparseEmbeddingModel": ("Bert", {}),
    "BgeM3EmbeddingModel": ("XLMRoberta", {}),
}


def config_of(architecture: str, **changes: Any) -> dict[str, Any]:
    """The config.json of the family's small model."""
    found = _text_config(architecture)
    if found is None:
        stem, own = _OTHERS.get(architecture) or (_stem(architecture), _LABELS)
        text = _text_config(_OF_STEM.get(stem, ""))
        found = (_encoder_config(stem) if text is None else text) | own
    return {**found, "architectures": [architecture], **changes}


def _stem(architecture: str) -> str:
    """The longest that some family begins with: of Qwen2ForRewardModel, Qwen2."""
    return max((stem for stem in (*_OF_STEM, *_ENCODERS) if architecture.startswith(stem)), key=len)


def _text_config(architecture: str) -> dict[str, Any] | None:
    import transformers

    if architecture == "QWenLMHeadModel":
        return QWEN
    if architecture not in CASES:
        return None
    name, own = CASES[architecture]
    found = getattr(transformers, name)(**{**SMALL, **own}).to_json_string(use_diff=False)
    decoded: dict[str, Any] = json.loads(found)
    return decoded


def _encoder_config(stem: str) -> dict[str, Any]:
    import transformers

    found = getattr(transformers, f"{stem}Config")(**{**encoder_models.SIZES, **encoder_models.CASES[stem]})
    decoded: dict[str, Any] = json.loads(found.to_json_string(use_diff=False))
    return decoded


def folder_of(architecture: str, folder: Path, **changes: Any) -> Path:
    """A folder that `--load-format dummy` serves: its tokens are bytes."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(architecture, **changes)))
    byte_tokenizer(SMALL["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder
