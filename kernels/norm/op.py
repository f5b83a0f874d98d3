"""The records of RMSNorm: alone, and behind the addition to the residual stream, also of sums in parts."""

import torch
from torch import Tensor

from meshlm.kernels.norm import kernel, reference
from meshlm.kernels.op import Case, Launch, Op

EPS = 1e-5


def _norm(dtype: torch.dtype, device: torch.device, rows: int, columns: int) -> Launch:
    x, weight = torch.randn(rows, columns, device=device).to(dtype), torch.rand(columns, device=device).to(dtype) + 0.5
    moved = 2 * x.nbytes
    return Launch(lambda: kernel.rms_norm(x, weight, EPS), lambda: reference.rms_norm(x, weight, EPS), moved)


def _add(dtype: torch.dtype, device: torch.device, rows: int, columns: int, parts: int = 0) -> Launch:
    """parts: of a sum, float32; 0: it is whole. The stream is the same to the last bit."""
    x = (
        torch.randn(parts, rows, columns, device=device)
        if parts
        else torch.randn(rows, columns, device=device).to(dtype)
    )
    residual = torch.randn(rows, columns, device=device).to(dtype)
    weight = torch.rand(columns, device=device).to(dtype) + 0.5

    def run() -> list[Tensor]:
        normed = kernel.add_rms_norm(x, residual, weight, EPS)
        return [residual, normed]

    def expected() -> list[Tensor]:
        stream = residual.clone()
        normed = reference.add_rms_norm(x.sum(0).to(dtype) if parts else x, stream, weight, EPS)
        return [stream, normed]

    return Launch(run, expected, x.nbytes + 3 * residual.nbytes)


SHAPES: list[Case] = [(1, 64), (3, 576), (7, 1000), (17, 129)]
WIDE: list[Case] = [(rows, columns) for columns in (1024, 4096) for rows in (1, 16, 64, 256, 2048, 8192)]
OPS = (
    Op("rms_norm", _norm, SHAPES, WIDE),
    Op("add_rms_norm", _add, SHAPES, WIDE, exact=1),
    Op("add_rms_norm_of_parts", _add, [(*shape, 3) for shape in SHAPES]),
)
