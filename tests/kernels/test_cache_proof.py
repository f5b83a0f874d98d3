"""Kernels that keep keys and values in 8 bits are proven against plain torch; one that does otherwise is found out."""

from typing import Any

import pytest
import torch
from device import DEVICE, WIDE, needs_fp8

from meshlm.kernels.attention import cache_proof
from meshlm.kernels.attention.cache_proof import CacheShape, prove_cache
from meshlm.kernels.rope_cache.kernel import rope_cache

pytestmark = [needs_fp8]


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_kernels_are_proven(kind: torch.dtype) -> None:
    assert prove_cache(CacheShape(4, 2, 32, 16, kind), WIDE, DEVICE) == ""


def test_what_writes_or_reads_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = CacheShape(2, 1, 16, 16, torch.float8_e5m2)
    with monkeypatch.context() as patch:
        patch.setattr(cache_proof, "prefill", lambda *_, **__: None)
        assert "attention over a cache of torch.float8_e5m2 is" in prove_cache(shape, WIDE, DEVICE)

    def unscaled(*arguments: Any) -> torch.Tensor:
        without_scales = arguments[:-2]
        return rope_cache(*without_scales)

    monkeypatch.setattr(cache_proof, "rope_cache", unscaled)
    assert "what is written to a cache of torch.float8_e5m2 is not" in prove_cache(shape, WIDE, DEVICE)
