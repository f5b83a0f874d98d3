"""The body of POST /v1/responses, and its answer. What msgspec cannot say is checked in translate.py and items.py."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, defstruct

from meshlm.frontend.http.answer_fields import ANSWER, PROMPT
from meshlm.frontend.openai.schema import Count, ReasoningEffort, RequestName, SamplingFields, StreamOptions, Verbosity

Json = dict[str, Any]
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # These belong to tools and pictures that are not there: no answer has anything of them.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class Reasoning(Struct, frozen=True):
    """A summary is not made; `auto` leaves that to the server."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class Text(Struct, frozen=True):
    format: Json | None = None
    verbosity: Verbosity | None = None


NAMES: Mapping[str, str] = {
    "messages": "input",
    "system": "instructions",
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": "top_logprobs",
    "truncate_prompt_tokens": "truncation",
}


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/responses."""

    names_here: ClassVar[Mapping[str, str]] = NAMES

    input: str | list[Json] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    include: list[Include] | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    metadata: dict[str, str] | None = None
    tools: list[Json] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool = True
    text: Text | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    request_id: RequestName | None = None
    chat_template_kwargs: Json | None = None
    vllm_xargs: Json | None = None
    prompt: Any = None
    context_management: Any = None
    image: Any = None
    access_programs: Any = None
    enable_response_messages: bool = False
    previous_input_messages: list[Json] | None = None


class Input(Struct, frozen=True, kw_only=True):
    """The fields that make the prompt of a body which has a part of POST /v1/responses."""

    changes: ClassVar[tuple[str, ...]] = (PROMPT, ANSWER)
    names_here: ClassVar[Mapping[str, str]] = NAMES

    input: str | list[Json] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None


class CompactRequest(Input, frozen=True, kw_only=True):
    """POST /v1/responses/compact."""

    prompt_cache_key: str | None = None
    service_tier: str | None = None


class InputTokensRequest(Input, frozen=True, kw_only=True):
    """POST /v1/responses/input_tokens: the fields of POST /v1/responses that its prompt is made of."""

    changes: ClassVar[tuple[str, ...]] = (PROMPT,)

    conversation: Any = None
    tools: list[Json] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: Json | None = None


class OutputTokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class OutputLogprob(OutputTokenLogprob, frozen=True):
    top_logprobs: list[OutputTokenLogprob]


class OutputText(Struct, frozen=True):
    type: Literal["output_text"]
    text: str
    annotations: list[Json]
    logprobs: list[OutputLogprob]


class ReasoningText(Struct, frozen=True):
    type: Literal["reasoning_text"]
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Struct, frozen=True, tag="message"):
    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class ReasoningItem(Struct, frozen=True, tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[Json]
    content: list[ReasoningText]
    encrypted_content: str | None


class FunctionCallItem(Struct, frozen=True, tag="function_call"):
    id: str
    call_id: str
    name: str
    namespace: str | None
    arguments: str
    status: ItemStatus


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponsesUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class RawMessage(Struct, frozen=True):
    """What the model reads or writes: its text, special tokens of the prompt included, and its tokens."""

    message: str
    tokens: list[int]
    type: Literal["raw_message_tokens"]


class ResponsesResponse(Struct, frozen=True, kw_only=True):
    """With stream: true the answer is a stream of events, from response.created to response.completed, .incomplete or .failed."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[MessageItem | ReasoningItem | FunctionCallItem]
    usage: ResponsesUsage | None
    instructions: str | None
    previous_response_id: str | None
    conversation: Json | None
    background: bool
    store: bool
    metadata: dict[str, str]
    tools: list[Json]
    tool_choice: str | Json
    parallel_tool_calls: bool
    max_output_tokens: int | None
    max_tool_calls: int | None
    reasoning: Json | None
    text: Json
    temperature: float
    top_p: float
    top_logprobs: int
    presence_penalty: float
    frequency_penalty: float
    truncation: str
    service_tier: str
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    prompt: None
    kv_transfer_params: None
    ec_transfer_params: None
    input_messages: list[RawMessage] | None  # with enable_response_messages, once it has ended
    output_messages: list[RawMessage] | None


class ConversationRequest(Struct, frozen=True):
    """POST /v1/conversations."""

    items: list[Json] | None = None
    metadata: dict[str, str] | None = None


class MetadataRequest(Struct, frozen=True):
    """POST /v1/conversations/{conversation_id}."""

    metadata: dict[str, str] | None = None


class ItemsRequest(Struct, frozen=True):
    """POST /v1/conversations/{conversation_id}/items."""

    items: list[Json]


class ConversationResponse(Struct, frozen=True):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class InputItems(Struct, frozen=True):
    """Messages, calls and results as they were sent, each with an id."""

    object: Literal["list"]
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool


_COUNTED = [("object", Literal["response.input_tokens"]), ("input_tokens", int)]
InputTokensResponse = defstruct("InputTokensResponse", _COUNTED)
_GONE = [("id", str), ("deleted", bool)]
DeletedConversation = defstruct("DeletedConversation", [*_GONE, ("object", Literal["conversation.deleted"])])
DeletedResponse = defstruct("DeletedResponse", [*_GONE, ("object", Literal["response"])])
