"""The port of a frontend with --grpc: the service, health for probes, and reflection. Owned by io.py, as frontend/listener.py is."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from meshlm.frontend.grpc.servicer import NAME, Servicer, refuse
from meshlm.frontend.http.bodies import LARGE_BYTES
from meshlm.frontend.http.endpoint import take
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.http.server import ByteBudget
from meshlm.frontend.http.web_pages import MAX_SHOWN, OTHER_SITE
from meshlm.frontend.listener import tls_context, watch_files, watched_files
from meshlm.frontend.requests.generation import Backend
from meshlm.protocol.config import ServerConfig
from meshlm.runtime import tls
from meshlm.runtime.api_keys import ADMIN, INFERENCE, ApiKeys

# Most messages are here by then; what is not counts as long as the longest, since nobody says how long it is.
GRACE_S = 0.2
FREE_BYTES = 64 << 10  # of each message do not count: small ones are served beside large ones
SMALL_BYTES = 64 << 10  # of a message to another service than the engine's
MAX_FIELDS = 131_072  # of a message that is no small one, with those of messages in it; a packed list is one
FULL = "this server is reading as many bytes of messages as it may (--max-incoming-bytes)"
# What each method of the engine takes.
METHODS: dict[str, Descriptor] = {
    f"/{NAME}/{method.name}": method.input_type for method in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods
}

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # types of its stubs, not of the library
HEALTH_S = 0.5  # how often readiness is looked at
STOP_S = 2.0  # for calls that ended to be read
OPEN_SERVICES = (f"/{health.SERVICE_NAME}/",)  # for probes, which have no key
# What a key must be for, by method, as frontend/http/operation.py has it by path: inference, but for these.
# The events of KV have the tokens of everybody's prompts.
ADMIN_METHODS = frozenset(
    f"/{NAME}/{method}" for method in ("FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents")
)
INFORMATION = frozenset(f"/{NAME}/{method}" for method in ("HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads"))
SUBMITS = frozenset(f"/{NAME}/{method}" for method in ("Generate", "Embed"))  # methods that count for a key's limits
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def refusing(error: HttpError) -> "Handler":
    """A handler that ends every call with this error, and reads nothing of it."""

    async def end(requests: AsyncIterator[bytes], context: "Context") -> AsyncIterator[bytes]:
        await refuse(context, error)
        yield b""

    return grpc.stream_stream_rpc_method_handler(end)


class Incoming:
    """The messages of clients, each read once its call is let in, within what the frontend may hold, and then decoded.

    The library reads a message whole and decodes it before a method of its own kind sees the call. So every method is served here as
    one with a stream of bytes: of a call that is refused nothing is read but what fits into the window of its stream (64 KiB)."""

    def __init__(self, server: ServerConfig) -> None:
        self._longest, self._timeout_s = server.max_body_bytes, server.http_body_timeout
        self._budget = ByteBudget(server.max_incoming_bytes)
        self._decodes_large = asyncio.Lock()

    def reading(self, method: str, handler: "Handler") -> "Handler":
        """The same method, whose messages are read here, and whose HttpErrors become gRPC's statuses."""
        decode = handler.request_deserializer
        assert decode is not None
        run: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        async def serve(_: AsyncIterator[bytes], context: "Context") -> AsyncIterator[Any]:
            try:
                if handler.request_streaming:
                    answer = run(self._each(method, decode, context), context)
                elif (request := await self._next(method, decode, context)) is None:
                    raise HttpError(400, f"{method}: the call brings no message")
                else:
                    answer = run(request, context)
                if hasattr(answer, "__aiter__"):
                    async with contextlib.aclosing(answer):
                        async for message in answer:
                            yield message
                elif (message := await answer) is not None:  # None: it has written its messages itself
                    yield message
            except HttpError as error:
                await refuse(context, error)

        return grpc.stream_stream_rpc_method_handler(serve, response_serializer=handler.response_serializer)

    async def _each(self, method: str, decode: Callable[[bytes], Any], context: "Context") -> AsyncIterator[Any]:
        while (message := await self._next(method, decode, context)) is not None:
            yield message

    async def _next(self, method: str, decode: Callable[[bytes], Any], context: "Context") -> Any:
        """The next message of the call, or None when there is no more. HttpError."""
        async with self._raw(context) as raw:
            if raw is None:
                return None
            kind = METHODS.get(method)
            if kind is None and len(raw) > SMALL_BYTES:
                raise HttpError(413, f"{method}: a message has at most {SMALL_BYTES} bytes")
            try:
                if kind is None or len(raw) <= LARGE_BYTES:
                    return decode(raw)
                async with self._decodes_large:
                    # Counted before it is decoded: an empty text takes two bytes here and sixty in memory.
                    await asyncio.to_thread(check_fields, raw, kind)
                    return await asyncio.to_thread(decode, raw)
            except DecodeError:
                raise HttpError(400, f"{method}: this is no message of this method") from None

    @contextlib.asynccontextmanager
    async def _raw(self, context: "Context") -> AsyncIterator[bytes | None]:
        """A message's bytes, which count until they are decoded; None after the last one. HttpError when it may or does not come."""
        held = 0
        reading = asyncio.ensure_future(context.read())
        try:
            await asyncio.wait({reading}, timeout=GRACE_S)
            if not reading.done():
                held = self._take(self._longest)
                await asyncio.wait({reading}, timeout=self._timeout_s)
            if not reading.done():
                raise HttpError(408, f"the message did not come within {self._timeout_s:g} s")
            raw = reading.result()
            if raw is grpc.aio.EOF:
                yield None
                return
            self._budget.give(held)
            held = 0
            held = self._take(len(raw))
            yield raw
        finally:
            reading.cancel()
            self._budget.give(held)

    def _take(self, num_bytes: int) -> int:
        """What counts of so many bytes. HttpError when there is no room for them."""
        counted = max(0, num_bytes - FREE_BYTES)
        if not self._budget.take(counted):
            raise HttpError(503, FULL)
        return counted


def check_fields(raw: bytes, kind: Descriptor, most: int = MAX_FIELDS) -> None:
    """HttpError where the message and those in it have more than `most` fields. What cannot be read is the decoder's to refuse."""
    left, waiting = most, [(0, len(raw), kind)]
    while waiting:
        at, end, kind = waiting.pop()
        while at < end:
            left -= 1
            if left < 0:
                raise HttpError(400, f"the message has more than {most} fields; lists of numbers are to be packed")
            tag, at = _varint(raw, at)
            match tag & 7:
                case 0:
                    _, at = _varint(raw, at)
                case 1:
                    at += 8
                case 5:
                    at += 4
                case 2:
                    size, at = _varint(raw, at)
                    field = kind.fields_by_number.get(tag >> 3)
                    if field is not None and field.message_type is not None:
                        waiting.append((at, min(at + size, end), field.message_type))
                    at += size
                case _:  # groups, which proto3 has not
                    raise DecodeError("a group")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number that stands there, and where the next field begins."""
    value = shift = 0
    for byte in raw[at : at + 10]:
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise DecodeError("a number without an end")


class CallGate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Before a message of a call is read: asks for one of the API keys in its metadata, `authorization: Bearer KEY`, for one with the
    method's scope, whether it may ask that often, and whether the mesh takes requests."""

    def __init__(self, backend: Backend, keys: ApiKeys) -> None:
        self._backend, self._keys = backend, keys
        self._incoming = Incoming(backend.config.server)

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler":
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        try:
            self._check(method, dict(handler_call_details.invocation_metadata or ()))
        except HttpError as error:
            if method in SUBMITS:
                self._backend.observer.refused(error)
            return refusing(error)
        return self._incoming.reading(method, handler)

    def _check(self, method: str, metadata: Mapping[str, str | bytes]) -> None:
        """HttpError for a call that is not let in."""
        if method.startswith(OPEN_SERVICES):
            return
        # What gRPC-Web brings through a proxy: a page of another origin asks nothing of a server without an API key.
        origin, site = metadata.get("origin"), metadata.get("sec-fetch-site")
        server = self._backend.config.server
        is_program = (origin is None and site is None) or site == "same-origin"
        if not (server.has_api_keys or is_program or {"*", origin} & {*server.cors_origins}):
            raise HttpError(403, OTHER_SITE.format(origin=str(origin)[:MAX_SHOWN]))
        wanted = scope_of(method)
        if self._keys.asks_for(wanted):
            given = str(metadata.get("authorization", "")).removeprefix("Bearer ").encode()
            found = self._keys.find((given,))
            if found is None:
                raise HttpError(401, "send a valid key as metadata 'authorization: Bearer KEY'")
            if wanted and wanted not in found.scopes:
                raise HttpError(403, f"this key is not for {wanted}")
            if method in SUBMITS:
                take(self._backend.observer.rates, found)
        if method in SUBMITS and (reason := self._backend.readiness.refusal(attaches=False)):
            raise HttpError(503, reason)


def scope_of(method: str) -> str:
    """Gives the scope that a key must have to call this method; "": any key will do."""
    return ADMIN if method in ADMIN_METHODS else "" if method in INFORMATION else INFERENCE


class Certificates:
    """TLS of the port, whose files may change while it serves (--enable-ssl-refresh). The library asks for a new configuration at each
    handshake, in threads of its own; it gets one when the files have changed."""

    def __init__(self, server: ServerConfig) -> None:
        """ProcessFatal for files that cannot be used."""
        self._server = server
        self.serves = tls_context(server) is not None
        self._new: Any = None  # a configuration that no handshake has fetched yet

    def credentials(self) -> "grpc.ServerCredentials | None":
        """None without a certificate."""
        if not self.serves:
            return None
        required = bool(self._server.ssl_cert_reqs)
        return grpc.dynamic_ssl_server_credentials(self._read(), self._fetch, require_client_authentication=required)

    def read_again(self) -> None:
        """Use the files for handshakes to come. TLSError for what cannot be used: those before hold."""
        tls.make_context(self._server)
        self._new = self._read()

    def _read(self) -> Any:
        server = self._server
        cert, key = Path(server.ssl_certfile).read_bytes(), Path(server.ssl_keyfile or server.ssl_certfile).read_bytes()
        authorities = Path(server.ssl_ca_certs).read_bytes() if server.ssl_ca_certs else None
        return grpc.ssl_server_certificate_configuration([(key, cert)], authorities)

    def _fetch(self) -> Any:
        """None: the same as before."""
        new, self._new = self._new, None
        return new


class GrpcListener:
    """Serves until `stop`. OSError when the port cannot be had."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        server = backend.config.server
        self._keys = ApiKeys.of_server(server)
        self._server = grpc.aio.server(
            interceptors=[CallGate(backend, self._keys)],
            options=[
                ("grpc.so_reuseport", 1),  # several frontends share the port
                ("grpc.max_receive_message_length", server.max_body_bytes),
                ("grpc.http2.bdp_probe", 0),  # windows do not grow: of a message that nobody reads 64 KiB come
                ("grpc.max_send_message_length", -1),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),  # routers ping idle connections
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        self._servicer = Servicer(backend)
        self._health = health.aio.HealthServicer()
        self.serving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        server = self._backend.config.server
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        address = f"[{server.address}]:{server.port}" if ":" in server.address else f"{server.address}:{server.port}"
        try:
            certificates = Certificates(server)
            if credentials := certificates.credentials():
                self._server.add_secure_port(address, credentials)
            else:
                self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(0, str(error)) from None
        await self._server.start()
        loop = asyncio.get_running_loop()
        reload_tls = certificates.read_again if certificates.serves else None
        self._watching = loop.create_task(watch_files(watched_files(server, self._keys, reload_tls)))
        self.serving = loop.create_task(self._tell_health())

    async def _tell_health(self) -> None:
        """Keeps grpc.health.v1 true: of the server as a whole (it lives), and of the service (requests are served)."""
        await self._health.set("", SERVING)
        while True:
            ready = not (self._backend.readiness.not_ready_reason() or self._backend.readiness.blocked())
            await self._health.set(NAME, SERVING if ready else NOT_SERVING)
            await asyncio.sleep(HEALTH_S)

    async def hand_over(self, limit_s: float) -> None:
        """Leaves new connections to the other listeners of the port; waits for the open calls, `limit_s` at most."""
        self._servicer.subscriptions.end()
        await self._server.stop(limit_s)

    async def stop(self) -> None:
        if self.serving is not None:
            self.serving.cancel()
        if self._watching is not None:
            self._watching.cancel()
        self._servicer.subscriptions.end()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(STOP_S)
