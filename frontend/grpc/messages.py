"""gRPC messages: a call's to what the mesh is asked, and what it gives to an answer's. Pure; HttpError names the field at fault, by its
name in POST /v1/completions.

A request becomes the body of a completion, so that every check and limit of HTTP holds here too. Fields that proto3 cannot leave out
mean vLLM's neutral values where they are 0: a client sends a model's sampling defaults itself (GetModelInfo names them).
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from meshlm.frontend.http import bodies
from meshlm.frontend.http.errors import field_error
from meshlm.frontend.openai import limits, parse
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.responses import AnswerHead, Response
from meshlm.frontend.openai.schema import CompletionRequest
from meshlm.frontend.vectors import parse as vectors
from meshlm.frontend.vectors.schema import EmbeddingRequest
from meshlm.protocol.config import MeshConfig, Resolved, ServerConfig
from meshlm.protocol.edges.text import PositionLogprobs, PromptLogprobs
from meshlm.protocol.logprobs import positions_of
from meshlm.protocol.wire.ids import FinishReason
from meshlm.runtime.client.placement import Choice, RowDetails

ABORTED = "abort"
# Fields of a GenerateRequest that ask for what is not there.
NOT_SUPPORTED = {
    "kv_transfer_params": "KV is not moved between meshes",
    "kv_transfer_params_json": "KV is not moved between meshes",
    "mm_inputs": "only text is supported",
    "extra_mm_inputs": "only text is supported",
    "media_refs": "only text is supported",
}
SAME = ("temperature", "max_tokens", "logprobs", "prompt_logprobs", "seed", "truncate_prompt_tokens")  # None: not given
ZERO_IS_ONE = ("top_p", "repetition_penalty", "n")  # 0: not given, which is 1
PLAIN = ("top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens")
SWITCHES = ("skip_special_tokens", "spaces_between_special_tokens", "ignore_eos", "include_stop_str_in_output")
LISTS = ("stop", "stop_token_ids")


def generation(request: pb.GenerateRequest, resolved: Resolved, server: ServerConfig) -> ParsedRequest:
    for name, why in NOT_SUPPORTED.items():
        if _is_set(request, name):
            raise field_error(name, f"{why}")
    wanted = {**_sampling(request.sampling_params), **_prompt(request, resolved), **_name(request.request_id)}
    body, unknown = bodies.decode(msgspec.json.encode(wanted), CompletionRequest, longest=resolved.max_model_len)
    parsed_request = parse.completion(body, unknown, resolved, server)
    given = "max_tokens" in wanted
    most = parsed_request.mesh.max_tokens if given else resolved.max_output_tokens
    return parsed_request.with_answer(stream=request.stream).with_mesh(max_tokens=most, cap_max_tokens=not given)


def embedding(request: pb.EmbedRequest, config: MeshConfig) -> ParsedRequest:
    ids = request.tokenized.input_ids
    if not ids:
        raise field_error("tokenized", "give at least one token id")
    limits.check_num_ids(len(ids), False, config.require_resolved())
    body = msgspec.json.encode({"input": list(ids), **_name(request.request_id)})
    asked, unknown = bodies.decode(body, EmbeddingRequest, longest=config.require_resolved().max_model_len)
    return vectors.embeddings(asked, unknown, config)


def _name(request_id: str) -> dict[str, str]:
    return {"request_id": request_id} if request_id else {}


def dp_rank(request: pb.GenerateRequest) -> int:
    """The rank that the client chose; -1: none."""
    if not request.HasField("data_parallel_rank"):
        return -1
    rank = int(request.data_parallel_rank)
    if rank < 0:
        raise field_error("data_parallel_rank", "it must be at least 0")
    return rank


def _prompt(request: pb.GenerateRequest, resolved: Resolved) -> dict[str, Any]:
    match request.WhichOneof("input"):
        case "tokenized":
            limits.check_num_ids(len(request.tokenized.input_ids), False, resolved)
            return {"prompt": list(request.tokenized.input_ids)}
        case "text":
            return {"prompt": request.text}
    raise field_error("input", "give tokenized or text")


def _sampling(params: pb.SamplingParams) -> dict[str, Any]:
    """The fields of a completion's body that mean the same."""
    counts = {"logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
    limits.check_lists(counts, max(1, params.n))
    found: dict[str, Any] = {name: getattr(params, name) for name in SAME if params.HasField(name)}
    found.setdefault("temperature", 1.0)
    found |= {name: getattr(params, name) or 1 for name in ZERO_IS_ONE}
    found |= {name: getattr(params, name) for name in (*PLAIN, *SWITCHES)}
    found |= {name: list(getattr(params, name)) for name in LISTS if getattr(params, name)}
    for name, value in found.items():
        if isinstance(value, float) and not math.isfinite(value):  # JSON would have no word for it
            raise field_error(name, f"{value} is no number")
    if params.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    return found | _constraint(params)


def _constraint(params: pb.SamplingParams) -> dict[str, Any]:
    """The grammar of the answer, if there is one: the same names as in vLLM's `structured_outputs`."""
    kind = params.WhichOneof("constraint")
    if kind is None:
        if params.grammar_from_first_token:
            raise field_error("grammar_from_first_token", "there is no grammar")
        return {}
    value: Any = getattr(params, kind)
    if kind == "choice":
        value = list(params.choice.choices)
    return {"structured_outputs": {"json" if kind == "json_schema" else kind: value}}


def _is_set(message: Any, name: str) -> bool:
    value = getattr(message, name)
    return bool(value) if hasattr(value, "__len__") else message.HasField(name)


# --- answers ---


class GrpcResponse(Response):
    """The answer of one Generate call: tokens of its choices as messages, which servicer.py sends as `take` gives them.

    Tokens that come while the client does not read are sent together when it does: nothing is queued here beside what a choice has. It
    hears of its choices from request_tracker.py; the head's `on_end` is called whenever `take` may have something."""

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(head)
        self._on_news = head.on_end
        self._num_sent: dict[int, int] = {}  # tokens, by choice
        self._logprobs: dict[int, list[PositionLogprobs]] = {}  # by choice, of tokens that are not sent
        self._prompt_logprobs: dict[int, pb.InputLogProbs] = {}  # by choice, until its first message
        self._told: set[int] = set()  # choices whose end is sent
        self.is_aborted = False

    def row(self, choice: Choice, num_tokens: int, text: str, details: RowDetails | None) -> None:
        """Takes note of new tokens; their text is the client's to make."""
        if details is not None:
            self.note(choice, details)
            if details.logprobs:
                self._logprobs.setdefault(choice.index, []).extend(details.logprobs)
            if details.prompt_logprobs is not None:
                made = input_logprobs(details.prompt_logprobs, self.options.prompt_logprobs)
                self._prompt_logprobs[choice.index] = made
            if details.finished is not None:
                self.ended()
                return
        if self.options.stream:
            self._on_news()

    def abort(self) -> None:
        """The client asked for the end: `take` tells it of every choice that still ran."""
        self.is_aborted = True
        self._on_news()

    @property
    def is_over(self) -> bool:
        """True when no further message follows those that `take` gives now."""
        return self.is_aborted or self.error is not None or self.num_ended == len(self.choices)

    def take(self) -> list[pb.GenerateResponse]:
        """The messages for what came since the last call; of an answer that is not streamed, its end alone."""
        if not self.options.stream and not self.is_over:
            return []
        found = []
        for choice in self.choices:
            if choice.index in self._told:
                continue
            begin, end = self._num_sent.get(choice.index, 0), len(choice.token_ids)
            token_ids = choice.token_ids[begin:end].tolist()
            logprobs = output_logprobs(self._logprobs.pop(choice.index, ()), self.options.logprobs)
            same = {
                "prompt_tokens": choice.num_prompt_tokens,
                "completion_tokens": len(token_ids),
                "cached_tokens": self.num_cached.get(choice.prompt_index, 0),
                "output_logprobs": logprobs,
                "index": choice.index,
            }
            if self.options.stream and end > begin:
                prompt = self._prompt_logprobs.pop(choice.index, None)
                chunk = pb.GenerateStreamChunk(token_ids=token_ids, input_logprobs=prompt, **same)
                found.append(pb.GenerateResponse(chunk=chunk))
            self._num_sent[choice.index] = end
            if reason := self._reason(choice):
                self._told.add(choice.index)
                stop = None if choice.finished is None else choice.finished.stop_reason
                # With all tokens of the choice, or those of the last chunk where it was streamed, as from vLLM.
                complete = pb.GenerateComplete(
                    output_ids=token_ids,
                    finish_reason=reason,
                    input_logprobs=self._prompt_logprobs.pop(choice.index, None),
                    matched_token_id=stop if isinstance(stop, int) else None,
                    matched_stop_str=stop if isinstance(stop, str) else None,
                    **same,
                )
                found.append(pb.GenerateResponse(complete=complete))
        return found

    def _reason(self, choice: Choice) -> str:
        """finish_reason of the choice; empty while it runs."""
        if choice.finished is None:
            return ABORTED if self.is_aborted else ""
        return "" if choice.finished.reason is FinishReason.ERROR else choice.finished.reason.value


def output_logprobs(positions: Sequence[PositionLogprobs], num_top: int) -> pb.OutputLogProbs | None:
    """Log-probabilities of output tokens, each with the `num_top` likeliest; None without any."""
    if num_top < 0 or not positions:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[position.token.logprob for position in positions],
        token_ids=[position.token.token_id for position in positions],
        top_logprobs=_tops(positions, num_top),
    )


def input_logprobs(found: PromptLogprobs, num_top: int) -> pb.InputLogProbs:
    """Log-probabilities of a prompt's tokens; the first one has none."""
    positions = list(positions_of(found))
    return pb.InputLogProbs(
        token_logprobs=[
            pb.InputTokenLogProb(),
            *(pb.InputTokenLogProb(value=position.token.logprob) for position in positions),
        ],
        token_ids=memoryview(found.token_ids).cast("i").tolist(),
        top_logprobs=[pb.TopLogProbs(), *_tops(positions, num_top)],
    )


def _tops(positions: Sequence[PositionLogprobs], num_top: int) -> list[pb.TopLogProbs]:
    return [
        pb.TopLogProbs(
            values=[token.logprob for token in position.top[:num_top]],
            token_ids=[token.token_id for token in position.top[:num_top]],
        )
        for position in positions
    ]
