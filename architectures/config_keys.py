"""Every key of a config.json that is known: read, needless, or one that changes what a model computes and is not honoured.

`check` refuses the last kind by name, unless the value asks for nothing, and names keys that it does not know. Called by
runtime/model_files/model_config.py. The tables name keys of transformers' configuration classes and of models that are served as
their own code has them.
"""

import re
from collections.abc import Set
from typing import Any

from meshlm.architectures.config_values import shown, words

HONOURED = words("""
    architectures model_type dtype torch_dtype eos_token_id quantization_config compression_config quantization
    auto_map vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim max_position_embeddings rms_norm_eps hidden_act tie_word_embeddings attention_bias mlp_bias
    rope_theta rope_scaling rope_parameters partial_rotary_factor original_max_position_embeddings
    sliding_window use_sliding_window max_window_layers layer_types
    temperature top_p top_k min_p repetition_penalty max_new_tokens is_matryoshka matryoshka_dimensions
""")
NEEDLESS = words("""
    is_llama_config _name_or_path transformers_version transformers.js_config use_cache pretraining_tp return_dict
    output_attentions output_hidden_states chunk_size_feed_forward id2label label2id problem_type num_labels
    is_decoder pruned_heads tie_encoder_decoder torchscript use_bfloat16 tf_legacy_loss finetuning_task
    task_specific_params tokenizer_class prefix gradient_checkpointing use_return_dict return_dict_in_generate
    output_scores cross_attention_hidden_size attn_implementation unsloth_version unsloth_fixed model_name
    architecture router_aux_loss_coef output_router_logits use_flash_attn use_flash_attention
    cache_implementation model_max_length max_sequence_length do_sample max_length min_length early_stopping
    num_beams num_beam_groups num_return_sequences length_penalty diversity_penalty typical_p
    aux_loss_alpha seq_aux ep_size encoder_no_repeat_ngram_size exponential_decay_length_penalty
""")
"""Training, bookkeeping, transformers' own generation, outputs that are not served, and pretraining_tp, which only splits products."""
_NEEDLESS = re.compile(
    r"_attn_implementation.*|.*dropout.*|.*_pdrop|layerdrop|.*_token_(id|index)|.*init(ializer)?_(range|std|factor)"
)

# What else asks for nothing, beside null, false, 0 and what is empty.
_ONE = frozenset((1,))
NEUTRAL: dict[str, frozenset[Any]] = dict.fromkeys(
    words("""
    embedding_multiplier residual_multiplier logits_scaling logit_scale lm_head_multiplier key_multiplier
    attention_in_multiplier attention_out_multiplier attention_output_multiplier output_multiplier_scale
    embedding_multiplier_scale embedding_scale residual_scale scale_emb logits_mup_width_multiplier
    attention_value_scale rope_ratio rotary_pct rotary_percentage
"""),
    _ONE,
) | {
    "hidden_activation": frozenset(("silu",)),
    "activation_function": frozenset(("silu",)),
    "mlp_hidden_act": frozenset(("silu",)),
    "position_embedding_type": frozenset(("rope", "rotary")),
    "norm_type": frozenset(("rms_norm", "rmsnorm")),
    "scoring_func": frozenset(("softmax",)),
    "topk_method": frozenset(("greedy",)),
}
MATHS = frozenset(NEUTRAL) | words("""
    attention_multiplier scale_depth dim_model_base attn_logit_softcapping final_logit_softcapping
    logits_soft_cap output_logit_soft_cap query_pre_attn_scalar attn_scale clip_qkv attention_chunk_size
    attn_temperature_tuning floor_scale no_rope_layers no_rope_layer_interval nope_layer_interval
    sliding_window_pattern sliding_window_size attention_window_size window_size local_attention local_layer_ids
    global_attn_every_n_layers attention_type attention_types rope_local_base_freq local_rope_theta
    layer_rope_theta rope_interleave rope_interleaved rotary_dim rotary_emb_base alibi alibi_bias_max use_alibi mrope_section
    use_mrope use_logn_attn use_dynamic_ntk use_bidirectional_attention is_bidirectional bidirectional bias
    use_bias qkv_bias use_qkv_bias add_bias_linear add_qkv_bias attn_bias attention_out_bias lm_head_bias
    use_qk_norm qk_norm qk_layernorm use_parallel_residual parallel_residual parallel_attn use_post_norm
    use_sandwich_norm apply_residual_connection_post_layernorm scale_embedding normalize_embeddings
    rescale_embeddings scale_attn_by_inverse_layer_idx attn_output_gate use_attention_gate mup_enabled use_mup
    use_sinks attention_sink_bias is_encoder_decoder add_cross_attention encoder decoder encoder_config
    decoder_config encoder_layers decoder_layers text_config thinker_config vision_tower speech_config
    num_experts num_local_experts n_routed_experts num_experts_per_tok n_shared_experts num_shared_experts
    shared_expert_intermediate_size first_k_dense_replace enable_moe_block is_moe kv_lora_rank q_lora_rank
    qk_rope_head_dim qk_nope_head_dim qk_head_dim v_head_dim num_kv_shared_layers num_attention_heads_per_layer
    num_key_value_heads_per_layer block_configs block_types layers_block_type mlp_layer_types attn_layer_indices
    attn_layer_period num_nextn_predict_layers num_mtp_layers hidden_size_per_layer_input word_embed_proj_dim
    embedding_size swiglu_limit swiglu_alpha sparse_attention_config compress_ratios use_differential_attention
    value_residual loop_count num_recurrences
""")
_MATHS = re.compile(
    r"(moe|expert|mamba|ssm|linear_(attn|conv|key|value|num)|vision|audio|mm|image|video|index|altup|swa)_.+"
)
# These ask for something by being false.
ONLY_TRUE = frozenset(("is_causal", "causal", "use_rope", "scale_attn_weights"))


class Foreign(ValueError):
    """A key that changes what the model computes, in a way that is not honoured."""


def is_needless(name: str) -> bool:
    """Whether this key has no part in what a model computes."""
    return name in NEEDLESS or bool(_NEEDLESS.fullmatch(name))


def check(config: dict[str, Any], architecture: str, honoured: Set[str] = frozenset()) -> tuple[str, ...]:
    """The keys that are not known, of those that ask for something. Foreign names one that is not honoured. honoured: keys that
    this family honours beyond those of all."""
    unknown = []
    for name, value in config.items():
        if value is None or name in HONOURED or name in honoured or is_needless(name):
            continue
        if name in ONLY_TRUE:
            neutral = value is True
        elif name in MATHS or _MATHS.fullmatch(name):
            neutral = not value or (isinstance(value, int | float | str) and value in NEUTRAL.get(name, ()))
        else:
            if value:  # false, 0 and what is empty asks for nothing that is not done
                unknown.append(name)
            continue
        if not neutral:
            raise Foreign(
                f"{name} {shown(value)} changes what the model computes, and {architecture} here does not honour it"
            )
    return tuple(unknown)
