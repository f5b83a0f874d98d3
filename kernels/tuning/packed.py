"""Few rows times weights of 4 bits for the tuner: kernels/packed_few, beside what kernels/packed_gemm does with as many rows."""

from functools import partial

import torch
from torch import Tensor

from meshlm.kernels.packed_few import plan
from meshlm.kernels.packed_few.plan import Shape
from meshlm.kernels.packed_gemm import kernel as packed_gemm
from meshlm.kernels.packed_gemm.reference import CHUNK, PLANE, PackedWeight
from meshlm.kernels.tuning.core import PLAIN, Case, Config, Key, Run, Setting, Ways


def num_bytes(key: Key) -> int:
    """The bytes of a weight of these sizes."""
    outputs, inputs = int(key[0]), int(key[1])
    return outputs * -(-inputs // CHUNK) * PLANE * 4


def ways(case: Case, setting: Setting, copies: int, most: int) -> Ways:
    """The words of so many weights; the plain way, and no more than `most` others."""
    weight = random_weight(case.key, setting.device)
    words = [weight.low, *(torch.randint_like(weight.low, -(2**31), 2**31 - 1) for _ in range(copies - 1))]
    x = torch.randn(case.rows, weight.inputs, device=setting.device, dtype=setting.dtype)
    runs: dict[Config, Run] = {PLAIN: lambda low: packed_gemm.usual_product(x, weight._replace(low=low))}
    for shape in plan.shapes_of(weight.low.shape[1] // PLANE)[:most]:
        runs[tuple(shape)] = partial(_few, x, weight, shape)
    return Ways(words, runs)


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
