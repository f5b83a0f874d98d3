"""The routes of servers that give vectors. A part of the table in frontend/routes/operations.py."""

from msgspec import Struct

from meshlm.frontend.routes.operation import ASKS, NAMED, Operation
from meshlm.frontend.vectors import schema as vectors


def _vectors(
    paths: tuple[str, ...], answers: type[Struct], summary: str, body: type[Struct], handler: str = "vectors"
) -> tuple[Operation, ...]:
    return tuple(Operation(path, handler, answers, summary, body, ("POST",), ASKS, NAMED[:2]) for path in paths)


VECTORS = (
    *_vectors(("/v1/embeddings",), vectors.EmbeddingResponse, "Vectors of texts.", vectors.EmbeddingRequest),
    *_vectors(("/v2/embed",), vectors.CohereEmbedResponse, "Vectors of texts, by Cohere's API.", vectors.CohereEmbedRequest),
    *_vectors(
        ("/pooling",), vectors.PoolingResponse, "Vectors of texts or of their tokens, or scores.", vectors.PoolingRequest, "pooling"
    ),
    *_vectors(("/classify",), vectors.ClassificationResponse, "The classes of texts.", vectors.ClassificationRequest),
    *_vectors(("/score", "/v1/score"), vectors.ScoreResponse, "How well texts go with others.", vectors.ScoreRequest),
    *_vectors(
        ("/rerank", "/v1/rerank", "/v2/rerank"), vectors.RerankResponse, "Documents, the best for a query first.", vectors.RerankRequest
    ),
    Operation(
        "/invocations",
        "invocations",
        vectors.PoolingResponse,
        "For SageMaker: as the route that the body's fields name: with input or messages /v1/embeddings, /classify or /pooling, "
        "by what the model does first.",
        vectors.PoolingRequest,
        ("POST",),
        ASKS,
        NAMED[:2],
    ),
)  # fmt: skip
