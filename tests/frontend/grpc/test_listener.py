"""What a key may be used for over gRPC is what it may be used for over HTTP."""

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from meshlm.frontend.grpc.listener import CallGate, scope_of
from meshlm.frontend.grpc.servicer import NAME
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.http.rate_limits import RateLimits
from meshlm.protocol.config import MeshConfig, ServerConfig
from meshlm.runtime.api_keys import ADMIN, INFERENCE, ApiKeys

NO_RATES = RateLimits("")


async def let_in(request: Any, context: Any) -> Any:
    raise NotImplementedError


PASSED = grpc.unary_unary_rpc_method_handler(let_in, request_deserializer=bytes)


class Gate:
    """What the gate asks of the process."""

    def __init__(self, rates: RateLimits, server: ServerConfig) -> None:
        self.rates, self.config = rates, MeshConfig(server=server)
        self.reason = ""  # why no request is taken
        self.refusals: list[str] = []
        self.readiness = self.observer = self

    def refusal(self, *, attaches: bool) -> str:
        return self.reason

    def refused(self, error: HttpError) -> None:
        self.refusals.append(error.reason())


async def status(gate: Any, keys: ApiKeys, method: str, *metadata: tuple[str, str]) -> grpc.StatusCode | None:
    """The status with which the call is refused before anything of it is read; None when it is let through."""

    async def found(details: Any) -> Any:
        return PASSED

    details: Any = SimpleNamespace(method=f"/{NAME}/{method}", invocation_metadata=metadata)
    handler: Any = await CallGate(gate, keys).intercept_service(found, details)
    refused: list[grpc.StatusCode] = []

    class Ended(Exception):
        pass

    async def abort(code: grpc.StatusCode, text: str) -> None:
        refused.append(code)
        raise Ended

    class Read(Exception):
        pass

    async def read() -> None:
        raise Read

    try:
        await anext(handler.stream_stream(None, SimpleNamespace(abort=abort, read=read)))
    except Ended:
        return refused[0]
    except Read:
        pass
    return None


async def answer(keys: ApiKeys, method: str, key: str, rates: RateLimits = NO_RATES) -> grpc.StatusCode | None:
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    return await status(Gate(rates, ServerConfig()), keys, method, *metadata)


@pytest.mark.parametrize(
    ("method", "scope"),
    [("Generate", INFERENCE), ("Abort", INFERENCE), ("FlushCache", ADMIN), ("StartProfile", ADMIN), ("GetLoads", "")],
)
def test_a_key_is_for_some_methods(tmp_path: Any, method: str, scope: str) -> None:
    file = tmp_path / "keys"
    file.write_text("reader inference\noperator admin\n")
    keys = ApiKeys(("root",), str(file))
    assert scope_of(f"/{NAME}/{method}") == scope
    denied = grpc.StatusCode.PERMISSION_DENIED
    expected = {
        "root": None,
        "reader": None if scope in ("", INFERENCE) else denied,
        "operator": None if scope in ("", ADMIN) else denied,
        "unknown": grpc.StatusCode.UNAUTHENTICATED,
        "": grpc.StatusCode.UNAUTHENTICATED,
    }
    assert {key: asyncio.run(answer(keys, method, key)) for key in expected} == expected


def test_a_key_that_asks_too_often_waits(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("often rpm=1\n")
    keys, rates = ApiKeys((), str(file)), RateLimits(str(tmp_path))
    assert asyncio.run(answer(keys, "Generate", "often", rates)) is None
    assert asyncio.run(answer(keys, "Generate", "often", rates)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert asyncio.run(answer(keys, "GetLoads", "often", rates)) is None


def test_without_keys_admin_methods_are_for_this_host() -> None:
    denied = grpc.StatusCode.UNAUTHENTICATED
    assert asyncio.run(answer(ApiKeys((), "", admin_is_open=True), "FlushCache", "")) is None
    assert asyncio.run(answer(ApiKeys((), ""), "FlushCache", "")) is denied
    assert asyncio.run(answer(ApiKeys((), ""), "Generate", "")) is None


@pytest.mark.parametrize(
    ("metadata", "refused"),
    [
        ({}, False),
        ({"origin": "https://evil.example"}, True),
        ({"sec-fetch-site": "cross-site"}, True),
        ({"origin": "https://chat.example", "sec-fetch-site": "same-origin"}, False),
        ({"origin": "https://app.example"}, False),
    ],
)
async def test_pages_of_elsewhere_ask_nothing_without_a_key(metadata: dict[str, str], refused: bool) -> None:
    """gRPC-Web, through a proxy."""
    server = ServerConfig(allowed_origins=("https://app.example",))
    found = await status(Gate(NO_RATES, server), ApiKeys((), ""), "Generate", *metadata.items())
    assert found is (grpc.StatusCode.PERMISSION_DENIED if refused else None)
    keyed = ServerConfig(api_key=("one",))
    key = ("authorization", "Bearer one")
    assert await status(Gate(NO_RATES, keyed), ApiKeys(("one",), ""), "Generate", key, *metadata.items()) is None


async def test_a_mesh_that_takes_no_requests_reads_none() -> None:
    gate = Gate(NO_RATES, ServerConfig())
    gate.reason = "too many open requests (--max-concurrent-requests)"
    assert await status(gate, ApiKeys((), ""), "Generate") is grpc.StatusCode.UNAVAILABLE
    assert await status(gate, ApiKeys((), ""), "GetLoads") is None
    assert gate.refusals == ["max_concurrent_requests"]
