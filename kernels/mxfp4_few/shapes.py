"""What kernel.py takes, and its tiles. Without Gluon, which takes long to import."""

from typing import NamedTuple

from meshlm.kernels.mxfp4_experts.layout import MXFP4Weight

MOST_ROWS = 16  # that are not sorted
MOST_SCALE = 128  # as e8m0: 2


class Shape(NamedTuple):
    """Times 16 lines of the weight that a program has (of a gate half as many of up's); its warps (powers of two); turns
    of its loop whose weights are asked for ahead."""

    tiles: int
    warps: int
    depth: int = 1


def moderate(weight: MXFP4Weight) -> bool:
    """Whether no scale is more than 2, which the kernels here need: times 2^126 it must be a bfloat16. Waits for the device."""
    return bool((weight.scales <= MOST_SCALE).all())
