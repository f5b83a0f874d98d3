"""The bodies of Ollama's API, and its answers. What msgspec cannot say is checked in translate.py."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from meshlm.frontend.http.answer_fields import ANSWER, PROMPT, VECTORS
from meshlm.frontend.openai.schema import MAX_TOKENS, Penalty, Seed, Share, Temperature
from meshlm.protocol.samplers import Share as UnitShare

Json = dict[str, Any]
Name = Annotated[str, Meta(min_length=1)]
FORMAT = {"description": "'json', or a JSON schema.", "anyOf": [{"enum": ["json", "", None]}, {"type": "object"}]}
THINK = {"enum": [True, False, None, "low", "medium", "high"]}
INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
NumPredict = Annotated[int, Meta(ge=-2, le=MAX_TOKENS)]


class Options(Struct, frozen=True, kw_only=True):
    """How tokens are drawn. num_predict: -1 and -2 mean as many as the context holds. Fields that say how a machine is used
    (num_gpu, num_thread, ...) and the size of the context (num_ctx) are the server's own settings, and change nothing."""

    changes: ClassVar[tuple[str, ...]] = (PROMPT, ANSWER)
    names_here: ClassVar[Mapping[str, str]] = {
        "repetition_penalty": "repeat_penalty",
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens"), "num_predict"),
    }

    num_predict: NumPredict | None = None
    temperature: Temperature | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    top_p: Share | None = None
    min_p: UnitShare | None = None
    typical_p: UnitShare | None = None
    repeat_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    num_ctx: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    num_keep: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    num_thread: Any = None
    numa: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    use_mmap: Any = None
    use_mlock: Any = None


class GenerationCommon(Struct, frozen=True, kw_only=True):
    """The fields of a chat and of a prompt. keep_alive: the model stays loaded, whatever is said. truncate, shift: what is too long for
    the context is a 400."""

    changes: ClassVar[tuple[str, ...]] = (PROMPT, ANSWER)
    names_here: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("response_format", "json_schema", "guided_json", "structured_outputs"), "format"),
        **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "stop"), "options"),
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "num_predict"), "options.num_predict"),
        **dict.fromkeys(("reasoning_effort", "enable_thinking"), "think"),
    }

    model: Name
    stream: bool | None = None  # true
    format: Annotated[Any, Meta(extra_json_schema=FORMAT)] = None
    options: Options | None = None
    think: Annotated[Any, Meta(extra_json_schema=THINK)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    keep_alive: Any = None
    truncate: bool | None = None
    shift: bool | None = None


class ChatBody(GenerationCommon, frozen=True, kw_only=True):
    """POST /api/chat. Without messages it asks for the model to be loaded, which it is."""

    messages: list[Json] = []
    tools: list[Json] | None = None


class GenerateBody(GenerationCommon, frozen=True, kw_only=True):
    """POST /api/generate. Without a prompt it asks for the model to be loaded, which it is."""

    prompt: str = ""
    suffix: str | None = None
    images: list[str] | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None


class EmbedBody(Struct, frozen=True, kw_only=True):
    """POST /api/embed."""

    changes: ClassVar[tuple[str, ...]] = (VECTORS,)

    model: Name
    input: Annotated[Any, Meta(extra_json_schema=INPUT)]
    truncate: bool | None = None  # true
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    keep_alive: Any = None
    options: Json | None = None


class EmbeddingsBody(Struct, frozen=True, kw_only=True):
    """POST /api/embeddings, the older route."""

    changes: ClassVar[tuple[str, ...]] = (VECTORS,)

    model: Name
    prompt: str
    keep_alive: Any = None
    options: Json | None = None


class ShowBody(Struct, frozen=True, kw_only=True):
    """POST /api/show; `name` is the older word for `model`."""

    model: str = ""
    name: str = ""
    verbose: bool | None = None


class PullBody(Struct, frozen=True, kw_only=True):
    """POST /api/pull: the model that is served is there; others are not fetched."""

    model: str = ""
    name: str = ""
    insecure: bool | None = None
    stream: bool | None = None


class ErrorBody(Struct, frozen=True):
    """The body of every refusal."""

    error: str


class Function(Struct, frozen=True):
    name: str
    arguments: Json
    index: int


class ToolCall(Struct, frozen=True):
    id: str
    function: Function


class Message(Struct, frozen=True, omit_defaults=True):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Ended(Struct, frozen=True, kw_only=True):
    """The end of an answer: durations are in nanoseconds, and missing where nothing was computed."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[Json] | UnsetType = UNSET


class ChatAnswer(Ended, frozen=True, kw_only=True):
    """With stream: true (the default) it is lines of JSON, of which the last has `done`: true."""

    message: Message


class GenerateAnswer(Ended, frozen=True, kw_only=True):
    """With stream: true (the default) it is lines of JSON, of which the last has `done`: true."""

    response: str
    thinking: str | UnsetType = UNSET


class EmbedAnswer(Struct, frozen=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsAnswer(Struct, frozen=True):
    embedding: list[float]


class Details(Struct, frozen=True):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Listed(Struct, frozen=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Tags(Struct, frozen=True):
    models: list[Listed]


class Running(Struct, frozen=True):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class RunningList(Struct, frozen=True):
    models: list[Running]


class Shown(Struct, frozen=True):
    details: Details
    model_info: Json
    capabilities: list[str]
    modified_at: str
    modelfile: str
    parameters: str
    template: str
    license: str


class VersionAnswer(Struct, frozen=True):
    """Ollama's version whose API this is; clients ask for one that is new enough."""

    version: str


class PullStatus(Struct, frozen=True):
    status: Literal["success"]
