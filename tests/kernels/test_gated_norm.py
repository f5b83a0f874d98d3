"""Norms beside a gate, in both orders, of groups and without a norm, against the reference."""

import pytest
import torch
from device import DEVICE, DTYPES, MARKS, near

from meshlm.kernels.gated_norm import reference
from meshlm.kernels.gated_norm.kernel import gated_norm

pytestmark = MARKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("group", "weights"), [(20, 60), (20, 20), (60, 60), (60, 0)])
def test_gated_norm(group: int, weights: int, before: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = torch.randn(5, 130, device=DEVICE).to(dtype)
    y, gate = wide[:, 3:63], wide[:, 65:125]
    weight = torch.randn(weights, device=DEVICE).to(dtype) if weights else None
    found = gated_norm(y, gate, weight, 1e-5, group, before=before)
    near(found, reference.gated_norm(y, gate, weight, 1e-5, group, before=before), dtype, 2)
