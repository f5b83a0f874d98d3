"""MXFP4 weights are decoded as transformers decodes gpt-oss's experts."""

import pytest
import torch

from meshlm.kernels.mxfp4.reference import decode_mxfp4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_transformers(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    experts, outputs, groups = 3, 5, 4
    blocks = torch.randint(0, 256, (experts, outputs, groups, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (experts, outputs, groups), dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)  # [experts, outputs, inputs]
    ours = decode_mxfp4(blocks, scales, dtype)
    assert ours.shape == (experts, outputs, groups * 32)
    assert ours.dtype == dtype
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, decode_mxfp4(blocks.flatten(-2), scales, dtype))


def test_the_ends_of_the_scale() -> None:
    blocks = torch.full((1, 16), 0x72, dtype=torch.uint8)  # codes 2 (1.0) and 7 (6.0)
    for scale, least in ((0, 2.0**-127), (254, 2.0**127), (127, 1.0)):
        found = decode_mxfp4(blocks, torch.tensor([scale], dtype=torch.uint8), torch.float32)
        assert float(found[0]) == least
    assert bool(decode_mxfp4(blocks, torch.tensor([255], dtype=torch.uint8), torch.float32).isnan().all())
