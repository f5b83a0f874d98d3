"""Programmatic dependent launch (Hopper and later): a kernel starts while the one before it ends.

A kernel that is launched so may do what does not depend on earlier kernels (read weights), must call gdc_wait before it reads their
results or writes anything, and must always call it, because the kernel after it counts on that. CUDA C++ Programming Guide,
"Programmatic Dependent Launch and Synchronization".
"""

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_ROWS = 16
"""Products of so many are often kernels of ours, which ask for their weights early; cuBLAS's take no part in this."""
_DEPENDENT: Mapping[str, bool] = {"PDL": True, "launch_pdl": True}
_PLAIN: Mapping[str, bool] = {"PDL": False}


def options(tensor: Tensor, rows: int = 0) -> Mapping[str, bool]:
    """The options of a launch whose kernel has a constant PDL: dependent on a GPU that can do it.

    tensor: one of the kernel's. rows: of a kernel between products, which is launched so where they are few; 0: however many there are.
    """
    return _DEPENDENT if tensor.is_cuda and rows <= FEW_ROWS and supported() else _PLAIN


@cache
def supported() -> bool:
    """Whether this GPU can launch kernels so."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


@triton.jit
def follow(PDL: tl.constexpr):
    """Lets the kernel behind this one begin, and waits for those before it. It opens a kernel that has nothing to do meanwhile."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of a GPU's multiprocessors; 8 elsewhere (the interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
