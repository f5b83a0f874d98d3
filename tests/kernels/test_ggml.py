"""Packed rows of .gguf files have the values that the gguf package decodes."""

import pytest
import torch
from device import DEVICE
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from gguf_models import encoded

from meshlm.kernels.packed_gemm import reference
from meshlm.kernels.packed_gemm.ggml import LAYOUTS, packed


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_values_are_those_of_the_gguf_package(kind: str) -> None:
    found = GGMLQuantizationType[kind]
    data = encoded(kind, 37, 768)
    expected = torch.from_numpy(dequantize(data, found).copy())
    rows = torch.from_numpy(data).to(DEVICE)
    weight = packed(rows, int(found), torch.float32)
    exact = reference.decode(weight, torch.float32).cpu()
    torch.testing.assert_close(exact, expected, atol=1e-7, rtol=1e-6)
    rounded = reference.decode(packed(rows, int(found), torch.bfloat16), torch.float32).cpu()
    error = (rounded - expected).abs().mean()
    assert float(error) <= 0.5 * float((expected.bfloat16().float() - expected).abs().mean()), "bfloat16 rounds more"
    assert weight.bits == LAYOUTS[found].bits
