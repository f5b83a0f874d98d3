"""Random packed weights, and their values."""

import torch
from device import DEVICE
from torch import Tensor

from meshlm.kernels.packed_gemm import reference
from meshlm.kernels.packed_gemm.reference import PackedWeight

NF4 = [
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
]  # fmt: skip


def weight_of(kind: str, outputs: int, inputs: int, bits: int, group: int) -> tuple[PackedWeight, Tensor]:
    """A packed weight, and its values in float32."""
    codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8, device=DEVICE)
    groups = -(-inputs // group)
    scales = (torch.rand(groups, outputs, device=DEVICE) + 0.5).half() / 2**bits
    low, high = reference.pack(codes, bits)
    each = scales.float().t().repeat_interleave(group, 1)[:, :inputs]
    common = {"bits": bits, "group": group, "inputs": inputs}
    match kind:
        case "symmetric":
            zero = 1 << bits - 1
            return PackedWeight(low, high, scales, zero=zero, **common), (codes.float() - zero) * each  # type: ignore[arg-type]
        case "zeros":
            zeros = torch.randint(0, 1 << bits, (groups, outputs), dtype=torch.uint8, device=DEVICE)
            spread = zeros.t().float().repeat_interleave(group, 1)[:, :inputs]
            return PackedWeight(low, high, scales, zeros=zeros, **common), (codes.float() - spread) * each  # type: ignore[arg-type]
        case "minima":
            minima = -torch.rand(groups, outputs, device=DEVICE).half()
            spread = minima.t().float().repeat_interleave(group, 1)[:, :inputs]
            return PackedWeight(low, high, scales, minima=minima, **common), codes.float() * each + spread  # type: ignore[arg-type]
        case _:
            table = torch.tensor(NF4, device=DEVICE)
            return PackedWeight(low, high, scales, table=table, **common), table[codes.long()] * each  # type: ignore[arg-type]
