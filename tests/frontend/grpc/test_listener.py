"""What a key may be used for over gRPC is what it may be used for over HTTP."""

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from meshlm.frontend.grpc.listener import KeyCheck, scope_of
from meshlm.frontend.grpc.servicer import NAME
from meshlm.runtime.api_keys import ADMIN, INFERENCE, ApiKeys

PASSED = grpc.unary_unary_rpc_method_handler(lambda request, context: request)


async def answer(keys: ApiKeys, method: str, key: str) -> grpc.StatusCode | None:
    """The status with which the call is refused; None when it is let through."""

    async def found(details: Any) -> Any:
        return PASSED

    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    details: Any = SimpleNamespace(method=f"/{NAME}/{method}", invocation_metadata=metadata)
    handler = await KeyCheck(keys).intercept_service(found, details)
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
