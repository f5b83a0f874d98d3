"""The port of a frontend with --grpc: the service, health for probes, and reflection. Owned by io.py, as http_listener.py is."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from meshlm.frontend import watched_files
from meshlm.frontend.endpoint import take
from meshlm.frontend.errors import HttpError
from meshlm.frontend.grpc.certificates import Certificates
from meshlm.frontend.grpc.servicer import NAME, GrpcBackend, Servicer
from meshlm.frontend.rate_limits import RateLimits
from meshlm.runtime.api_keys import ADMIN, INFERENCE, ApiKeys

HEALTH_S = 0.5  # how often readiness is looked at
STOP_S = 2.0  # for calls that ended to be read
OPEN_SERVICES = (f"/{health.SERVICE_NAME}/",)  # for probes, which have no key
# What a key must be for, by method, as frontend/operations.py has it by path: inference, but for these.
ADMIN_METHODS = frozenset(f"/{NAME}/{method}" for method in ("FlushCache", "StartProfile", "StopProfile"))
INFORMATION = frozenset(f"/{NAME}/{method}" for method in ("HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads"))
SUBMITS = frozenset(f"/{NAME}/{method}" for method in ("Generate", "Embed"))  # methods that count for a key's limits
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

Handler: TypeAlias = "grpc.RpcMethodHandler[Message, Message]"  # types of its stubs, not of the library


class KeyCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Asks for one of the API keys in the call's metadata, `authorization: Bearer KEY`, for one with the method's scope, and whether it
    may ask that often."""

    def __init__(self, keys: ApiKeys, rates: RateLimits) -> None:
        self._keys, self._rates = keys, rates

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler":
        method = handler_call_details.method
        wanted = scope_of(method)
        if method.startswith(OPEN_SERVICES) or not self._keys.asks_for(wanted):
            return await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        given = str(metadata.get("authorization", "")).removeprefix("Bearer ").encode()
        found = self._keys.find((given,))
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        if found is None:
            text = "send a valid key as metadata 'authorization: Bearer KEY'"
            return _refusing(handler, grpc.StatusCode.UNAUTHENTICATED, text)
        if wanted and wanted not in found.scopes:
            return _refusing(handler, grpc.StatusCode.PERMISSION_DENIED, f"this key is not for {wanted}")
        if method in SUBMITS:
            try:
                take(self._rates, found)
            except HttpError as error:
                return _refusing(handler, grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
        return handler


def scope_of(method: str) -> str:
    """Gives the scope that a key must have to call this method; "": any key will do."""
    return ADMIN if method in ADMIN_METHODS else "" if method in INFORMATION else INFERENCE


def _refusing(handler: "Handler", code: grpc.StatusCode, text: str) -> "Handler":
    """A handler of the same kind that ends every call."""

    async def unary(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
        await context.abort(code, text)

    async def stream(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
        await unary(request, context)
        yield Message()

    codecs = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    if handler.request_streaming:
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
    else:
        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
    return make(stream if handler.response_streaming else unary, **codecs)


class GrpcListener:
    """Serves until `stop`. OSError when the port cannot be had."""

    def __init__(self, backend: GrpcBackend) -> None:
        self._backend = backend
        server = backend.config.server
        self._keys = ApiKeys.of_server(server)
        self._server = grpc.aio.server(
            interceptors=[KeyCheck(self._keys, backend.rates)],
            options=[
                ("grpc.so_reuseport", 1),  # several frontends share the port
                ("grpc.max_receive_message_length", server.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),  # routers ping idle connections
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        self._health = health.aio.HealthServicer()
        self.serving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        server = self._backend.config.server
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(Servicer(self._backend), self._server)
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
        files = watched_files.of_server(server, self._keys, reload_tls)
        self._watching = loop.create_task(watched_files.watch(files))
        self.serving = loop.create_task(self._tell_health())

    async def _tell_health(self) -> None:
        """Keeps grpc.health.v1 true: of the server as a whole (it lives), and of the service (requests are served)."""
        await self._health.set("", SERVING)
        while True:
            ready = not (self._backend.not_ready_reason() or self._backend.blocked())
            await self._health.set(NAME, SERVING if ready else NOT_SERVING)
            await asyncio.sleep(HEALTH_S)

    async def hand_over(self, limit_s: float) -> None:
        """Leaves new connections to the other listeners of the port; waits for the open calls, `limit_s` at most."""
        await self._server.stop(limit_s)

    async def stop(self) -> None:
        if self.serving is not None:
            self.serving.cancel()
        if self._watching is not None:
            self._watching.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(STOP_S)
