"""Folders of models whose weights are not at hand, with configurations of their real shapes: for --load-format dummy.

    python -P benchmarks/shapes.py [NAME ...] --tokenizer FOLDER --into FOLDER

Without names all of the list here are written; the folders of benchmarks/models are names, too. NAME+awq has 4-bit weights in groups
of 128 with zero points, NAME+fp8 8-bit floats in blocks of 128. The tokenizer's files are taken from another model's folder; where its
ids are more than the model has, the model gets as many.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama3": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5, "rope_scaling": LLAMA3_ROPE,
    },
    "qwen2.5": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768, "use_sliding_window": False,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
        "head_dim": 128, "max_position_embeddings": 40960, "attention_bias": False, "use_sliding_window": False,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "rope_theta": 1e6,
        "rms_norm_eps": 1e-6, "head_dim": 128, "max_position_embeddings": 40960, "attention_bias": False, "use_sliding_window": False,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 256000, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
        "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262208, "rope_theta": 1e6,
        "rms_norm_eps": 1e-6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "head_dim": 256,
        "query_pre_attn_scalar": 256, "sliding_window": 1024, "sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 32064, "rope_theta": 1e4, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096, "sliding_window": None, "pad_token_id": 0,
    },
}  # fmt: skip
FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
SHAPES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "llama3-1b": ("llama3", (2048, 16, 32, 8, 8192), {"head_dim": 64, "tie_word_embeddings": True}),
    "llama3-3b": ("llama3", (3072, 28, 24, 8, 8192), {"head_dim": 128, "tie_word_embeddings": True}),
    "llama3-8b": ("llama3", (4096, 32, 32, 8, 14336), {}),
    "llama3-70b": ("llama3", (8192, 80, 64, 8, 28672), {}),
    "qwen2.5-1.5b": ("qwen2.5", (1536, 28, 12, 2, 8960), {"vocab_size": 151936, "tie_word_embeddings": True}),
    "qwen2.5-3b": ("qwen2.5", (2048, 36, 16, 2, 11008), {"vocab_size": 151936, "tie_word_embeddings": True}),
    "qwen2.5-7b": ("qwen2.5", (3584, 28, 28, 4, 18944), {}),
    "qwen2.5-14b": ("qwen2.5", (5120, 48, 40, 8, 13824), {}),
    "qwen2.5-32b": ("qwen2.5", (5120, 64, 40, 8, 27648), {}),
    "qwen3-0.6b": ("qwen3", (1024, 28, 16, 8, 3072), {"tie_word_embeddings": True}),
    "qwen3-1.7b": ("qwen3", (2048, 28, 16, 8, 6144), {"tie_word_embeddings": True}),
    "qwen3-4b": ("qwen3", (2560, 36, 32, 8, 9728), {"tie_word_embeddings": True}),
    "qwen3-8b": ("qwen3", (4096, 36, 32, 8, 12288), {}),
    "qwen3-14b": ("qwen3", (5120, 40, 40, 8, 17408), {}),
    "qwen3-32b": ("qwen3", (5120, 64, 64, 8, 25600), {}),
    "qwen3-30b-a3b": (
        "qwen3-moe", (2048, 48, 32, 4, 6144), {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    ),
    "mistral-7b": ("mistral", (4096, 32, 32, 8, 14336), {"max_position_embeddings": 32768}),
    "mistral-nemo": ("mistral", (5120, 40, 32, 8, 14336), {"head_dim": 128, "vocab_size": 131072}),
    "gemma2-2b": ("gemma2", (2304, 26, 8, 4, 9216), {}),
    "gemma2-9b": ("gemma2", (3584, 42, 16, 8, 14336), {}),
    "gemma3-4b": ("gemma3", (2560, 34, 8, 4, 10240), {}),
    "gemma3-12b": ("gemma3", (3840, 48, 16, 8, 15360), {}),
    "gemma3-27b": ("gemma3", (5376, 62, 32, 16, 21504), {"head_dim": 128, "query_pre_attn_scalar": 168}),
    "phi3-mini": ("phi3", (3072, 32, 32, 32, 8192), {}),
    "phi4": (
        "phi3", (5120, 40, 40, 10, 17920), {"vocab_size": 100352, "rope_theta": 250000.0, "max_position_embeddings": 16384}
    ),
}  # fmt: skip
WEIGHTS: dict[str, dict[str, Any]] = {
    "": {},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
MODELS = Path(__file__).parent / "models"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def config_of(name: str, least_ids: int = 0) -> dict[str, Any]:
    """The config.json of NAME or NAME+WEIGHTS, with room for so many ids. KeyError for a name that is not here."""
    shape, _, weights = name.partition("+")
    whole = MODELS / shape / "config.json"
    if shape not in SHAPES and whole.exists():
        config = json.loads(whole.read_text("utf-8"))
    else:
        family, sizes, own = SHAPES[shape]
        config = {
            "max_position_embeddings": 131072, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            **FAMILIES[family], **dict(zip(FIELDS, sizes, strict=True)), **own,
        }  # fmt: skip
    if least_ids > config["vocab_size"]:
        config["vocab_size"] = -(-least_ids // 64) * 64
    quantization = WEIGHTS[weights]
    return {**config, "quantization_config": quantization} if quantization else config


def num_ids(tokenizer: Path) -> int:
    """One more than the largest id of a tokenizer.json."""
    read = json.loads((tokenizer / TOKENIZER[0]).read_text("utf-8"))
    ids: list[int] = [*read["model"]["vocab"].values(), *(token["id"] for token in read.get("added_tokens", []))]
    return max(ids) + 1


def write(name: str, tokenizer: Path, into: Path) -> Path:
    """The folder of a model."""
    folder = into / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(name, num_ids(tokenizer)), indent=1) + "\n")
    for file in TOKENIZER:
        if (tokenizer / file).exists():
            shutil.copyfile(tokenizer / file, folder / file)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", default=list(SHAPES), metavar="NAME", help=", ".join(SHAPES))
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--into", type=Path, required=True)
    arguments = parser.parse_args()
    for name in arguments.names:
        try:
            print(write(name, arguments.tokenizer, arguments.into))
        except KeyError as error:
            parser.error(f"{name}: there is no {error}")


if __name__ == "__main__":
    main()
