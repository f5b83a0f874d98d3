"""The routes of servers that give vectors: a body to prompts for the mesh, and what it gives to an answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import bodies
from meshlm.frontend.http.errors import HttpError, field_error
from meshlm.frontend.http.operation import NAMED, Group, OfClass, route
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.responses import AnswerHead
from meshlm.frontend.openai.stream_response import StreamResponse
from meshlm.frontend.requests.generation import Backend, Form, Generation, ReadRequest
from meshlm.frontend.requests.request_reader import RequestReader
from meshlm.frontend.vectors import answers, parse, schema
from meshlm.frontend.vectors.answers import VectorsResponse
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.text import Prompt, Tokenize, TokenizeReply, TokenPrompt, num_bytes_of
from meshlm.protocol.pooling import PoolingSpec
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime import io_processors
from meshlm.runtime.io_processors import IOProcessor, ProcessingError

Write = Callable[[VectorsResponse], bytes]
Unknown = tuple[str, ...]
MARGIN = 16  # tokens that may stand around a text


class Asked(NamedTuple):
    """One request: what the mesh is asked, the model's name, how the answer's id begins, and how the answer is written."""

    parsed_request: ParsedRequest
    model: str | None
    prefix: str
    write: Write
    parts: tuple[int, ...] = ()

    def form(self) -> Form:
        return Form(partial(VectorsResponse, write=self.write, parts=self.parts), StreamResponse)


def read(path: str, raw: bytes, longest: int, config: MeshConfig) -> Asked:
    """The body of a request on this path. HttpError names the field at fault."""
    kind, prefix, read_body = _READERS[path.removeprefix("/v1").removeprefix("/v2")]
    try:
        body, unknown = bodies.decode(raw, kind, longest=longest)
        parsed_request, write = read_body(body, unknown, config)
    except HttpError as error:
        if error.param == "prompt":
            raise HttpError(error.status, error.message.replace("prompt:", "input:", 1), "input", error.kind) from None
        raise
    return Asked(parsed_request, body.model, prefix, write)  # type: ignore[attr-defined]


def _classify(body: schema.ClassificationRequest, unknown: Unknown, config: MeshConfig) -> tuple[ParsedRequest, Write]:
    return parse.classification(body, unknown, config), partial(answers.write_classes, spec=_spec(config))


def _encoded(body: schema.EncodingCommon, unknown: Unknown, config: MeshConfig) -> tuple[ParsedRequest, Write]:
    kind = "pooling" if isinstance(body, schema.PoolingRequest) else "embedding"
    return parse.embeddings(body, unknown, config), partial(answers.write_encoded, body=body, kind=kind)


def _score(body: schema.ScoreRequest, unknown: Unknown, config: MeshConfig) -> tuple[ParsedRequest, Write]:
    pairs = parse.pairs_of(body)
    return parse.scoring(body, pairs, unknown, config), partial(answers.write_scores, pairs=pairs)


def _rerank(body: schema.RerankRequest, unknown: Unknown, config: MeshConfig) -> tuple[ParsedRequest, Write]:
    pairs = parse.pairs_of_rerank(body)
    return parse.scoring(body, pairs, unknown, config), partial(answers.write_ranks, pairs=pairs, body=body)


def _cohere(body: schema.CohereEmbedRequest, unknown: Unknown, config: MeshConfig) -> tuple[ParsedRequest, Write]:
    return parse.cohere(body, unknown, config), partial(answers.write_cohere, body=body)


# By path, without a version: the body, how the answer's id begins, and what reads the body.
_READERS: dict[str, tuple[type[Struct], str, Callable[..., tuple[ParsedRequest, Write]]]] = {
    "/embeddings": (schema.EmbeddingRequest, "embd-", _encoded),
    "/pooling": (schema.PoolingRequest, "pool-", _encoded),
    "/classify": (schema.ClassificationRequest, "classify-", _classify),
    "/score": (schema.ScoreRequest, "score-", _score),
    "/rerank": (schema.RerankRequest, "score-", _rerank),
    "/embed": (schema.CohereEmbedRequest, "embd-", _cohere),
}


async def in_parts(asked: Asked, backend: Backend, ask: Callable[[Tokenize], Awaitable[TokenizeReply]]) -> Asked:
    """Inputs longer than the context, as parts that fit (enable_chunked_processing). `ask` gives the answer of a detokenizer."""
    spec, longest = _spec(backend.config), backend.resolved.max_model_len
    keep = asked.parsed_request.mesh.text.truncate_prompt_tokens
    if not spec.chunks or keep or asked.prefix != "embd-" or asked.parsed_request.mesh.media:
        return asked
    prompts: list[Prompt] = []
    parts: list[int] = []
    for prompt in asked.parsed_request.mesh.prompts:
        if not isinstance(prompt, TokenPrompt) and num_bytes_of(prompt) + MARGIN > longest:
            prompt = TokenPrompt((await ask(Tokenize(backend.requests.new_handle(), prompt))).token_ids)
        ids = ints(prompt.token_ids) if isinstance(prompt, TokenPrompt) else []
        if spec.max_embed_len and len(ids) > max(spec.max_embed_len, longest):
            raise field_error("input", f"{len(ids)} tokens; at most {spec.max_embed_len} are embedded (max_embed_len)")
        several = [TokenPrompt(pack_i32(ids[at : at + longest])) for at in range(0, len(ids), longest)]
        prompts += several if len(several) > 1 else [prompt]
        parts.append(max(1, len(several)))
    return asked._replace(parsed_request=asked.parsed_request.with_mesh(prompts=prompts), parts=tuple(parts))


def _spec(config: MeshConfig) -> PoolingSpec:
    return parse.spec_of(config.require_resolved())


class VectorRoutes:
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
    async def vectors(self, request: Request) -> HttpResponse:
        asked = await self._reader.read(request, self._read)
        model = self._reader.check_model(asked.model)
        whole = await in_parts(asked, self._backend, partial(self._reader.ask, request))
        read = ReadRequest(whole.parsed_request, model)
        return await self._generation.answer(request, read, whole.prefix, whole.form())

    @route("/pooling", "Vectors of texts or of their tokens, or scores.", schema.PoolingResponse, schema.PoolingRequest)
    async def pooling(self, request: Request) -> HttpResponse:
        """Vectors, or what a plug-in makes of data and of them."""
        async with self._reader.body(request) as raw:
            has_data = bodies.fields_of(raw).get("data") is not None
        if not has_data:
            request._body = raw
            return await self.vectors(request)
        read_inputs = partial(self._read, request)
        asked, answer = await asyncio.to_thread(read_data, raw, self._backend.io_processor, read_inputs)
        model = self._reader.check_model(asked.model)
        read = ReadRequest(asked.parsed_request, model)
        return await self._generation.answer(request, read, asked.prefix, answer.form())

    def _read(self, request: Request, raw: bytes) -> Asked:
        return read(request.url.path, raw, self._reader.longest, self._backend.config)


class Processed:
    """One POST /pooling with `data`: an I/O processor's plug-in makes prompts of it, and the answer of their vectors."""

    def __init__(self, processor: IOProcessor) -> None:
        self._processor = processor
        self._answer: VectorsResponse | None = None
        self._data: Any = None

    def form(self) -> Form:
        return Form(self._whole, StreamResponse, before_end=self._post_process)

    def _whole(self, head: AnswerHead) -> VectorsResponse:
        self._answer = VectorsResponse(head, self._write)
        return self._answer

    async def _post_process(self) -> None:
        answer = self._answer
        assert answer is not None
        try:
            vectors, name = answer.vectors(), answer.request_id
            self._data = await asyncio.to_thread(io_processors.answer_of, self._processor, vectors, name)
        except ProcessingError as error:
            raise HttpError.of_kind(ErrorKind.INTERNAL, str(error)) from None

    def _write(self, answer: VectorsResponse) -> bytes:
        try:
            head = {"request_id": answer.request_id, "created_at": int(time.time())}
            return msgspec.json.encode({**head, "data": self._data})
        except TypeError as error:
            text = f"the I/O processor {type(self._processor).__name__} gave what is no JSON: {error}"
            raise HttpError.of_kind(ErrorKind.INTERNAL, text) from None


def read_data(raw: bytes, processor: IOProcessor | None, read: Callable[[bytes], Asked]) -> tuple[Asked, Processed]:
    """The body as the plug-in has it; called in a thread. HttpError."""
    if processor is None:
        raise field_error("data", "the server was started without --io-processor-plugin; send input or messages")
    fields = msgspec.json.decode(raw, type=dict[str, Any])
    for name in ("input", "messages"):
        if fields.get(name) is not None:
            raise field_error(name, "not together with data")
    try:
        prompts = io_processors.prompts_of(processor, fields.pop("data"), str(fields.get("request_id") or ""))
    except ValueError as error:
        raise field_error("data", f"{error}") from None
    except ProcessingError as error:
        raise HttpError.of_kind(ErrorKind.INTERNAL, str(error)) from None
    for name in ("input", "messages", "softmax"):
        fields.pop(name, None)
    asked = read(msgspec.json.encode({**fields, "input": prompts}))
    return asked, Processed(processor)
