"""Other values for the keys of a config.json, one key at a time: what a family must honour, or refuse by name."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from meshlm.architectures.config_values import words

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu", "relu")
_ACTIVATION_KEYS = words("""
    hidden_act hidden_activation activation_function activation mlp_hidden_act mamba_hidden_act classifier_activation
""")
_TABLE: dict[str, tuple[Any, ...]] = {
    "sliding_window": (5, None),
    "attention_chunk_size": (4,),
    "num_experts_per_tok": (1, 3),
    "moe_topk": (1, [3, 3, 3], [1, 2, 2]),
    "num_dense_layers": (0, 2),
    "num_key_value_heads": (1, 3, 6),
    "head_dim": (8, 24),
    "n_group": (2,),
    "topk_group": (1,),
    "scoring_func": ("softmax", "sigmoid"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "first_k_dense_replace": (0, 2),
    "moe_layer_freq": (2,),
    "decoder_sparse_step": (2,),
    "mlp_only_layers": ([0],),
    "interleave_moe_layer_step": (1, 3),
    "no_rope_layer_interval": (3,),
    "index_topk": (3, 64),
    "floor_scale": (3,),
    "query_pre_attn_scalar": (11,),
    "max_window_layers": (1,),
    "num_ln_in_parallel_attn": (1, 2),
    "rotary_dim": (2, 8),
    "num_kv_shared_layers": (0,),
    "sliding_window_pattern": (3,),
    "full_attention_interval": (2,),
    "attn_layer_period": (2,),
    "attn_layer_offset": (0, 1),
    "expert_layer_period": (1, 3),
    "expert_layer_offset": (0,),
    "mamba_d_conv": (3,),
    "conv_kernel": (3,),
    "conv_L_cache": (2,),
    "linear_conv_kernel_dim": (3,),
    "mamba_chunk_size": (4,),
    "chunk_size": (4,),
    "mamba_n_groups": (1, 3),
    "n_groups": (1, 3),
    "time_step_limit": ([0.01, 0.05],),
    "moe_layer_start_index": (1,),
    "moe_layer_end_index": (1,),
    "moe_layer_interval": (2,),
    "moe_num_shared_experts": (1,),
    "moe_k": (1,),
    "n_shared_experts": (1, 3),
    "clip_qkv": (0.05, None),
    "swiglu_limit": (0.5,),
    "top_k_experts": (1, 3),
    "final_logit_softcapping": (0.7, None),
    "attn_logit_softcapping": (0.6, None),
    "norm_type": ("low_precision_layernorm",),
    "altup_active_idx": (1,),
    "altup_coef_clip": (0.01,),
    "vocab_size_per_layer_input": (150,),
    "parallel_attn": (False,),
    "moe_norm_min": (0.5,),
    "mixer_rms_eps": (0.3,),
    "bos_token_id": (3,),
    "original_max_position_embeddings": (16,),
    "residual_multiplier": (0.7,),
    "q_lora_rank": (None, 14),
    "qk_nope_head_dim": (8,),
    "v_head_dim": (8,),
    "kv_lora_rank": (16,),
    "index_n_heads": (2,),
    "laurel_rank": (4,),
    "moe_intermediate_size": (20,),
    "shared_expert_intermediate_size": (28,),
    "shared_intermediate_size": (24,),
    "moe_shared_expert_intermediate_size": (16,),
    "intermediate_size_mlp": (64,),
    "index_head_dim": (16,),
    "mamba_d_state": (4,),
    "state_size": (4,),
    "ssm_state_size": (4,),
    "mamba_dt_rank": (3,),
    "time_step_rank": (3,),
    "linear_key_head_dim": (8,),
    "linear_value_head_dim": (16,),
    "linear_num_key_heads": (1, 4),
    "num_experts": (8,),
    "num_local_experts": (8,),
    "n_routed_experts": (12,),
    "moe_num_experts": (8,),
    "moe_layers": ([0, 2],),
    "attn_layer_indices": ([0, 2],),
    "n_inner": (64,),
    "ffn_dim": (64,),
    "word_embed_proj_dim": (24,),
    "ffn_hidden_size": (64,),
    "altup_num_inputs": (4,),
    "hidden_size_per_layer_input": (8,),
    "global_head_dim": (8,),
    "mtp_num_hidden_layers": (1,),
    "num_nextn_predict_layers": (2,),
    "type_vocab_size": (3,),
    "local_attention": (6, 12),
    "global_attn_every_n_layers": (3,),
    "classifier_pooling": ("cls", "mean"),
    "position_embedding_type": ("nope", "rope", "relative_key"),
    "indexer_types": (["full", "full", "shared"], ["full", "full", "full"]),
    "mlp_layer_types": (["dense", "sparse", "dense"],),
    "no_rope_layers": ([1, 1, 0],),
    "num_kv_heads": (1, 3),
    "attention_window_size": (5,),
    "conv1d_width": (3,),
    "block_types": (["attention", "recurrent"], ["recurrent"]),
    "lru_width": (24,),
}
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.5},
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 9.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 0.6},
    {"rope_theta": 123.0},
)
_OF_MPT = {"clip_qkv": 0.05, "alibi": False, "softmax_scale": 0.3, "qk_ln": True}


NOT_CHANGED = words("""
    d_model n_embd n_embed n_head n_heads n_layer n_layers n_inner n_positions n_ctx max_seq_len seq_length num_heads head_dim
    attention_head_dim qk_head_dim qk_rope_head_dim global_head_dim num_global_key_value_heads linear_num_value_heads expand
    mamba_expand mamba_d_head mamba_d_ssm mamba_d_state mamba_n_heads time_step_rank num_experts num_local_experts
    mlp_intermediate_size mamba_head_dim mamba_num_heads moe_intermediate_size shared_intermediate_size num_shared_expert
    vocab_size_per_layer_input expansion_ratio block_dim block_ff_dim block_multiple_of conv_dim conv_dim_out

    _sliding_window_pattern sliding_window_pattern order_of_interleaved_layers layer_switch attn_type_list full_attn_idxs
    hybrid_override_pattern full_attention_interval layers_block_type attn_layer_period moe_layer_freq moe_layer_start_index
    decoder_sparse_step mlp_only_layers index_topk_freq index_topk_pattern index_skip_topk_offset rope_local_base_freq rotary
    rotary_emb_base rotary_pct rope_interleave indexer_rope_interleave theta experts_per_token num_experts_per_tok
    initial_context_length hidden_activation activation_function scoring_func topk_method topk_group n_group norm_topk_prob
    norm_type normalization_function mlp_type fc_type ffn_config position_embedding_type parallel_attn block_norm_eps
    tie_embedding use_pos_enc global_rope_theta local_rope_theta layer_norm_eps type_vocab_size

    moe_latent_size attn_output_gate attn_rotary_emb cla_share_factor enable_moe_block for_llm_compressor
    layernorm_full_attention_beta layernorm_linear_attention_beta layernorm_mlp_beta logit_scale per_layer_config qk_norm_type
    shared_moe_mode use_bidirectional_attention use_cla use_embedding_sharing use_gated_activation use_parallel_block
    use_parallel_embedding use_qk_norm use_rotary_pos_emb use_routing_bias block_use_swiglu _block_types
    embeddings_scale_by_sqrt_dim

    altup_lr_multiplier attention_softmax_in_fp32 masked_softmax_fusion mamba_use_mlp mamba_ssm_dtype block_mlp_init_scale
    block_out_init_scale block_use_xavier_init conv_use_xavier_init calc_logits_for_entire_prompt init_config init_device
    num_logits_to_keep time_step_init_scheme tokenizer_name use_falcon_mambapy use_pad_tok_in_ffn verbose offset_alibi
    skip_bias_add skip_bias_add_qkv summary_activation summary_proj_to_labels summary_type summary_use_proj
    mtp_num_hidden_layers mamba_ssm_cache_dtype mtp_hybrid_override_pattern mtp_layers_block_type mtp_transformer_layers
    mtp_use_dedicated_embeddings num_mtp_layers num_mtp_modules num_nextn_predict_layers use_mtp
    sbert_ce_default_activation_function sentence_transformers reference_compile repad_logits_with_grad sparse_pred_ignore_index
""")
"""In some family no other value of these is tried: sizes, which the shapes of tensors hold; older names of keys that are tried, or
names that transformers' class has not; what is taken with one value only (tests/architectures); what trains or drafts."""


class Change(NamedTuple):
    """One key that has another value than the small model's."""

    key: str
    value: Any

    def names(self) -> tuple[str, ...]:
        """By which a refusal may name it."""
        return self.key, *(self.value if isinstance(self.value, dict) else ())


def changes(config: dict[str, Any]) -> Iterator[Change]:
    """config: with all keys that transformers' class has."""
    for key, value in config.items():
        for other in _others(key, value):
            if other != value:
                yield Change(key, other)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        for own in _ROPES:
            yield Change("rope_parameters", _turned(rope, own))
        for key, value in rope.items():
            if type(value) is float:
                yield Change("rope_parameters", {**rope, key: value * (0.5 if key == "partial_rotary_factor" else 1.5)})
    for key, value in _OF_MPT.items() if "attn_config" in config else ():
        yield Change("attn_config", {**config["attn_config"], key: value})


def _turned(rope: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """own: in the place of what the file says, but for the angle; where kinds of layers have their own, of each."""
    if rope and all(isinstance(one, dict) for one in rope.values()):
        return {kind: _turned(one, own) for kind, one in rope.items()}
    return {"rope_type": "default", "rope_theta": rope.get("rope_theta", 1e4), **own}


def _others(key: str, value: Any) -> tuple[Any, ...]:
    if key in _TABLE:
        return _TABLE[key]
    if key in _ACTIVATION_KEYS:
        return ACTIVATIONS
    if key == "layer_types" and isinstance(value, list):
        return (value[::-1], *([kind] * len(value) for kind in sorted(set(value))))
    if key.endswith(("eps", "epsilon")):
        return (0.3,)
    if type(value) is bool:
        return (not value,)
    if type(value) is float:
        return (value * 1.5 if value else 0.5,)
    if isinstance(value, list) and value and all(type(one) is float for one in value):
        return ([one * (1.3 + 0.2 * nth) for nth, one in enumerate(value)],)
    return ()
