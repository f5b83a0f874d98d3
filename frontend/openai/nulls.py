"""Keys that vLLM's answers have with null where nothing fills them: code that was made for it reads them as attributes.

Used by responses.py, which puts values over them.
"""

ANSWER = dict.fromkeys(("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics"))
CHAT = ANSWER | dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))
MESSAGE = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
CHOICE = dict.fromkeys(("logprobs", "stop_reason", "token_ids", "routed_experts"))
TEXT_CHOICE = CHOICE | dict.fromkeys(("prompt_logprobs", "prompt_token_ids"))
PROMPT_DETAILS = dict.fromkeys(("created_cache_tokens", "multimodal_tokens"))
CHAT_CHUNK_CHOICE = dict.fromkeys(("logprobs", "finish_reason", "token_ids"))
TEXT_CHUNK_CHOICE = CHAT_CHUNK_CHOICE | dict.fromkeys(("stop_reason", "prompt_token_ids"))
