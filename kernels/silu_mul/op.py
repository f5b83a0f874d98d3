"""The record of a gated MLP's activation, by its name. Widths of Qwen3-0.6B and Llama-3.1-8B."""

import torch

from meshlm.kernels.op import Launch, Op
from meshlm.kernels.silu_mul import reference
from meshlm.kernels.silu_mul.kernel import ACTS, act_mul


def _make(dtype: torch.dtype, device: torch.device, rows: int, columns: int, act: str = "silu") -> Launch:
    x = torch.randn(rows, 2 * columns, device=device).to(dtype) * 3
    return Launch(lambda: act_mul(x, act), lambda: reference.act_mul(x, act), 3 * x.nbytes // 2)


SHAPES = [(1, 64), (3, 576), (7, 1000), (17, 129)]
OF_MODELS = [(rows, columns) for columns in (3072, 14336) for rows in (1, 16, 64, 256, 2048, 8192)]
OPS = (Op("act_mul", _make, [(*shape, act) for shape in SHAPES for act in ACTS], OF_MODELS),)
