"""The bodies of the endpoints for vectors and scores, and of their answers: OpenAI's, Cohere's and vLLM's fields."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from meshlm.frontend.http.answer_fields import PROMPT, VECTORS
from meshlm.frontend.openai.schema import MAX_TOKENS, RequestName
from meshlm.protocol.pooling import PoolingTask

EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]
Priority = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
Truncation = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]
Limit = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class VectorsCommon(Struct, frozen=True, kw_only=True):
    """The fields that all of them take."""

    changes: ClassVar[tuple[str, ...]] = (PROMPT, VECTORS)

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Truncation | None = None  # -1: as many as the context holds
    truncation_side: Literal["left", "right"] | None = None
    request_id: RequestName | None = None
    priority: Priority = 0
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    use_activation: bool | None = None


class InputCommon(VectorsCommon, frozen=True, kw_only=True):
    """`input` is text, token ids, or a list of either; or `messages` are a conversation, or a list of them."""

    input: Any = None
    messages: list[Any] | None = None
    add_special_tokens: bool | UnsetType = UNSET  # true for texts, false for messages: their template has them
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class EncodingCommon(InputCommon, frozen=True, kw_only=True):
    """How vectors are written."""

    dimensions: int | None = None
    normalize: bool | None = None  # older vLLM's name of use_activation
    encoding_format: EncodingFormat | None = None  # float
    embed_dtype: EmbedDType | None = None  # float32
    endianness: Endianness | None = None  # native


class EmbeddingRequest(EncodingCommon, frozen=True, kw_only=True):
    """POST /v1/embeddings."""


class PoolingRequest(EncodingCommon, frozen=True, kw_only=True):
    """POST /pooling: of `input` or `messages`, or of `data`, which a plug-in reads (--io-processor-plugin)."""

    data: Any = None
    task: PoolingTask | None = None


class ClassificationRequest(InputCommon, frozen=True, kw_only=True):
    """POST /classify."""


class ScoringCommon(VectorsCommon, frozen=True, kw_only=True):
    """What compares texts."""

    max_tokens_per_query: Limit = 0  # 0: all
    max_tokens_per_doc: Limit = 0
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ScoreRequest(ScoringCommon, frozen=True, kw_only=True):
    """POST /score: `queries` and `documents`, or `text_1` and `text_2`, one against many or pair by pair."""

    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


class RerankRequest(ScoringCommon, frozen=True, kw_only=True):
    """POST /rerank."""

    query: str
    documents: str | list[str | dict[str, Any]]
    top_n: Limit = 0  # 0: all
    return_documents: bool = True


class CohereEmbedRequest(Struct, frozen=True, kw_only=True):
    """POST /v2/embed, by Cohere's API."""

    changes: ClassVar[tuple[str, ...]] = (PROMPT, VECTORS)

    model: str | None = None
    input_type: str | None = None
    texts: list[str] | None = None
    images: list[str] | None = None
    inputs: list[dict[str, Any]] | None = None
    output_dimension: int | None = None
    embedding_types: list[Literal["float", "binary", "ubinary", "base64"]] | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    priority: Priority = 0


class VectorsUsage(Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: None


class Listed(Struct):
    """What is the same in all answers that are lists."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: VectorsUsage


class EmbeddingData(Struct):
    index: int
    object: Literal["embedding"]
    embedding: list[float] | str  # text: base64


class EmbeddingResponse(Listed):
    data: list[EmbeddingData]


class PoolingResponse(Listed):
    data: list[Any]


class ClassificationData(Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(Listed):
    data: list[ClassificationData]


class ScoreData(Struct):
    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(Listed):
    data: list[ScoreData]


class RerankDocument(Struct):
    text: str | None
    multi_modal: None


class RerankResult(Struct):
    index: int
    document: RerankDocument | None
    relevance_score: float


class RerankUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class RerankResponse(Struct):
    id: str
    model: str
    usage: RerankUsage
    results: list[RerankResult]


class CohereEmbedResponse(Struct):
    id: str
    embeddings: dict[str, list[Any]]  # by type
    meta: dict[str, Any]
    response_type: Literal["embeddings_by_type"]
    texts: list[str] | UnsetType = UNSET
