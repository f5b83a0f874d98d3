"""A gRPC message to what the mesh is asked. Pure; HttpError names the field at fault, by its name in POST /v1/completions.

A request becomes the body of a completion, so that every check and limit of HTTP holds here too. Fields that proto3 cannot leave out
mean vLLM's neutral values where they are 0: a client sends a model's sampling defaults itself (GetModelInfo names them).
"""

import math
from typing import Any

import msgspec
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from meshlm.frontend.http import bodies
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai import limits, parse
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.schema import CompletionRequest
from meshlm.frontend.vectors import parse as vectors
from meshlm.frontend.vectors.schema import EmbeddingRequest
from meshlm.protocol.config import MeshConfig, Resolved, ServerConfig

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
    """A Generate call."""
    for name, why in NOT_SUPPORTED.items():
        if _is_set(request, name):
            raise HttpError(400, f"{name}: {why}", name)
    wanted = {**_sampling(request.sampling_params), **_prompt(request, resolved), **_name(request.request_id)}
    body, unknown = bodies.decode(msgspec.json.encode(wanted), CompletionRequest, longest=resolved.max_model_len)
    parsed_request = parse.completion(body, unknown, resolved, server)
    given = "max_tokens" in wanted
    most = parsed_request.mesh.max_tokens if given else resolved.max_output_tokens
    return parsed_request.with_answer(stream=request.stream).with_mesh(max_tokens=most, cap_max_tokens=not given)


def embedding(request: pb.EmbedRequest, config: MeshConfig) -> ParsedRequest:
    """An Embed call."""
    assert config.resolved is not None
    ids = request.tokenized.input_ids
    if not ids:
        raise HttpError(400, "tokenized: give at least one token id", "tokenized")
    limits.check_num_ids(len(ids), False, config.resolved)
    body = msgspec.json.encode({"input": list(ids), **_name(request.request_id)})
    asked, unknown = bodies.decode(body, EmbeddingRequest, longest=config.resolved.max_model_len)
    return vectors.embeddings(asked, unknown, config)


def _name(request_id: str) -> dict[str, str]:
    return {"request_id": request_id} if request_id else {}


def dp_rank(request: pb.GenerateRequest) -> int:
    """The rank that the client chose; -1: none."""
    if not request.HasField("data_parallel_rank"):
        return -1
    rank = int(request.data_parallel_rank)
    if rank < 0:
        raise HttpError(400, "data_parallel_rank: it must be at least 0", "data_parallel_rank")
    return rank


def _prompt(request: pb.GenerateRequest, resolved: Resolved) -> dict[str, Any]:
    match request.WhichOneof("input"):
        case "tokenized":
            limits.check_num_ids(len(request.tokenized.input_ids), False, resolved)
            return {"prompt": list(request.tokenized.input_ids)}
        case "text":
            return {"prompt": request.text}
    raise HttpError(400, "input: give tokenized or text", "input")


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
            raise HttpError(400, f"{name}: {value} is no number", name)
    if params.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    return found | _constraint(params)


def _constraint(params: pb.SamplingParams) -> dict[str, Any]:
    """The grammar of the answer, if there is one: the same names as in vLLM's `structured_outputs`."""
    kind = params.WhichOneof("constraint")
    if kind is None:
        if params.grammar_from_first_token:
            raise HttpError(400, "grammar_from_first_token: there is no grammar", "grammar_from_first_token")
        return {}
    value: Any = getattr(params, kind)
    if kind == "choice":
        value = list(params.choice.choices)
    return {"structured_outputs": {"json" if kind == "json_schema" else kind: value}}


def _is_set(message: Any, name: str) -> bool:
    value = getattr(message, name)
    return bool(value) if hasattr(value, "__len__") else message.HasField(name)
