"""Programmatic dependent launch (Hopper and later): a kernel starts while the one before it ends.

A kernel that is launched so may do what does not depend on earlier kernels (read weights), must call gdc_wait before it reads their
results or writes anything, and must always call it, because the kernel after it counts on that. CUDA C++ Programming Guide,
"Programmatic Dependent Launch and Synchronization".
"""

from functools import cache

import torch

FEW_ROWS = 16
"""Products of so many are often kernels of ours, which ask for their weights early; cuBLAS's take no part in this."""


@cache
def supported() -> bool:
    """Whether kernels here are launched so."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def for_few_rows(rows: int, device: torch.device) -> bool:
    """Whether a kernel between products of so many rows is launched so."""
    return rows <= FEW_ROWS and device.type == "cuda" and supported()


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of a GPU's multiprocessors; 8 elsewhere (the interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
