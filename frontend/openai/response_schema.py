"""The shapes of the answers, for /openapi.json: vLLM's names. responses.py and routes.py write them; tests hold both together.

A field that may be left out has UNSET for its default; one that is always null is there for clients of vLLM's that read it.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, defstruct

from meshlm.runtime.client.draft_metrics import SpecDecodeMetrics


class PromptTokensDetails(Struct):
    cached_tokens: int
    created_cache_tokens: None
    multimodal_tokens: None


class UsageInfo(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


class PromptLogprob(Struct):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by position and token id; the first position has none


class ChatCompletionLogProb(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatCompletionLogProbsContent(ChatCompletionLogProb):
    top_logprobs: list[ChatCompletionLogProb]


class ChatCompletionLogProbs(Struct):
    content: list[ChatCompletionLogProbsContent] | None


class FunctionCall(Struct):
    """`arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str | None
    annotations: None
    audio: None
    function_call: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


FinishReason = Literal["stop", "length", "tool_calls", "abort", "repetition"]


class ChatCompletionResponseChoice(Struct):
    """`stop_reason` is the stop string or token id that ended the text."""

    index: int
    message: ChatMessage
    logprobs: ChatCompletionLogProbs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    routed_experts: None


class PerRequestTimingMetrics(Struct):
    """With --enable-per-request-metrics, of an answer with one choice; else null."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None


class PerRequestMetrics(PerRequestTimingMetrics):
    speculative_decoding: SpecDecodeMetrics | UnsetType = UNSET


class _Answer(Struct, kw_only=True):
    """What answers of chats and of completions have alike."""

    id: str
    created: int
    model: str
    usage: UsageInfo
    system_fingerprint: str | None
    service_tier: str | None
    kv_transfer_params: dict[str, Any] | None  # where its prompt's KV is leased to another mesh
    ec_transfer_params: dict[str, Any] | None
    metrics: PerRequestMetrics | None


class ChatCompletionResponse(_Answer, kw_only=True):
    """With stream: true the answer is a stream of events, each a chat.completion.chunk, and `data: [DONE]` at the end."""

    object: Literal["chat.completion"]
    choices: list[ChatCompletionResponseChoice]
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None


class CompletionLogProbs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionResponseChoice(Struct):
    """`stop_reason` is the stop string or token id that ended the text."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    routed_experts: None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class CompletionResponse(_Answer, kw_only=True):
    """With stream: true the answer is a stream of events, each a text_completion of new text, and `data: [DONE]` at the end."""

    object: Literal["text_completion"]
    choices: list[CompletionResponseChoice]


class TokenizeResponse(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class ModelPermission(Struct):
    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: str | None
    is_blocking: bool


class ModelCard(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | None
    parent: str | None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(Struct):
    object: Literal["list"]
    data: list[ModelCard]


class ServerLoad(Struct):
    """Requests that are answered now."""

    server_load: int


class Reset(Struct):
    """Whether the prefix cache is empty now."""

    success: bool
    error: str | UnsetType = UNSET  # why it is not


class Traces(Struct):
    """The files that were written, one a worker."""

    paths: list[str]


class ServerInfo(Struct):
    """The configurations as text, or with config_format=json as objects. Keys and passwords are left out. `vllm_config`: what vLLM
    has too, by its names."""

    meshlm_config: str | dict[str, Any]
    vllm_config: str | dict[str, Any]
    meshlm_env: dict[str, str]
    system_env: dict[str, str | int | None]
    weight_version: str


class RpcResults(Struct):
    """What the method gave in each worker: null, objects and lists as they are, all else as text."""

    results: list[Any]


# Answers of a field or two.
DetokenizeResponse = defstruct("DetokenizeResponse", [("prompt", str)])
Version = defstruct("Version", [("version", str)])
Paused = defstruct("Paused", [("status", Literal["paused", "resumed"])])
WorldSize = defstruct("WorldSize", [("world_size", int)])
IsPaused = defstruct("IsPaused", [("is_paused", bool)])
IsSleeping = defstruct("IsSleeping", [("is_sleeping", bool)])
Aborted = defstruct("Aborted", [("status", Literal["aborted"]), ("aborted", int)])
Scaled = defstruct("Scaled", [("message", str)])
IsScaling = defstruct("IsScaling", [("is_scaling_elastic_ep", bool)])
