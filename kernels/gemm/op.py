"""The record of products of many rows, and which of cuBLAS's algorithms a start tries for them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.gemm import kernel
from meshlm.kernels.op import Case, Launch, Op
from meshlm.kernels.tuning import core
from meshlm.kernels.tuning.core import PLAIN, Setting, Ways

ROWS = [16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
ROWS += [1536, 2048, 2560, 3072, 3584, 4096, 6144, 8192, 12288, 16384]
QUICK_ROWS = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]


def ways(case: core.Case, setting: Setting, weights: Callable[[int, int], list[Tensor]], most: int) -> Ways:
    """Beside its first choice."""
    outputs, inputs = case.key
    make: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
    products = kernel.products_of(setting.device, setting.dtype)
    x, out = torch.randn(case.rows, inputs, **make), torch.empty(case.rows, outputs, **make)
    runs: dict[core.Config, core.Run] = {PLAIN: lambda w: F.linear(x, w)}
    found = products.algorithms(case.rows, outputs, inputs)
    for algorithm in found if setting.full else found[: 2 * most]:

        def run(w: Tensor, algorithm: Any = algorithm) -> Tensor:
            products.run(x, w, out, algorithm)
            return out

        runs[algorithm.config] = run
    return Ways(weights(outputs, inputs), runs)


def _make(dtype: torch.dtype, device: torch.device, rows: int, outputs: int, inputs: int) -> Launch:
    """As the table has it, beside torch's own call."""
    x = torch.randn(rows, inputs, device=device, dtype=dtype)
    w = torch.randn(outputs, inputs, device=device, dtype=dtype) / inputs**0.5

    def expected() -> Tensor:
        return F.linear(x.float(), w.float())

    return Launch(lambda: kernel.gemm(x, w), expected, 0, 2 * rows * w.numel(), {"torch": lambda: F.linear(x, w)})


SHAPES: list[Case] = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]  # of Llama-3.1-8B
OPS = (Op("gemm", _make, [(5, 24, 40), (130, 64, 72)], [(rows, *shape) for shape in SHAPES for rows in ROWS], near=2),)
