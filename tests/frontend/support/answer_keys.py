"""The keys of vLLM 0.26's answers, null or not: a key that is missing is an AttributeError in code made for vLLM. Data of
test_answer_keys.py."""

from request_fields import names

CHAT_ANSWER = names(
    """
    choices created ec_transfer_params id kv_transfer_params metrics model object prompt_logprobs prompt_text
    prompt_token_ids service_tier system_fingerprint usage
    """
)
CHAT_CHOICE = names(
    """
    finish_reason index logprobs message routed_experts stop_reason token_ids
    """
)
CHAT_MESSAGE = names(
    """
    annotations audio content function_call reasoning refusal role tool_calls
    """
)
COMPLETION_ANSWER = names(
    """
    choices created ec_transfer_params id kv_transfer_params metrics model object service_tier
    system_fingerprint usage
    """
)
COMPLETION_CHOICE = names(
    """
    finish_reason index logprobs prompt_logprobs prompt_token_ids routed_experts stop_reason text token_ids
    """
)
USAGE = names(
    """
    completion_tokens prompt_tokens prompt_tokens_details total_tokens
    """
)
PROMPT_DETAILS = names(
    """
    cached_tokens created_cache_tokens multimodal_tokens
    """
)
MODEL_CARD = names(
    """
    created id max_model_len object owned_by parent permission root
    """
)
MODEL_PERMISSION = names(
    """
    allow_create_engine allow_fine_tuning allow_logprobs allow_sampling allow_search_indices allow_view
    created group id is_blocking object organization
    """
)

# Of streams: what is set in every chunk, in the first one, and in the last one of a choice.
CHAT_CHUNK = names("id object created model choices")
CHAT_FIRST_CHUNK = CHAT_CHUNK | names("prompt_token_ids prompt_text")
CHAT_FIRST_CHUNK_CHOICE = names("index delta logprobs finish_reason")
CHAT_CHUNK_CHOICE = CHAT_FIRST_CHUNK_CHOICE | names("token_ids")
CHAT_LAST_CHUNK_CHOICE = CHAT_CHUNK_CHOICE | names("stop_reason")
COMPLETION_CHUNK = CHAT_CHUNK
COMPLETION_CHUNK_CHOICE = names("index text logprobs finish_reason stop_reason prompt_token_ids token_ids")
USAGE_CHUNK = CHAT_CHUNK | names("usage")
