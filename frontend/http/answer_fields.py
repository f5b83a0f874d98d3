"""Every field of a request body that changes or constrains an answer, over all known servers: OpenAI's, Anthropic's, vLLM's, SGLang's,
llama.cpp's, TGI's, Ollama's, TensorRT-LLM's, LMDeploy's, Mistral's, Cohere's, OpenRouter's and their like. Data.

The rule of every route: such a field is honoured (its body's Struct has it) or refused by name, never ignored; bodies.py holds it. A
Struct says by `changes` which of the groups below change its answers. Fields that nobody knows are told in a log line.
"""

from typing import Any

from meshlm.protocol import samplers

PROMPT, ANSWER, VECTORS = "prompt", "answer", "vectors"  # groups: what a field changes

_MEDIA = "images and sound are not supported"
_KV_TRANSFER = "KV transfer is not supported"
_FUNCTIONS = "not supported; send tools, its newer name"
_SAMPLER = "this sampler is not supported; temperature, top_p, top_k, min_p, penalties and llama.cpp's are"
_LORA = "not taken; model names the adapter (--lora-modules)"
_SEARCH = "not supported; nothing is searched"
_GUIDED = "not taken on this path; structured_outputs or the path's own form is"
_TEMPLATE = "not supported here; chat_template_kwargs has the template's variables"
_LENGTH = "not a name of this path; max_tokens, or the path's own, is"
_ENGINE = "not supported"


def _table(groups: dict[str, str]) -> dict[str, str]:
    """The reason of each name, of names by reason."""
    return {name: why for why, names in groups.items() for name in names.split()}


# Why a field is refused where no Struct has it, and the names of those; "" says that this path does not take it.
OF_PROMPT = _table(
    {
        "": """
            messages prompt prompts input inputs query system instructions tools suffix documents context
            add_generation_prompt continue_final_message add_special_tokens chat_template chat_template_kwargs
            truncate_prompt_tokens truncation_side truncation prompt_embeds input_embeds reasoning_effort
            reasoning thinking context_management thread previous_response_id conversation session_params
            previous_input_messages
        """,
        "not supported; the prompt has token ids": "input_ids",
        _MEDIA: """
            mm_processor_kwargs media_io_kwargs image images image_data video_data audio_data
            max_dynamic_patch min_dynamic_patch multi_modal_data multi_modal_uuids
        """,
        _TEMPLATE: "enable_thinking think thinking_config reasoning_mode disable_reasoning prompt_mode",
        "not supported; say it in a message": "safe_prompt guardrails personality",
        _FUNCTIONS: "functions",
        "not supported; give tools, whose calls the client answers": "mcp_servers",
        "not supported; no code is run": "container",
        "its fields stand in the body itself; clients put them there": "extra_body",
        "its fields stand in the body itself, by OpenAI's and vLLM's names": "parameters options",
        "not supported; a prompt of /v1/completions is as it is": """
            raw template input_prefix input_suffix input_extra tool_prompt guideline
        """,
        _LORA: "lora lora_path lora_request adapters adapter_id adapter_name adapter_source lora_id",
        "not supported; prefixes are cached for all requests": "cached_content",
    }
)
OF_ANSWER = _table(
    {
        "": """
            n best_of max_tokens max_completion_tokens max_output_tokens min_tokens stop stop_sequences
            stop_token_ids seed temperature top_p top_k min_p presence_penalty frequency_penalty
            repetition_penalty logit_bias length_penalty logprobs top_logprobs prompt_logprobs
            logprob_token_ids echo stream stream_options include include_reasoning ignore_eos
            skip_special_tokens spaces_between_special_tokens include_stop_str_in_output allowed_token_ids
            bad_words use_beam_search repetition_detection vllm_xargs thinking_token_budget return_token_ids
            return_tokens_as_token_ids return_token_offsets return_assistant_tokens_mask return_prompt_text
            enable_response_messages timeout tool_choice parallel_tool_calls max_tool_calls modalities text
            output_config output_format background
        """
        + " ".join(samplers.NAMES),
        _GUIDED: """
            response_format structured_outputs json_schema grammar regex ebnf guided_json guided_regex
            guided_choice guided_grammar guided_json_object guided_whitespace_pattern guided_decoding_backend
            guided_decoding structural_tag
        """,
        "not supported; response_format is": """
            format guided_toplevel_grammar json_object regex_pattern grammar_string
        """,
        "not supported; structured_outputs has structural tags": """
            grammar_lazy grammar_triggers grammar_type preserved_tokens
        """,
        _FUNCTIONS: "function_call",
        "only text is supported": "audio",
        _ENGINE: """
            logits_processors logits_processor custom_logit_processor custom_params access_programs n_keep
            n_discard n_indent token_healing parse_tool_calls chat_format post_sampling_probs details
            decoder_input_details return_ppl return_context_logits return_generation_logits
            return_hidden_states return_routed_experts return_full_text return_tokens raw_output result_format
            incremental_output
        """,
        _KV_TRANSFER: "ec_transfer_params bootstrap_host bootstrap_port bootstrap_room",
        _SEARCH: """
            web_search_options search_parameters search_options enable_search search_settings search_mode
            plugins citation_options citations include_domains exclude_domains compound_custom
        """,
        "not supported; nothing is moderated": "moderation safety_mode safety_model",
        "taken by the chat and responses endpoints alone": "verbosity",
        "taken by completions, chats and /inference/v1/generate alone": "kv_transfer_params",
        _SAMPLER: """
            typical top_a tfs tfs_z top_p_min mirostat
            mirostat_mode mirostat_tau mirostat_eta mirostat_target mirostat_lr dynatemp_range
            dynatemp_exponent dynatemp_low dynatemp_high min_temp max_temp smoothing_factor smoothing_curve
            skew eta_cutoff epsilon_cutoff adaptive_target adaptive_decay dry_range dry_sequence_breaker_ids
            penalty_alpha guidance_scale cfg_scale negative_prompt no_repeat_ngram_size
            encoder_repetition_penalty watermark samplers sampler_seq sampler_priority temperature_last
            min_keep quadratic_sampling nsigma
        """,
        "not supported; repetition_penalty is its name here": "repeat_penalty",
        "not supported; penalties look at all tokens": """
            repeat_last_n penalty_range repetition_penalty_range penalty_decay penalize_nl
        """,
        "not supported; seed is its name here": "random_seed sampling_seed",
        "not supported; temperature 0 chooses the likeliest": "do_sample",
        "not supported; stop and stop_token_ids are its names here": "stop_words stop_words_list end_id",
        "not supported; stop has texts": "stop_regex",
        "not supported; include_stop_str_in_output is its name here": "no_stop_trim",
        "not supported; bad_words and logit_bias are": """
            banned_tokens banned_strings bad_words_list embedding_bias token_bans
        """,
        _LENGTH: "max_new_tokens n_predict num_predict max_length",
        "not supported; min_tokens is its name here": "min_new_tokens min_length",
        "not supported; timeout is its name here": "t_max_predict_ms max_time",
        "not supported; truncate_prompt_tokens is": """
            num_ctx truncate prompt_truncate_len context_length_exceeded_behavior
        """,
        "not supported; logprobs and top_logprobs are": """
            return_logprob logprob_start_len top_logprobs_num token_ids_logprob n_probs top_n_tokens
        """,
        "not supported; include_reasoning says whether it is told": """
            separate_reasoning stream_reasoning reasoning_format reasoning_history reasoning_content
        """,
        "not supported; thinking_token_budget is its name here": """
            reasoning_budget thinking_budget reasoning_tokens
        """,
        "not supported; its fields stand in the body itself": "sampling_params",
        "not supported; use_beam_search and n are": """
            beam_width num_beams beam_search_diversity_rate early_stopping num_return_sequences
        """,
        "not supported; top_k and top_p are their names here": "k p",
        "not supported; a tool's own strict is": "strict_tools disable_tool_validation force_single_step",
        "one speed is served": "speed",
        "not supported; max_tokens and thinking.budget_tokens are": "output_config.task_budget",
        "not supported; thinking_token_budget and include_reasoning are, on the chat endpoint": """
            reasoning.max_tokens reasoning.exclude reasoning.enabled
        """,
    }
)
OF_VECTORS = _table(
    {
        "": """
            dimensions output_dimension normalize encoding_format embed_dtype endianness use_activation task
            input_type embedding_types truncate max_tokens_per_query max_tokens_per_doc top_n return_documents
            instruction activation
        """,
        "not supported; encoding_format and embed_dtype are": "output_dtype embedding_type",
        "not supported; send the prompt's text before the input": "prompt_name",
        _ENGINE: """
            late_chunking overlap_tokens max_chunks_per_doc rank_fields softmax raw_scores return_text
            truncation_direction
        """,
        _MEDIA: "images",
    }
)
GROUPS = {PROMPT: OF_PROMPT, ANSWER: OF_ANSWER, VECTORS: OF_VECTORS}

# Values that ask for nothing; of other fields, those that are false or empty.
ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "web_search_options": (),
    "n": (1,),
    "best_of": (1,),
    "num_return_sequences": (1,),
    "beam_width": (1,),
    "num_beams": (1,),
    **dict.fromkeys(("temperature", "seed", "random_seed", "sampling_seed"), ()),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "max_tool_calls", "thinking_token_budget"), ()),
    **dict.fromkeys(("n_predict", "num_predict"), (-1,)),
    **dict.fromkeys(("top_p", "p", "typical_p", "typical", "tfs", "tfs_z", "repetition_penalty"), (1,)),
    **dict.fromkeys(("repeat_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "cfg_scale", "smoothing_curve", "xtc_threshold"), (0, 1)),
    **dict.fromkeys(("top_k", "k"), (0, -1)),
    "top_n_sigma": (0, -1),
    "top_logprobs": (0,),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "include_reasoning", "do_sample"), (True,)),
    **dict.fromkeys(("separate_reasoning", "stream_reasoning", "parse_tool_calls", "return_documents"), (True,)),
    **dict.fromkeys(("add_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("enable_thinking", "think"), ()),
    "reasoning_effort": (),
    "reasoning_format": ("auto",),
    "modalities": (["text"], []),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
    "speed": ("standard",),
    "encoding_format": ("float",),
    "embed_dtype": ("float32",),
    "endianness": ("native",),
    "truncation_direction": ("right", "Right"),
    "truncate": (False, "END"),
    "normalize": (True,),
    "use_activation": (True,),
    # Settings of a sampler that another field switches on, with the values that clients send beside it.
    **dict.fromkeys(("mirostat_tau", "mirostat_target"), (0, 5)),
    **dict.fromkeys(("mirostat_eta", "mirostat_lr"), (0, 0.1)),
    **dict.fromkeys(("dynatemp_exponent", "min_temp", "max_temp", "dynatemp_low", "dynatemp_high"), (0, 1)),
    "dry_base": (0, 1.75),
    "dry_allowed_length": (0, 2),
    "adaptive_decay": (0, 0.9),
    "adaptive_target": (0, -1),
    **dict.fromkeys(("repeat_last_n", "penalty_range", "repetition_penalty_range", "dry_penalty_last_n", "dry_range"), (0, -1)),
    "dry_sequence_breakers": ([], ["\n", ":", '"', "*"]),
}  # fmt: skip

# Fields that are known and change nothing here: why.
NEEDLESS = {
    "metadata": "nothing is stored",
    "store": "nothing is stored",
    "prediction": "it makes an answer sooner, not another one",
    "prompt_cache_key": "prefixes are cached for all requests",
    "prompt_cache_options": "prefixes are cached for all requests",
    "prompt_cache_retention": "prefixes are cached while there is room",
    "safety_identifier": "it names the client's user, as user does",
    "service_tier": "there is one tier",
    "stream_options.include_obfuscation": "no chunk has padding",
}

# Fields of one API that ask for what is not there, where its body has them so that its own clients' empty values are taken.
REFUSED_MESSAGES = {name: OF_PROMPT[name] for name in ("mcp_servers", "container")}
REFUSED_RESPONSES = {
    "prompt": "prompt templates are not supported; send the text as instructions and input",
    "context_management": "not supported; truncation 'auto' shortens what is too long",
    "image": "only text is supported",
}


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether the field may be left out. A form's values are texts."""
    if value is None:
        return True
    neutral = ASKS_FOR_NOTHING.get(name)
    if neutral is None:
        return not value or value in ("false", "0")
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def why_refused(name: str, changes: tuple[str, ...]) -> str:
    """Why a field that no Struct has is refused where such things change the answer; empty where it changes nothing there."""
    for group in changes:
        if name in GROUPS[group]:
            return GROUPS[group][name] or "not supported on this path"
    return ""
