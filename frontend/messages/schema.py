"""The bodies of Anthropic's API, and its answers. What msgspec cannot say is checked in translate.py.

`answers` have a test that compares them with the client's own types.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from meshlm.frontend.http.answer_fields import ANSWER, PROMPT
from meshlm.frontend.openai.schema import MAX_TOKENS, Count, NumDrafts, Priority, Salt, Share, Temperature

Json = dict[str, Any]
Effort = Literal["low", "medium", "high", "xhigh", "max"]


class Thinking(Struct, frozen=True):
    """`adaptive` is reasoning without a budget."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    display: Literal["summarized", "updates", "omitted"] | None = None  # a text model's reasoning is told as it is


class ToolChoice(Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(Struct, frozen=True):
    type: Literal["json_schema"]
    schema: Json


class OutputConfig(Struct, frozen=True):
    effort: Effort | None = None
    format: OutputFormat | None = None


class Conversation(Struct, frozen=True, kw_only=True):
    """The fields that make the prompt. `cache_control` and the like change nothing: prefixes are cached for all requests."""

    changes: ClassVar[tuple[str, ...]] = (PROMPT,)

    model: str
    messages: list[Json]
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Json | None = None
    cache_control: Any = None
    speed: Literal["standard"] | None = None
    user_profile_id: Any = None
    workspace_id: Any = None
    context_management: Any = None
    mcp_servers: Any = None


class CountTokensRequest(Conversation, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(Conversation, frozen=True, kw_only=True):
    """POST /v1/messages."""

    changes: ClassVar[tuple[str, ...]] = (PROMPT, ANSWER)
    names_here: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), "max_tokens"),
        **dict.fromkeys(("response_format", "structured_outputs", "guided_json"), "output_config.format"),
        **dict.fromkeys(("json_schema", "output_format"), "output_config.format"),
        "reasoning_effort": "output_config.effort",
        "thinking_token_budget": "thinking.budget_tokens",
    }

    max_tokens: Count
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: Temperature | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    top_p: Share | None = None
    cache_salt: Salt | None = None
    deterministic: bool | None = None
    num_speculative_tokens: NumDrafts | None = None
    priority: Priority = 0
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None


class TextBlock(Struct, frozen=True, tag="text"):
    text: str


class ThinkingBlock(Struct, frozen=True, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: Json


class MessagesUsage(Struct, frozen=True):
    """Tokens of the prompt that the prefix cache had are `cache_read_input_tokens`; `input_tokens` are the others."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessagesResponse(Struct, frozen=True, kw_only=True):
    """With stream: true the answer is a stream of events, from message_start to message_stop."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessagesUsage


class ContextManagement(Struct, frozen=True):
    original_input_tokens: int


class CountTokensResponse(Struct, frozen=True):
    input_tokens: int
    context_management: ContextManagement


class MessagesErrorInfo(Struct, frozen=True):
    type: str
    message: str


class MessagesErrorResponse(Struct, frozen=True):
    """The body of every refusal."""

    type: Literal["error"]
    error: MessagesErrorInfo
