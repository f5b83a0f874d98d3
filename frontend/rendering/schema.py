"""The bodies and answers of the routes in this folder; names are vLLM's."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from meshlm.frontend.http.answer_fields import ANSWER, PROMPT
from meshlm.frontend.openai import response_schema as responses
from meshlm.frontend.openai import schema as openai


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """POST /inference/v1/generate, and what the render routes answer. `sampling_params` has vLLM's names; max_tokens that is not among
    them is what the context leaves."""

    changes: ClassVar[tuple[str, ...]] = (PROMPT, ANSWER)

    token_ids: Annotated[list[openai.TokenId], Meta(min_length=1)]
    sampling_params: dict[str, Any]
    request_id: openai.RequestName | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: openai.StreamOptions | None = None
    cache_salt: openai.Salt | None = None
    priority: openai.Priority = 0
    assistant_tokens_mask: list[int] | None = None
    token_offsets: list[list[int]] | None = None
    features: None = None
    kv_transfer_params: dict[str, Any] | None = None


class RenderedRequest(Struct, frozen=True, kw_only=True):
    """A prompt that is ready for POST /inference/v1/generate. token_offsets: of each token in the text, with return_token_offsets.
    assistant_tokens_mask: 1 for tokens that the chat template marks as the assistant's, with return_assistant_tokens_mask."""

    request_id: str
    token_ids: list[int]
    assistant_tokens_mask: list[int] | None
    token_offsets: list[list[int]] | None
    features: None
    sampling_params: dict[str, Any]
    model: str | None
    stream: bool
    stream_options: openai.StreamOptions | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None
    ec_transfer_params: None


class GenerateChoice(Struct, frozen=True, kw_only=True):
    index: int
    logprobs: responses.ChatCompletionLogProbs | None = None
    finish_reason: responses.FinishReason | None = "stop"
    token_ids: list[openai.TokenId] | None = None
    routed_experts: None = None


class GenerateResponse(Struct, frozen=True, kw_only=True):
    """With stream: true the answer is a stream of events without `created` and `model`, and `data: [DONE]` at the end."""

    request_id: str
    choices: list[GenerateChoice]
    model: str | None = None
    created: int | None = None
    usage: responses.UsageInfo | None = None
    prompt_logprobs: responses.PromptLogprobs | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: None = None


class PlainUsage(Struct, frozen=True):
    """Usage as a client may send it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None


class Generated(Struct, frozen=True, kw_only=True):
    """What POST /inference/v1/generate answered, as a client sends it back."""

    choices: list[GenerateChoice]
    request_id: str = ""
    model: str | None = None
    created: int | None = None
    usage: PlainUsage | None = None
    prompt_logprobs: responses.PromptLogprobs | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


class DerenderChatRequest(Struct, frozen=True, kw_only=True):
    """POST /v1/chat/completions/derender."""

    changes: ClassVar[tuple[str, ...]] = (PROMPT, ANSWER)

    generate_response: Generated
    model: str | None = None
    prompt_tokens: Annotated[int, Meta(ge=0)] | None = None
    chat_request: openai.ChatRequest | None = None


class DerenderCompletionRequest(Struct, frozen=True, kw_only=True):
    """POST /v1/completions/derender: an answer for each prompt."""

    changes: ClassVar[tuple[str, ...]] = (PROMPT, ANSWER)

    generate_responses: Annotated[list[Generated], Meta(min_length=1)]
    model: str | None = None
    prompt_tokens: list[Annotated[int, Meta(ge=0)]] | None = None
    completion_request: openai.CompletionRequest | None = None


class BatchChatRequest(openai.ChatRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions/batch: several conversations, and what holds for each of them. The choices are theirs, in order."""

    messages: Annotated[list[list[dict[str, Any]]], Meta(min_length=1, max_length=2048)]  # type: ignore[assignment]
    n: Literal[1] | None = None
    stream: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None  # type: ignore[assignment]
    tools: None = None
    tool_choice: Literal["none"] | None = None
    prompt_logprobs: None = None


class TokenizerInfo(Struct):
    """The tokenizer_config.json, whose other keys differ from model to model."""

    tokenizer_class: str
    chat_template: str | UnsetType = UNSET
