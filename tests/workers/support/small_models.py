"""Small models for the tests of workers: loading one, and running steps on it without an engine."""

from pathlib import Path
from typing import Any

import torch
from model_folders import resolve_model
from tiny_models import resolved_of
from torch import Tensor

from meshlm.protocol.config import Resolved
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.model_files.model_files import ModelFiles
from meshlm.workers.attention.backend import choose
from meshlm.workers.batch import LayerCache, RequestLens, StepInputs
from meshlm.workers.layers.ops import TorchOps
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights.load import load_model

CPU = torch.device("cpu")
BLOCK = 4
SMALL: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
GEMMA: dict[str, Any] = {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24, "initializer_range": 0.2}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
    "initializer_range": 0.2,
}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 60, "num_key_value_heads": 2}
MOE: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2, "initializer_range": 0.2}),
    "mixtral-sliding": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 7}),
    "qwen2-moe": ("Qwen2MoeConfig", EXPERTS | SHARED),
    "qwen2-moe-some": ("Qwen2MoeConfig", EXPERTS | SHARED | {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3-moe": ("Qwen3MoeConfig", EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 6,
            "floor_scale": 5,
            "attn_scale": 0.4,
            "initializer_range": 0.2,
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "initializer_range": 0.2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "truncate": False,
            },
        },
    ),
    "qwen3-moe-sparse": ("Qwen3MoeConfig", EXPERTS | {"head_dim": 16, "decoder_sparse_step": 2}),
}


"""Mixtures of experts: the class of transformers' configuration, and what it gets beside SMALL."""


GEMMA3N: dict[str, Any] = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    + ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.9, 0.0, 0.9, 0.0, 0.5, 0.0],
    "vocab_size_per_layer_input": 200,
    "hidden_size_per_layer_input": 12,
    "altup_num_inputs": 3,
    "altup_active_idx": 0,
    "laurel_rank": 6,
    "final_logit_softcapping": 3.0,
    "initializer_range": 0.2,
}
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "initializer_range": 0.2,
}
_WITH_INPUTS = {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 220}
_EQUAL_KV = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4-e2b": (
        "Gemma4TextConfig",
        _GEMMA4 | _WITH_INPUTS | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "num_key_value_heads": 2},
    ),
    "gemma4-dense": ("Gemma4TextConfig", _GEMMA4 | _EQUAL_KV),
    "gemma4-moe": (
        "Gemma4TextConfig",
        _GEMMA4
        | _EQUAL_KV
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20},
    ),
}


"""Small as the released ones: per-layer inputs and shared keys; other heads in layers that see all; experts beside MLPs."""


DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 7,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_theta": 1e4},
            },
        },
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "exaone4": ("Exaone4Config", {"sliding_window": 7, "sliding_window_pattern": 2}),
    "cohere": ("CohereConfig", {"attention_bias": True, "logit_scale": 1.5, "initializer_range": 0.2}),
    "cohere2": (
        "Cohere2Config",
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 7}),
    "exaone4-full": ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
}


"""Dense decoders that differ from Llama in norms, rotation or the order of layers: what they differ in from SMALL."""


_ALONE = {"num_key_value_heads": 6}
GPT2: dict[str, Any] = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_inner": 96}
_MPT: dict[str, Any] = {**_ALONE, "d_model": 48, "n_layers": 3, "n_heads": 6}
_FALCON: dict[str, Any] = {"ffn_hidden_size": 96, "initializer_range": 0.1}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "initializer_range": 0.2,
}
_MULTIPLIED: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 1.5,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
}
CLASSIC: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("GraniteConfig", _MULTIPLIED),
    "granite-tied": ("GraniteConfig", _MULTIPLIED | {"tie_word_embeddings": True, "attention_bias": True}),
    "granite-moe": ("GraniteMoeConfig", _MULTIPLIED | {"num_local_experts": 5, "initializer_range": 0.2}),
    "glm4-moe": ("Glm4MoeConfig", _ROUTED | {"head_dim": 16, "use_qk_norm": True, "n_group": 2}),
    "glm4-moe-bias": ("Glm4MoeConfig", _ROUTED | {"head_dim": 16, "attention_bias": True}),
    "solar-open": (
        "SolarOpenConfig",
        {key: _ROUTED[key] for key in _ROUTED if key != "first_k_dense_replace"} | {"head_dim": 16, "n_group": 2},
    ),
    "granite-moe-shared": (
        "GraniteMoeSharedConfig",
        _MULTIPLIED | {"num_local_experts": 5, "shared_intermediate_size": 40, "initializer_range": 0.2},
    ),
    "arcee": ("ArceeConfig", {"initializer_range": 0.2}),
    "cwm": ("CwmConfig", {"bos_token_id": 1, "head_dim": 16, "sliding_window": 7, "rope_parameters": _LLAMA3}),
    "dots1": ("Dots1Config", _ROUTED | {"sliding_window": 7, "max_window_layers": 2}),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 16,
            "initializer_range": 0.2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "minimax-m2": (
        "MiniMaxM2Config",
        {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "initializer_range": 0.2, "rotary_dim": 8},
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 0.5, "initializer_range": 0.2}),
    "seed-oss": ("SeedOssConfig", {"head_dim": 16}),
    "ministral": (
        "MinistralConfig",
        {"head_dim": 16, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "ernie4.5": ("Ernie4_5Config", {"head_dim": 16, "use_bias": True}),
    "ernie4.5-moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 36, "initializer_range": 0.2},
    ),
    "helium": ("HeliumConfig", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "hunyuan": (
        "HunYuanDenseV1Config",
        {
            "head_dim": 16,
            "attention_bias": True,
            "initializer_range": 0.2,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
        },
    ),
    "hunyuan-moe": ("HunYuanMoEV1Config", {"head_dim": 16, "num_experts": 6, "moe_topk": 2, "initializer_range": 0.2}),
    "apertus": ("ApertusConfig", {"initializer_range": 0.2, "rope_parameters": _LLAMA3}),
    "phimoe": (
        "PhimoeConfig",
        {"num_local_experts": 6, "attention_bias": True, "router_jitter_noise": 0.3, "initializer_range": 0.2}
        | {"lm_head_bias": True},
    ),
    "gpt2": ("GPT2Config", GPT2 | {"n_positions": 64} | _ALONE),
    "gpt-bigcode": ("GPTBigCodeConfig", GPT2 | {"n_positions": 64}),
    "gpt-neox": ("GPTNeoXConfig", _ALONE | {"rotary_pct": 0.5}),
    "gpt-neox-serial": ("GPTNeoXConfig", _ALONE | {"use_parallel_residual": False, "attention_bias": False}),
    "phi": ("PhiConfig", {}),
    "opt": ("OPTConfig", _ALONE | {"ffn_dim": 96, "word_embed_proj_dim": 48}),
    "opt-350m": ("OPTConfig", _ALONE | {"ffn_dim": 96, "word_embed_proj_dim": 24, "do_layer_norm_before": False}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm-parallel": ("StableLmConfig", {"use_parallel_residual": True, "num_key_value_heads": 6}),
    "gptj": ("GPTJConfig", GPT2 | _ALONE | {"rotary_dim": 4}),
    "nemotron": ("NemotronConfig", {"head_dim": 16, "mlp_bias": True}),
    "olmo": ("OlmoConfig", {"clip_qkv": 0.1}),
    "bloom": ("BloomConfig", _ALONE | {"n_layer": 3, "n_head": 6}),
    "mpt": ("MptConfig", _MPT | {"attn_config": {"clip_qkv": 0.1, "alibi": True, "attn_type": "multihead_attention"}}),
    "falcon-7b": ("FalconConfig", _FALCON),
    "falcon-40b": ("FalconConfig", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-11b": (
        "FalconConfig",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-rw": ("FalconConfig", _FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False}),
}


"""More decoders: what they differ in from SMALL."""


LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "initializer_range": 0.2,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
_GROUPS = {"n_group": 4, "topk_group": 2}
_CHOSEN_IN_GROUPS = {"topk_method": "group_limited_greedy", **_GROUPS}
DEEPSEEK: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2-lite": (
        "DeepseekV2Config",
        LATENT | {"rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "deepseek-v2": (
        "DeepseekV2Config",
        LATENT | _CHOSEN_IN_GROUPS | {"q_lora_rank": 20, "routed_scaling_factor": 2.0, "rope_parameters": _YARN},
    ),
    "deepseek-v2-dense": ("DeepseekV2Config", LATENT | {"first_k_dense_replace": 3}),
    "deepseek-v3": (
        "DeepseekV3Config",
        LATENT | _GROUPS | {"q_lora_rank": 20, "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "deepseek-v3.2": (
        "DeepseekV32Config",
        LATENT
        | _GROUPS
        | {"q_lora_rank": 20, "index_topk": 6, "index_n_heads": 4, "index_head_dim": 12}
        | {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "glm4-moe-lite": (
        "Glm4MoeLiteConfig",
        LATENT | {"q_lora_rank": 20, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "youtu": (
        "YoutuConfig",
        {key: LATENT[key] for key in LATENT if not any(word in key for word in ("expert", "moe", "dense"))},
    ),
    "glm-5": (
        "GlmMoeDsaConfig",
        LATENT
        | {"q_lora_rank": 20, "index_topk": 6, "index_n_heads": 4, "index_head_dim": 12}
        | {"indexer_types": ["full", "shared", "full"]},
    ),
}


"""Names of configurations, and what they differ in from SMALL."""


def resolved(path: Path, load_format: str = "auto") -> Resolved:
    return resolved_of_files(resolve_model(str(path), load_format=load_format))


def resolved_of_files(files: ModelFiles) -> Resolved:
    found = {"model_path": str(files.path), "load_format": files.load_format}
    return resolved_of(files.spec, **found, max_model_len=128, max_num_seqs=8)


def load(path: Path, load_format: str = "auto") -> Decoder:
    with torch.inference_mode():
        return load_model(resolved(path, load_format), torch.device("cpu"), 0, lambda done, total: None)


def caches(spec: ModelSpec, num_blocks: int) -> list[LayerCache]:
    if spec.mla is not None:
        lines = [torch.zeros(num_blocks, BLOCK, 1, spec.mla.line) for _ in range(spec.num_hidden_layers)]
        return [LayerCache(line, line) for line in lines]
    shapes = [(num_blocks, BLOCK, one.num_key_value_heads, one.head_dim) for one in spec.attentions]
    return [LayerCache(torch.zeros(shape), torch.zeros(shape)) for shape in shapes]


def batch_of(parts: list[tuple[list[int], int, list[int]]]) -> StepInputs:
    """One step; parts are (token ids, start, block table), decodes first."""
    ids: list[int] = []
    positions: list[int] = []
    slots, tables, lens = [], [], []
    for tokens, start, table in parts:
        ids += tokens
        positions += range(start, start + len(tokens))
        slots += [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(start, start + len(tokens))]
        lens.append(start + len(tokens))
        tables.append(table)
    width = max(map(len, tables))
    decodes = sum(len(tokens) == 1 for tokens, _, _ in parts)
    return StepInputs(
        input_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        slot_mapping=(torch.tensor(slots),),
        block_tables=(torch.tensor([table + [0] * (width - len(table)) for table in tables]),),
        logits_indices=torch.arange(len(ids)),
        num_decodes=decodes,
        lens=RequestLens(
            seq_lens=torch.tensor(lens),
            query_lens=tuple(len(tokens) for tokens, _, _ in parts[decodes:]),
            context_lens=tuple(lens[decodes:]),
            max_decode_len=max(lens[:decodes], default=0),
        ),
    )


def run(model: Decoder, kv: list[LayerCache], parts: list[tuple[list[int], int, list[int]]]) -> Tensor:
    """Logits of all tokens of one step."""
    batch = batch_of(parts)
    with torch.inference_mode():
        backend = choose("torch" if isinstance(model.ops, TorchOps) else "cpu", model.spec, CPU, torch.float32, BLOCK)
        return model.logits(model(batch, kv, backend.step(batch, BLOCK)))
