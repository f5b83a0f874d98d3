"""The routes of servers that give vectors."""

import asyncio
from functools import partial

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.requests.generation import Backend, Generation
from meshlm.frontend.routes.operation import NAMED, Group, OfClass, route
from meshlm.frontend.routes.request_reader import RequestReader
from meshlm.frontend.vectors import processed, schema
from meshlm.frontend.vectors.reading import Asked, in_parts, read


class VectorRoutes:
    """Of one frontend."""

    routes = OfClass(Group.VECTORS, parameters=NAMED[:2])

    def __init__(self, backend: Backend, generation: Generation, reader: RequestReader) -> None:
        self._backend, self._generation, self._reader = backend, generation, reader

    @route("/v1/embeddings", "Vectors of texts.", schema.EmbeddingResponse, schema.EmbeddingRequest)
    @route("/v2/embed", "Vectors of texts, by Cohere's API.", schema.CohereEmbedResponse, schema.CohereEmbedRequest)
    @route("/classify", "The classes of texts.", schema.ClassificationResponse, schema.ClassificationRequest)
    @route("/score", "How well texts go with others.", schema.ScoreResponse, schema.ScoreRequest)
    @route("/v1/score", "How well texts go with others.", schema.ScoreResponse, schema.ScoreRequest)
    @route("/rerank", "Documents, the best for a query first.", schema.RerankResponse, schema.RerankRequest)
    @route("/v1/rerank", "Documents, the best for a query first.", schema.RerankResponse, schema.RerankRequest)
    @route("/v2/rerank", "Documents, the best for a query first.", schema.RerankResponse, schema.RerankRequest)
    async def vectors(self, request: Request) -> HttpResponse | None:
        asked = await self._reader.read(request, self._read)
        model = self._reader.check_model(asked.model)
        whole = await in_parts(asked, self._backend, partial(self._reader.ask, request))
        if whole is None:
            return None
        return await self._generation.answer(request, whole.parsed_request, model, None, whole.prefix, whole.form())

    @route("/pooling", "Vectors of texts or of their tokens, or scores.", schema.PoolingResponse, schema.PoolingRequest)
    async def pooling(self, request: Request) -> HttpResponse | None:
        """Vectors, or what a plug-in makes of data and of them."""
        async with self._reader.bodies.body(request) as raw:
            has_data = processed.has_data(raw)
        if not has_data:
            request._body = raw
            return await self.vectors(request)
        read_inputs = partial(self._read, request)
        asked, answer = await asyncio.to_thread(processed.read, raw, self._backend.io_processor, read_inputs)
        model = self._reader.check_model(asked.model)
        return await self._generation.answer(request, asked.parsed_request, model, None, asked.prefix, answer.form())

    def _read(self, request: Request, raw: bytes) -> Asked:
        return read(request.url.path, raw, self._reader.longest, self._backend.config)
