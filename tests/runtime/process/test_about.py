"""Which requests a line of the log is about."""

from typing import Any, cast

import pytest
from msgspec import Struct

from meshlm.protocol.edges.admit import AbortRequests, Admit, Assign, EngineRequest
from meshlm.protocol.edges.step import StepFailed
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.process.readable import about

WORK = EngineRequest(RequestId("cmpl-5-0"), Handle(1), pack_i32([5]), SamplingParams())
MANY = tuple(RequestId(f"r{number}") for number in range(11))


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (Admit(WORK), {"message": "Admit", "requests": "cmpl-5-0"}),
        (Assign(WORK, Identity(Role.DETOKENIZER, 0), Incarnation(1)), {"message": "Assign", "requests": "cmpl-5-0"}),
        (AbortRequests(MANY), {"message": "AbortRequests", "requests": "r0, r1, r2, r3, r4, r5, r6, r7 and 3 more"}),
        (StepFailed(1, cast(Any, 2), "x"), {"message": "StepFailed"}),
    ],
)
def test_a_line_names_them(message: Struct, says: dict[str, str]) -> None:
    assert about(message) == says
