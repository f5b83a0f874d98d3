"""Small models with recurrent states: the class of transformers' configuration, and what it gets beside SMALL."""

from typing import Any

STATES: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
MAMBA2 = {
    "num_hidden_layers": 3,
    "num_heads": 6,
    "head_dim": 16,
    "n_groups": 2,
    "state_size": 8,
    "expand": 2,
    "chunk_size": 8,
}
MAMBA = {"num_hidden_layers": 3, "state_size": 8, "expand": 2, "time_step_rank": 5, "intermediate_size": 96}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2Config", MAMBA2),
    "bamba": ("BambaConfig", STATES | {"num_hidden_layers": 4, "attn_layer_indices": [1]}),
    "granite": (
        "GraniteMoeHybridConfig",
        STATES
        | {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 5,
            "shared_intermediate_size": 40,
            "embedding_multiplier": 3.0,
            "logits_scaling": 1.7,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.3,
        },
    ),
    "granite-dense": (
        "GraniteMoeHybridConfig",
        STATES
        | {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
            "embedding_multiplier": 3.0,
        },
    ),
    "nemotron": (
        "NemotronHConfig",
        {
            "layers_block_type": ["mlp", "linear_attention", "full_attention", "linear_attention", "mlp"],
            "head_dim": 8,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 8,
        },
    ),
    "nemotron-experts": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
            "head_dim": 8,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 8,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 28,
            "routed_scaling_factor": 1.7,
        },
    ),
    "falcon-h1": (
        "FalconH1Config",
        STATES
        | {
            "num_hidden_layers": 2,
            "mamba_d_ssm": 96,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.4,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.6,
            "ssm_in_multiplier": 0.8,
            "ssm_out_multiplier": 0.5,
            "mlp_multipliers": [0.9, 0.45],
            "ssm_multipliers": [0.5, 0.8, 1.2, 0.9, 0.7],
        },
    ),
    "falcon-h1-normed": (
        "FalconH1Config",
        STATES
        | {
            "num_hidden_layers": 2,
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "tie_word_embeddings": True,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.4,
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "num_experts": 4,
            "mamba_d_state": 4,
            "mamba_dt_rank": 5,
            "mamba_expand": 1,
        },
    ),
    "recurrentgemma": (
        "RecurrentGemmaConfig",
        {"num_hidden_layers": 3, "attention_window_size": 11, "num_key_value_heads": 1, "lru_width": 96},
    ),
    "mamba": ("MambaConfig", MAMBA),
    "falcon-mamba": ("FalconMambaConfig", MAMBA),
    "lfm2": (
        "Lfm2Config",
        {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
            "block_multiple_of": 8,
            "conv_bias": True,
        },
    ),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 36,
            "initializer_range": 0.2,
        },
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [1],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
        },
    ),
    "qwen3.5": (
        "Qwen3_5MoeTextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
        },
    ),
}
