"""The methods of vllm.grpc.engine.VllmEngine. Calls are submitted as HTTP's are; listener.py turns HttpErrors into statuses."""

import asyncio
import contextlib
import datetime
import hashlib
import io
import time
import uuid
import zipfile
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import grpc
import msgspec
from google.protobuf.message import Message
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as service

from meshlm.frontend.grpc import messages
from meshlm.frontend.grpc.kv_events import MAX_STREAMS, Subscriptions
from meshlm.frontend.grpc.messages import GrpcResponse
from meshlm.frontend.http.bodies import LARGE_BYTES
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.responses import AnswerHead, Response, trace_headers
from meshlm.frontend.operator import mesh_operations
from meshlm.frontend.requests import submits
from meshlm.frontend.requests.generation import Backend
from meshlm.frontend.vectors.answers import VectorsResponse
from meshlm.protocol.operations import ResetPrefixCache

NAME = "vllm.grpc.engine.VllmEngine"
# Statuses by HTTP's; others are INTERNAL.
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
# Files of a tokenizer, and what a router that has no model's folder needs beside it.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
)
TOKENIZER_CHUNK = 1 << 20  # bytes
Context: TypeAlias = "grpc.aio.ServicerContext[Message, Message]"


async def refuse(context: "Context", error: HttpError) -> None:
    """Ends the call with the error's status and text."""
    await context.abort(CODES.get(error.status, grpc.StatusCode.INTERNAL), error.message)


def key_of(context: "Context") -> str:
    """The API key that came with the call, which was checked before; empty for none."""
    metadata = dict(context.invocation_metadata() or ())
    return str(metadata.get("authorization", "")).removeprefix("Bearer ")


class Servicer(service.VllmEngineServicer):  # type: ignore[misc]
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._started = time.monotonic()
        self._reads_large = asyncio.Lock()
        self.subscriptions = Subscriptions(backend.config.run.run_dir)
        self._open: dict[tuple[str, str], Response] = {}  # by the API key and the id

    # --- generation ---

    async def Generate(self, request: pb.GenerateRequest, context: "Context") -> AsyncIterator[pb.GenerateResponse]:
        """Streams chunks and the end of each choice, or with stream false the ends alone."""
        read = partial(messages.generation, request, self._backend.resolved, self._backend.config.server)
        parsed_request = await self._parsed(request, read, context)
        rank = messages.dp_rank(request)
        news = asyncio.Event()
        answer = GrpcResponse(AnswerHead(parsed_request, *self._named(request.request_id), news.set))
        async with self._running(answer, "Generate", context, rank):
            while True:
                await news.wait()
                news.clear()
                is_over = answer.is_over
                for message in answer.take():
                    yield message
                if answer.error is not None:
                    raise answer.error
                if is_over:
                    return

    async def _parsed(self, request: Message, read: Callable[[], ParsedRequest], context: "Context") -> ParsedRequest:
        """What `read` makes of the message. Of a large one in a thread, so that no stream waits for it; one after the other."""
        if request.ByteSize() <= LARGE_BYTES:
            parsed_request = read()
        else:
            async with self._reads_large:
                parsed_request = await asyncio.to_thread(read)
        return submits.permitted(parsed_request, key_of(context), self._backend.config)

    def _named(self, request_id: str) -> tuple[str, int, str]:
        return f"grpc-{request_id or uuid.uuid4().hex}", int(time.time()), self._backend.resolved.served_names[0]

    @contextlib.asynccontextmanager
    async def _running(
        self, answer: GrpcResponse | VectorsResponse, method: str, context: "Context", rank: int = -1
    ) -> AsyncIterator[None]:
        """Submits the call and ends it. HttpError when it is not let in."""
        backend, parsed_request, name = self._backend, answer.parsed_request, (key_of(context), answer.request_id)
        answer.trace_headers = trace_headers(dict(context.invocation_metadata() or ()))
        if name in self._open:
            raise HttpError(409, f"request_id: {answer.request_id.removeprefix('grpc-')} is running", "request_id")
        if reason := backend.readiness.refusal(attaches=False) or await backend.readiness.wait_serving():
            raise HttpError(503, reason)
        with backend.requests.budget.open(parsed_request):
            started, status = time.monotonic(), 200
            self._open[name] = answer
            try:
                new_handle = backend.requests.new_handle
                for asked in list(submits.build_each(answer, parsed_request, new_handle, rank, draws=backend.draws)):
                    backend.requests.open(*asked)
                yield
            except HttpError as error:
                status = error.status
                raise
            except (asyncio.CancelledError, GeneratorExit):
                status = 499
                raise
            finally:
                del self._open[name]
                backend.requests.close(answer.choices)
                backend.observer.done(answer, started, f"{NAME}/{method}", status)

    async def Abort(self, request: pb.AbortRequest, context: "Context") -> pb.AbortResponse:
        """Ends calls of this process and of the same API key by their request ids; unknown ones have ended."""
        for name in request.request_ids:
            if isinstance(answer := self._open.get((key_of(context), f"grpc-{name}")), GrpcResponse):
                answer.abort()
        return pb.AbortResponse()

    async def Embed(self, request: pb.EmbedRequest, context: "Context") -> pb.EmbedResponse:
        """Gives the vector of one prompt, as POST /v1/embeddings does."""
        read = partial(messages.embedding, request, self._backend.config)
        head = (await self._parsed(request, read, context), *self._named(request.request_id))
        end = asyncio.Event()
        answer = VectorsResponse(AnswerHead(*head, end.set), write=lambda _: b"")
        async with self._running(answer, "Embed", context):
            await end.wait()
            if answer.error is not None:
                raise answer.error
        (vector,) = answer.vectors()
        count = answer.num_prompt_tokens()
        return pb.EmbedResponse(embedding=vector.tolist(), prompt_tokens=count, embedding_dim=len(vector))

    # --- the server ---

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: "Context") -> pb.HealthCheckResponse:
        reason = self._backend.readiness.not_ready_reason() or self._backend.readiness.blocked()
        return pb.HealthCheckResponse(healthy=not reason, message=reason or "Health")

    async def FlushCache(self, request: common.FlushCacheRequest, context: "Context") -> common.FlushCacheResponse:
        """Resets the prefix cache as POST /reset_prefix_cache does; while requests run it tries again for `timeout_s`."""
        if not self._backend.config.server.server_dev_mode:
            raise HttpError(409, "the server was started without --server-dev-mode")
        until, operations = time.monotonic() + request.timeout_s, self._backend.operations
        while (done := await operations.operate(ResetPrefixCache(False))).error and time.monotonic() < until:
            await self._backend.requests.moved()
        return common.FlushCacheResponse(success=not done.error, message=done.error)

    async def StartProfile(self, request: common.StartProfileRequest, context: "Context") -> common.ProfileResponse:
        if named := [field.name for field, _ in request.ListFields()]:
            raise HttpError(400, f"{', '.join(named)}: set when the server starts (--profiler-dir)")
        return await self._profile(start=True)

    async def StopProfile(self, request: common.StopProfileRequest, context: "Context") -> common.ProfileResponse:
        return await self._profile(start=False)

    async def _profile(self, *, start: bool) -> common.ProfileResponse:
        found = await mesh_operations.profile(self._backend.operations, start=start)
        return common.ProfileResponse(success=True, message=", ".join(found["paths"]))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: "Context") -> pb.GetModelInfoResponse:
        resolved = self._backend.resolved
        defaults = {key: value for key, value in resolved.generation_defaults.items() if key != "max_tokens"}
        return pb.GetModelInfoResponse(
            model_path=resolved.model_path,
            is_generation=resolved.pooling is None,
            max_context_length=resolved.max_model_len,
            vocab_size=resolved.spec.vocab_size,
            served_model_name=resolved.served_names[0],
            tokenizer_path=resolved.tokenizer_path,
            architectures=[resolved.spec.architecture],
            eos_token_ids=resolved.eos_token_ids,
            max_req_input_len=resolved.max_model_len,
            default_sampling_params_json=msgspec.json.encode(defaults).decode() if defaults else "",
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: "Context") -> pb.GetServerInfoResponse:
        config, resolved = self._backend.config, self._backend.resolved
        return pb.GetServerInfoResponse(
            active_requests=len(self._open),
            uptime_seconds=time.monotonic() - self._started,
            server_type="vllm-grpc",  # routers choose by it which service they call
            data_parallel_size=config.parallel.data_parallel_size,
            kv_cache_dtype=config.cache.kv_cache_dtype,
            block_size=config.cache.block_size,
            model_dtype=f"torch.{resolved.dtype}",
            max_num_seqs=resolved.max_num_seqs,
            engine_reasoning_parser=config.server.reasoning_parser,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: "Context") -> pb.GetLoadsResponse:
        stats = (await self._backend.operations.fresh_stats()).ranks
        wanted = request.dp_rank if request.HasField("dp_rank") else None
        loads = [
            pb.SchedulerLoad(
                dp_rank=rank.dp_rank,
                num_running_reqs=rank.num_running,
                num_waiting_reqs=rank.num_waiting,
                num_total_reqs=rank.num_running + rank.num_waiting,
                token_usage=rank.kv_cache_usage,
                cache_hit_rate=rank.prefix_cache_hits / max(1, rank.prefix_cache_queries),
                max_running_requests=self._backend.resolved.max_num_seqs,
            )
            for rank in stats
            if wanted in (None, rank.dp_rank)
        ]
        now = datetime.datetime.now(datetime.UTC).isoformat()
        return pb.GetLoadsResponse(timestamp=now, version=self._backend.version, dp_rank_count=len(loads), loads=loads)

    async def GetTokenizer(
        self, request: common.GetTokenizerRequest, context: "Context"
    ) -> AsyncIterator[common.GetTokenizerChunk]:
        """Streams a zip archive of the tokenizer's files, in pieces; the last one has its SHA-256."""
        path = Path(self._backend.resolved.tokenizer_path)
        if path.suffix == ".gguf":
            raise HttpError(409, f"the tokenizer is inside {path.name}; start with --tokenizer FOLDER to hand one out")
        archive = await asyncio.to_thread(_zipped, path)
        pieces = [archive[begin : begin + TOKENIZER_CHUNK] for begin in range(0, len(archive), TOKENIZER_CHUNK)]
        digest = hashlib.sha256(archive).hexdigest()
        for place, piece in enumerate(pieces):
            yield common.GetTokenizerChunk(data=piece, sha256=digest if place == len(pieces) - 1 else "")

    async def SubscribeKvEvents(
        self, request: common.SubscribeKvEventsRequest, context: "Context"
    ) -> AsyncIterator[common.KvEventBatch]:
        """Streams the events of the prefix caches, with what is still kept of those before, until the client or the server ends."""
        if not self._backend.config.kv_events.enabled:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the server was started without --kv-events-config")
        if self.subscriptions.num_open >= MAX_STREAMS:
            raise HttpError(429, f"{MAX_STREAMS} streams of KV events are open here")
        async with contextlib.aclosing(self.subscriptions.stream(request.start_sequence_number)) as batches:
            async for batch in batches:
                yield batch


def _zipped(path: Path) -> bytes:
    """The same bytes each time: a router compares archives by their digest."""
    packed, folder = io.BytesIO(), path if path.is_dir() else path.parent
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in TOKENIZER_FILES:
            if (path := folder / name).is_file():
                archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()
