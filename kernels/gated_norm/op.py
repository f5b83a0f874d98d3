"""The record of norms beside a gate: of groups, with a weight of all columns, of a group, or none, in both orders."""

import torch

from meshlm.kernels.gated_norm import reference
from meshlm.kernels.gated_norm.kernel import gated_norm
from meshlm.kernels.op import Launch, Op

EPS = 1e-5


def _make(
    dtype: torch.dtype, device: torch.device, rows: int, columns: int, group: int, weights: int, before: bool = True
) -> Launch:
    """Lines are parts of wider ones."""
    wide = torch.randn(rows, 2 * columns + 10, device=device).to(dtype)
    y, gate = wide[:, 3 : 3 + columns], wide[:, columns + 5 : 2 * columns + 5]
    weight = torch.randn(weights, device=device).to(dtype) if weights else None
    given = y, gate, weight, EPS, group
    moved = 3 * rows * columns * dtype.itemsize
    return Launch(lambda: gated_norm(*given, before=before), lambda: reference.gated_norm(*given, before=before), moved)


KINDS = [(20, 60), (20, 20), (60, 60), (60, 0)]
OF_MODELS = [(rows, 8192, 1024, 8192) for rows in (1, 64, 2048)]
OPS = (
    Op("gated_norm", _make, [(5, 60, *kind, before) for kind in KINDS for before in (True, False)], OF_MODELS, near=2),
)
