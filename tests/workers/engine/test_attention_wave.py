"""What the scheduler is told of attention's tiles (no GPU: the device's properties are given)."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
import torch
from tiny_models import spec_of

from meshlm.kernels.attention import tiles
from meshlm.protocol.model import ModelSpec
from meshlm.workers.engine import triton_kit
from meshlm.workers.engine.kit import TorchKit

LLAMA: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(tiles, "hopper_from", lambda dim: 32e6 if dim == 128 else math.inf)


def wave(spec: ModelSpec, cache: torch.dtype = torch.bfloat16) -> int:
    engine: Any = SimpleNamespace(
        spec=spec, layout=SimpleNamespace(dtype=cache), dtype=torch.bfloat16, device=torch.device("cuda")
    )
    assert TorchKit().attention_wave(engine) == 0
    return triton_kit.TritonKit().attention_wave(engine)


def test_it_is_known_where_hoppers_kernel_attends() -> None:
    assert wave(spec_of(**LLAMA)) == 528
    assert wave(spec_of(**LLAMA | {"head_dim": 64})) == 0, "no table says that the kernel is faster there"
    assert wave(spec_of(**LLAMA), torch.float8_e4m3fn) == 0, "another kernel reads such a cache"


def test_layers_with_windows_do_not_count() -> None:
    assert wave(spec_of(**LLAMA, sliding_window=128)) == 0
    mixed: dict[str, Any] = {"num_hidden_layers": 2, "sliding_window": 128, "sliding_layers": (True, False)}
    assert wave(spec_of(**LLAMA, **mixed)) == 528
