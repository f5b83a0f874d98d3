"""The request bodies: OpenAI's fields and vLLM's extras, with the values that are allowed.

msgspec checks types and ranges and its message names the field; what needs more than one field is checked in parse.py.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from meshlm.frontend.http.answer_fields import ANSWER, PROMPT
from meshlm.protocol.samplers import OPTIONAL

MAX_CHOICES = 128  # per prompt
MAX_SEQUENCES = 4096  # prompts x choices
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096
MAX_BAD_WORDS = 1024
MAX_LOGPROB_IDS = 128
MAX_PATTERN = 1024  # tokens
MAX_TOKENS = 1 << 30
MAX_TIMEOUT_S = 1e9

Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
Share = Annotated[float, Meta(gt=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
RequestName = Annotated[str, Meta(pattern=r"^[!-~]{1,128}$(?!\n)")]  # it comes back in a header; not the $ of Python
Logprobs = Annotated[int, Meta(ge=-1)]  # -1: of the whole vocabulary
TokenId = Annotated[int, Meta(ge=0, le=0x7FFF_FFFF)]
Priority = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
Salt = Annotated[str, Meta(min_length=1)]
NumDrafts = Annotated[int, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
TOOL_CHOICE = {
    "description": "A function forces a call of it, and required one of any of the tools.",
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
    ],
}
GUIDED_JSON = {"description": "A JSON schema, as an object or as JSON text.", "type": ["object", "string", "null"]}
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

Verbosity = Literal["low", "medium", "high"]


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # in each chunk; with include_usage


class RepetitionDetection(Struct, frozen=True):
    """An answer whose last tokens are one pattern of these lengths, min_count times in a row, ends. A max_pattern_size of 0 is off."""

    max_pattern_size: Annotated[int, Meta(ge=0, le=MAX_PATTERN)] = 0
    min_pattern_size: Annotated[int, Meta(ge=0, le=MAX_PATTERN)] = 0
    min_count: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0


if TYPE_CHECKING:

    class Samplers(Struct, frozen=True, kw_only=True):
        """llama.cpp's samplers, by the names of `LlamaSamplers`; each may be null."""

else:
    Samplers = msgspec.defstruct("Samplers", OPTIONAL, frozen=True, kw_only=True)


class SamplingFields(Samplers, frozen=True, kw_only=True):
    """The fields that completions, chats and responses take. changes: what fields of other servers would change here
    (answer_fields.py)."""

    changes: ClassVar[tuple[str, ...]] = (PROMPT, ANSWER)

    model: str | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    logit_bias: dict[str, float] | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    priority: Priority = 0
    cache_salt: Salt | None = None
    deterministic: bool | None = None  # it is the case, with --deterministic, or refused
    num_speculative_tokens: NumDrafts | None = None  # drafted in a step, at most; changes no answer


class Common(SamplingFields, frozen=True, kw_only=True):
    """The fields that both endpoints take."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    response_format: dict[str, Any] | None = None
    guided_json: Annotated[Any, Meta(extra_json_schema=GUIDED_JSON)] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    structural_tag: str | None = None
    grammar: str | None = None  # llama.cpp's, and SGLang's ebnf
    ebnf: str | None = None
    regex: str | None = None  # SGLang's
    json_schema: Annotated[Any, Meta(extra_json_schema=GUIDED_JSON)] = None  # llama.cpp's and SGLang's
    stop_token_ids: list[TokenId] | None = None
    spaces_between_special_tokens: bool = True
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_IDS)] | None = None
    repetition_detection: RepetitionDetection | None = None
    use_beam_search: bool = False  # n is then the beams' number
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None  # of logits processors
    length_penalty: Annotated[float, Meta(ge=-16.0, le=16.0)] | None = None  # of beam search alone
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None  # -1: as many as the context holds
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: Logprobs | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None  # -1: none; of a chat's reasoning
    request_id: RequestName | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None  # where the KV of its prompt comes from, or goes to
    return_tokens_as_token_ids: bool | None = None
    return_token_offsets: bool | None = None  # of the render routes
    timeout: Annotated[float, Meta(gt=0.0, le=MAX_TIMEOUT_S)] | None = None
    user: str | None = None
    add_special_tokens: bool | None = None


class CompletionRequest(Common, frozen=True, kw_only=True):
    """POST /v1/completions."""

    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None  # 0: with echo, the prompt alone
    prompt: Any = None  # text, token ids, or a list of either: msgspec has no such union; checked in parse.py
    prompt_embeds: str | list[str] | None = None  # base64 of tensors [tokens, hidden] that torch.save wrote
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Logprobs | None = None
    suffix: str | None = None
    multi_modal_data: dict[str, Any] | None = None  # by modality, a URL or a list of them
    multi_modal_uuids: dict[str, Any] | None = None  # their names, in the same order
    mm_processor_kwargs: dict[str, Any] | None = None


class ChatRequest(Common, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    mm_processor_kwargs: dict[str, Any] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    echo: bool = False
    modalities: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[Any, Meta(extra_json_schema=TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Verbosity | None = None  # the template's variable of that name
    return_prompt_text: bool | None = None
    return_assistant_tokens_mask: bool = False  # of the render route
    include_reasoning: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | UnsetType = UNSET  # true, unless the final message is continued
    continue_final_message: bool = False


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """POST /tokenize: `prompt`, or `messages`."""

    changes: ClassVar[tuple[str, ...]] = (PROMPT,)

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | UnsetType = UNSET  # true for a prompt, false for messages: their template has them
    add_generation_prompt: bool | UnsetType = UNSET
    continue_final_message: bool = False
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


class Settings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """GET and POST /settings: settings by the names of their flags; a change may leave out those that stay."""

    log_level: str | None = None
    log_requests_per_s: Annotated[float, Meta(gt=0)] | None = None
    max_concurrent_requests: Annotated[int, Meta(ge=1)] | None = None
    max_concurrent_bytes: Annotated[int, Meta(ge=1 << 20)] | None = None
    max_waiting: Annotated[int, Meta(ge=0)] | None = None
    dp_roles: Annotated[str, Meta(max_length=64)] | None = None


class CollectiveRpcRequest(Struct, frozen=True, kw_only=True):
    """POST /collective_rpc: a method of the worker extension, and what it gets. timeout: in seconds."""

    method: Annotated[str, Meta(min_length=1, max_length=256)]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None


class LoadAdapterRequest(Struct, frozen=True, kw_only=True):
    """POST /v1/load_lora_adapter: a folder that every node has, and the name that it gets. load_inplace: the name may be taken."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapterRequest(Struct, frozen=True, kw_only=True):
    """POST /v1/unload_lora_adapter. lora_int_id: vLLM's number of it, which nothing is known by here."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]
    lora_int_id: int | None = None


class AbortRequest(Struct, frozen=True, kw_only=True):
    """POST /abort_requests: the ids of answers, or the X-Request-Id of requests; none means all."""

    request_ids: Annotated[list[str], Meta(max_length=4096)] | None = None


class ScaleRequest(Struct, frozen=True, kw_only=True):
    """POST /scale_elastic_ep: the ranks to have. drain_timeout: seconds for what runs on a rank that is removed; null: the mesh's."""

    new_data_parallel_size: Annotated[int, Meta(ge=1, le=1024)]
    drain_timeout: Annotated[float, Meta(ge=0, le=86400)] | None = None
