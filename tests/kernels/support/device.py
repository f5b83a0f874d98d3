"""Where kernels are tested and how near they must come."""

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
MARKS = [pytest.mark.gpu] if ON_GPU else []
# float32 products are TF32 on the GPU (serving uses the 16-bit dtypes there).
# The interpreter's products of bfloat16 are wrong (triton 3.6 to 3.9): bfloat16 is for the GPU.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if ON_GPU else [])
TOLERANCE = {torch.float32: 5e-3 if ON_GPU else 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def near(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    """Within the dtype's rounding of the reference."""
    tolerance = TOLERANCE[dtype] * factor
    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance)


WIDE = torch.bfloat16 if ON_GPU else torch.float16
"""The dtype of queries beside an FP8 cache."""
needs_fp8 = pytest.mark.skipif(
    ON_GPU and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no 8-bit floats"
)


def near_in_fp8(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within one step of the format. The interpreter (triton 3.9) loses the carry when a value rounds up to a power of two."""
    step = torch.isclose(
        got.float(), expected.float(), atol=0.01, rtol=0.26 if got.dtype == torch.float8_e5m2 else 0.13
    )
    assert float(step.float().mean()) >= (1.0 if ON_GPU else 0.98)


needs_hopper = pytest.mark.skipif(
    not ON_GPU or torch.cuda.get_device_capability()[0] != 9, reason="warp group products of Hopper"
)
