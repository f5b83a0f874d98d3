"""A backend of attention that this model cannot have on this device is refused before a process starts."""

from typing import Any

import msgspec
import pytest
from tiny_models import spec_of

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.engine import CacheConfig, WorkerConfig
from meshlm.protocol.model import ModelSpec
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flag_rules, rules

PLAIN = spec_of(head_dim=64)
ENCODER = msgspec.structs.replace(PLAIN, encoder_only=True)
ODD = spec_of(head_dim=80)


def check(wanted: str, device: str, dtype: str, spec: ModelSpec = PLAIN, held: Any = "auto") -> None:
    config = MeshConfig(worker=WorkerConfig(attention_backend=wanted), cache=CacheConfig(kv_cache_dtype=held))
    rules.check(flag_rules.attention(config, spec, device, dtype))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("triton", "cpu", "float32"), "--attention-backend triton: it needs a CUDA device; use auto"),
        (("flashinfer", "cpu", "float32"), "--attention-backend flashinfer: it needs a CUDA device; use auto"),
        (("cpu", "cuda", "float32"), "--attention-backend cpu: it computes on the CPU; use auto"),
        (("cpu", "cpu", "bfloat16"), "--attention-backend cpu: it computes in float32; use auto"),
        (("triton", "cuda", "float32"), "--attention-backend triton: it computes in --dtype float16 or bfloat16, not"),
        (("triton", "cuda", "bfloat16", ENCODER), "--attention-backend triton: an encoder has no KV cache; use auto"),
        (("flashinfer", "cuda", "bfloat16", ODD), "it is used for heads of 64, 128, 256 numbers, this model has 80"),
        (("flash_attn", "cuda", "bfloat16", PLAIN, "fp8"), "--kv-cache-dtype fp8: the attention backend flash_attn"),
    ],
)
def test_what_is_known_without_a_gpu(asked: tuple[Any, ...], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        check(*asked)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "asked",
    [
        ("auto", "cpu", "bfloat16"),
        ("torch", "cuda", "float32", ENCODER),
        ("torch", "cpu", "float32", PLAIN, "fp8"),
        ("cpu", "cpu", "float32"),
        ("triton", "cuda", "bfloat16", PLAIN, "fp8"),
        ("a-plug-in", "cpu", "float32"),
        ("triton", "fake", "float32"),
    ],
)
def test_what_may_be(asked: tuple[Any, ...]) -> None:
    check(*asked)
