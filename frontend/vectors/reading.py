"""The routes for vectors and scores: a body to prompts for the mesh, and what it gives to an answer. Called by routes.py."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct

from meshlm.frontend.http import bodies
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.stream_response import StreamResponse
from meshlm.frontend.requests.generation import Backend, Form
from meshlm.frontend.vectors import answers, parse, schema
from meshlm.frontend.vectors.answers import VectorsResponse
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.text import Prompt, Tokenize, TokenizeReply, TokenPrompt, num_bytes_of
from meshlm.protocol.pooling import PoolingSpec
from meshlm.protocol.wire.columns import ints, pack_i32

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


async def in_parts(asked: Asked, backend: Backend, ask: Callable[[Tokenize], Any]) -> Asked | None:
    """Inputs longer than the context, as parts that fit (enable_chunked_processing). None when the client left meanwhile.

    ask: gives the answer of a detokenizer, or None.
    """
    spec, longest = _spec(backend.config), backend.resolved.max_model_len
    keep = asked.parsed_request.mesh.text.truncate_prompt_tokens
    if not spec.chunks or keep or asked.prefix != "embd-":
        return asked
    prompts: list[Prompt] = []
    parts: list[int] = []
    for prompt in asked.parsed_request.mesh.prompts:
        if not isinstance(prompt, TokenPrompt) and num_bytes_of(prompt) + MARGIN > longest:
            reply = await ask(Tokenize(backend.requests.new_handle(), prompt))
            if reply is None:
                return None
            assert isinstance(reply, TokenizeReply)
            prompt = TokenPrompt(reply.token_ids)
        ids = ints(prompt.token_ids) if isinstance(prompt, TokenPrompt) else []
        if spec.max_embed_len and len(ids) > max(spec.max_embed_len, longest):
            text = f"input: {len(ids)} tokens; at most {spec.max_embed_len} are embedded (max_embed_len)"
            raise HttpError(400, text, "input")
        several = [TokenPrompt(pack_i32(ids[at : at + longest])) for at in range(0, len(ids), longest)]
        prompts += several if len(several) > 1 else [prompt]
        parts.append(max(1, len(several)))
    return asked._replace(parsed_request=asked.parsed_request.with_mesh(prompts=prompts), parts=tuple(parts))


def _spec(config: MeshConfig) -> PoolingSpec:
    assert config.resolved is not None
    return parse.spec_of(config.resolved)
