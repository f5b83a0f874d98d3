"""Few rows times weights of 4 bits for the tuner: kernels/packed_few, beside what kernels/packed_gemm does with as many rows."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from meshlm.kernels.gemm import tune as gemm_tune
from meshlm.kernels.packed_few import plan
from meshlm.kernels.packed_few.plan import Shape
from meshlm.kernels.packed_gemm import kernel as packed_gemm
from meshlm.kernels.packed_gemm.reference import CHUNK, PLANE, PackedWeight
from meshlm.kernels.tuning.core import PLAIN, Case, Config, Key

Run = Callable[[Tensor], Tensor]  # from the words of a weight


def ways(case: Case, device: torch.device, dtype: torch.dtype, *, most: int) -> tuple[list[Tensor], dict[Config, Run]]:
    """The words of so many weights that each comes from memory; the plain way, and no more than `most` others."""
    weight = random_weight(case.key, device)
    copies = max(2, min(16, gemm_tune.WEIGHT_BYTES // weight.low.nbytes))
    words = [weight.low, *(torch.randint_like(weight.low, -(2**31), 2**31 - 1) for _ in range(copies - 1))]
    x = torch.randn(case.rows, weight.inputs, device=device, dtype=dtype)
    runs: dict[Config, Run] = {PLAIN: lambda low: packed_gemm.usual_product(x, weight._replace(low=low))}
    for shape in plan.shapes_of(weight.low.shape[1] // PLANE)[:most]:
        runs[tuple(shape)] = partial(_few, x, weight, shape)
    return words, runs


def random_weight(key: Key, device: torch.device) -> PackedWeight:
    """A weight of these sizes and this kind (packed_few/plan.py). What stands for one group counts for many where it is as fast."""
    outputs, inputs, kind = key
    way, group = kind.split(", groups of ")
    groups = -(-inputs // int(group))
    low = torch.randint(-(2**31), 2**31 - 1, (outputs, -(-inputs // CHUNK) * PLANE), device=device, dtype=torch.int32)
    scales = (torch.rand(groups, outputs, device=device) + 0.5).half() / 16
    zeros = torch.randint(0, 16, (groups, outputs), device=device, dtype=torch.uint8) if way == "zeros" else None
    return PackedWeight(
        low, None, scales, zeros, -8 * scales if way == "minima" else None, group=int(group), zero=8 if way == "symmetric" else 0,
        inputs=inputs, one_row=True, some_rows=True,
    )  # fmt: skip


def _few(x: Tensor, weight: PackedWeight, shape: Shape, low: Tensor) -> Tensor:
    from meshlm.kernels.packed_few import kernel as packed_few  # its dialect takes long to import

    return packed_few.packed_few(x, weight._replace(low=low), shape)
