"""The names of all fields that request bodies have: of vLLM 0.26 and of OpenAI's API (its client 3.52). Data of test_fields.py."""


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VLLM_COMPLETION = names(
    """
    add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo frequency_penalty
    ignore_eos include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids
    logprobs max_tokens min_p min_tokens model n presence_penalty priority prompt prompt_embeds
    prompt_logprobs repetition_detection repetition_penalty request_id response_format return_token_ids
    return_token_offsets return_tokens_as_token_ids seed skip_special_tokens spaces_between_special_tokens
    stop stop_token_ids stream stream_options structured_outputs suffix temperature thinking_token_budget
    top_k top_p truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs
    """
)
VLLM_CHAT = names(
    """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
    chat_template_kwargs continue_final_message documents ec_transfer_params echo frequency_penalty ignore_eos
    include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logit_bias
    logprob_token_ids logprobs max_completion_tokens max_tokens media_io_kwargs messages min_p min_tokens
    mm_processor_kwargs model n parallel_tool_calls presence_penalty priority prompt_logprobs reasoning_effort
    repetition_detection repetition_penalty request_id response_format return_assistant_tokens_mask
    return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids seed
    skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_options
    structured_outputs temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p
    truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs
    """
)
VLLM_TOKENIZE = names(
    """
    add_generation_prompt add_special_tokens chat_template chat_template_kwargs continue_final_message
    media_io_kwargs messages mm_processor_kwargs model prompt return_token_strs tools
    """
)
VLLM_DETOKENIZE = names(
    """
    model tokens
    """
)
VLLM_STREAM_OPTIONS = names(
    """
    continuous_usage_stats include_usage
    """
)
OPENAI_COMPLETION = names(
    """
    best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop
    stream stream_options suffix temperature top_p user
    """
)
OPENAI_CHAT = names(
    """
    audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
    messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty
    prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format
    safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
    top_logprobs top_p user verbosity web_search_options
    """
)
OPENAI_STREAM_OPTIONS = names(
    """
    include_obfuscation include_usage
    """
)

# Paths of vLLM 0.26.
VLLM_PATHS = names(
    """
    /abort_requests /classify /collective_rpc /detokenize /docs /finish_weight_update /generative_scoring /get_world_size
    /health /inference/v1/generate /init_weight_transfer_engine /invocations /is_paused /is_scaling_elastic_ep
    /is_sleeping /load /metrics /openapi.json /pause /ping /pooling /ready /readyz /redoc /rerank /reset_encoder_cache
    /reset_mm_cache /reset_prefix_cache /resume /scale_elastic_ep /score /server_info /sleep /start_draft_weight_update
    /start_profile /start_weight_update /stop_profile /tokenize /tokenizer_info /update_weights /v1/audio/transcriptions
    /v1/audio/translations /v1/chat/completions /v1/chat/completions/batch /v1/chat/completions/derender
    /v1/chat/completions/render /v1/completions /v1/completions/derender /v1/completions/render /v1/embeddings
    /v1/load_lora_adapter /v1/messages /v1/messages/count_tokens /v1/models /v1/rerank /v1/responses
    /v1/responses/resp_1 /v1/responses/resp_1/cancel /v1/score /v1/unload_lora_adapter /v2/embed /v2/rerank /version
    /wake_up
    """
)
