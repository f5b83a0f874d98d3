"""What a key may be used for over gRPC is what it may be used for over HTTP."""

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from meshlm.frontend.grpc.listener import KeyCheck, scope_of
from meshlm.frontend.grpc.servicer import NAME
from meshlm.frontend.rate_limits import RateLimits
from meshlm.runtime.api_keys import ADMIN, INFERENCE, ApiKeys

NO_RATES = RateLimits("")
PASSED = grpc.unary_unary_rpc_method_handler(lambda request, context: request)


async def answer(keys: ApiKeys, method: str, key: str, rates: RateLimits = NO_RATES) -> grpc.StatusCode | None:
    """The status with which the call is refused; None when it is let through."""

    async def found(details: Any) -> Any:
        return PASSED

    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    details: Any = SimpleNamespace(method=f"/{NAME}/{method}", invocation_metadata=metadata)
    handler = await KeyCheck(keys, rates).intercept_service(found, details)
    if handler is PASSED:
        return None
    refused: list[grpc.StatusCode] = []

    async def abort(code: grpc.StatusCode, text: str) -> None:
        refused.append(code)

    await handler.unary_unary(None, SimpleNamespace(abort=abort))
    return refused[0]


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
