"""The reference of gate_up_silu/kernel.py, in plain torch: the unfused operations, one after the other."""

from torch import Tensor

from meshlm.kernels.silu_mul.reference import silu_mul


def gate_up_silu(x: Tensor, w: Tensor) -> Tensor:
    return silu_mul((x.float() @ w.float().t()).to(x.dtype))
