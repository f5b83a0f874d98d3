"""The system_fingerprint of answers says what could make the same request's answer another one."""

import msgspec
import pytest
from parsing import RESOLVED

from meshlm.frontend.openai.response_fields import system_fingerprint
from meshlm.protocol.config import MeshConfig, ParallelConfig, ServerConfig


def fingerprint(
    dtype: str = "float32", port: int = 8000, degree: int = 1, mode: str = "full", value: str = ""
) -> str | None:
    server = msgspec.convert({"port": port, "fingerprint_mode": mode, "fingerprint_value": value}, ServerConfig)
    resolved = msgspec.structs.replace(RESOLVED, dtype=dtype)
    parallel = ParallelConfig(tensor_parallel_size=degree)
    config = msgspec.structs.replace(MeshConfig(), server=server, resolved=resolved, parallel=parallel)
    return system_fingerprint(config, "1.2")


def test_it_has_vllms_form() -> None:
    plain, divided = fingerprint(), fingerprint(degree=2)
    assert plain is not None
    assert plain.startswith("meshlm-1.2-")
    assert divided == plain.replace("1.2-", "1.2-tp2-")
    assert len(plain.rpartition("-")[2]) == 8


def test_what_computes_the_same_has_the_same() -> None:
    assert fingerprint() == fingerprint(port=9000)
    assert fingerprint() != fingerprint("bfloat16")


@pytest.mark.parametrize(("mode", "value", "found"), [("none", "", None), ("custom", "mine", "mine")])
def test_the_server_may_say_another_or_none(mode: str, value: str, found: str | None) -> None:
    assert fingerprint(mode=mode, value=value) == found
    assert fingerprint(mode="hash", degree=2) == fingerprint()
