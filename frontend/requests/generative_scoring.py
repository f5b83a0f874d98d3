"""POST /generative_scoring: how likely a model that writes text goes on behind each item with a certain token, as vLLM answers it.

Each item makes a prompt with the query, whose next token's log-probabilities are asked for. Called by routes.py's table of routes.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from meshlm.frontend.http import bodies
from meshlm.frontend.http.answer_fields import ANSWER, PROMPT
from meshlm.frontend.http.errors import field_error
from meshlm.frontend.http.operation import NAMED, Group, OfClass, route
from meshlm.frontend.openai import limits, prompts
from meshlm.frontend.openai.parsed_request import AnswerOptions, MeshRequest, ParsedRequest
from meshlm.frontend.openai.responses import WholeResponse
from meshlm.frontend.openai.sampling_params import token_ids
from meshlm.frontend.openai.schema import MAX_LOGPROB_IDS, Priority, RequestName, TokenId
from meshlm.frontend.openai.stream_response import StreamResponse
from meshlm.frontend.requests.generation import Form, Generation, ReadRequest
from meshlm.frontend.requests.request_reader import RequestReader
from meshlm.protocol.config import Resolved
from meshlm.protocol.edges.text import JoinedPrompt, PositionLogprobs, TextParams, TextPrompt, TokenPrompt
from meshlm.protocol.sampling import SamplingParams

_encode = msgspec.json.Encoder().encode
Items = Annotated[list[str | list[int]], Meta(min_length=1, max_length=prompts.MAX_PROMPTS)]


class GenerativeScoringRequest(Struct, frozen=True, kw_only=True):
    """POST /generative_scoring. Each item is put behind the query, or before it, and the score is the likelihood that the first of
    label_token_ids comes next: among these alone, or without apply_softmax among all tokens."""

    changes: ClassVar[tuple[str, ...]] = (PROMPT, ANSWER)

    query: str | list[int]
    items: Items
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LOGPROB_IDS)]
    model: str | None = None
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True  # around the query, where it is text; items have none
    priority: Priority = 0
    request_id: RequestName | None = None


class GenerativeScore(Struct):
    index: int
    object: Literal["score"]
    score: float


class ScoringUsage(Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: None


class GenerativeScoringResponse(Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[GenerativeScore]
    usage: ScoringUsage


def parse(body: GenerativeScoringRequest, unknown: tuple[str, ...], resolved: Resolved) -> ParsedRequest:
    """A prompt for each item. One that is too long for the context loses its end, as in vLLM."""
    labels = token_ids("label_token_ids", body.label_token_ids, resolved.spec.vocab_size)
    query = _part("query", body.query, body.add_special_tokens, resolved)
    asked = []
    for item in body.items:
        part = _part("items", item, False, resolved)
        if not item and not body.query:
            raise field_error("items", "an empty item needs a query that is not empty")
        prompt = JoinedPrompt((part, query) if body.item_first else (query, part))
        limits.check_prompt(prompt, True, resolved)
        asked.append(prompt)
    mesh = MeshRequest(
        list(asked),
        SamplingParams(temperature=0.0, logprobs=len(labels), logprob_token_ids=labels),
        TextParams(truncate_prompt_tokens=max(1, resolved.max_model_len - 1), truncation_side="right"),
        seed=0,
        max_tokens=1,
        priority=body.priority,
    )
    answer = AnswerOptions(include_usage=True, logprobs=len(labels), client_names={"prompt": "items"})
    return ParsedRequest(mesh, answer, unknown, body.request_id or "")


def _part(name: str, given: str | list[int], special: bool, resolved: Resolved) -> TextPrompt | TokenPrompt:
    if isinstance(given, str):
        return TextPrompt(given, special)
    if not given:
        return TokenPrompt(b"")
    found = prompts.of_ids(given, resolved, True, name)
    assert found is not None  # whole numbers, as the schema says
    return found


def score_of(position: PositionLogprobs, labels: Sequence[int], *, apply_softmax: bool) -> float:
    """The likelihood of the first label, among all labels with apply_softmax."""
    found = {token.token_id: token.logprob for token in (*position.top, position.token)}
    first = found[labels[0]]
    if not apply_softmax:
        return math.exp(first)
    most = max(found[label] for label in labels)
    if most == -math.inf:  # all are masked
        return 1.0 / len(labels)
    return math.exp(first - most) / sum(math.exp(found[label] - most) for label in labels)


class ScoringResponse(WholeResponse):
    """The answer, whose choices are the items' in order."""

    def __init__(self, *arguments: Any, apply_softmax: bool) -> None:
        super().__init__(*arguments)
        self._apply_softmax = apply_softmax

    def body(self) -> bytes:
        labels = self.parsed_request.mesh.sampling.logprob_token_ids
        scores = [
            score_of(self._logprobs[choice.index][0], labels, apply_softmax=self._apply_softmax)
            for choice in self.choices
        ]
        data = [GenerativeScore(place, "score", score) for place, score in enumerate(scores)]
        usage = self.usage()
        told = ScoringUsage(usage["prompt_tokens"], usage["total_tokens"], usage["completion_tokens"], None)
        return _encode(GenerativeScoringResponse(self.request_id, "list", self.created, self.model, data, told))


class Scoring:
    routes = OfClass(Group.GENERATION)

    def __init__(self, resolved: Resolved, generation: Generation, reader: RequestReader) -> None:
        self._resolved, self._generation, self._reader = resolved, generation, reader

    @route("/generative_scoring", answers=GenerativeScoringResponse, body=GenerativeScoringRequest, parameters=NAMED)
    async def score(self, request: Request) -> HttpResponse:
        """How likely each item goes on with a certain token."""
        read, apply_softmax = await self._reader.read(request, self._read)
        form = Form(partial(ScoringResponse, apply_softmax=apply_softmax), StreamResponse)
        return await self._generation.answer(request, read, "generative-scoring-", form)

    def _read(self, request: Request, raw: bytes) -> tuple[ReadRequest, bool]:
        body, unknown = bodies.decode(raw, GenerativeScoringRequest, longest=self._reader.longest)
        model, key = self._reader.check_model(body.model), self._reader.idempotency_key(request, raw)
        return ReadRequest(parse(body, unknown, self._resolved), model, key), body.apply_softmax
