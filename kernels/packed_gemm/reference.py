"""Weights of 4 to 8 bits with scales for groups of inputs, in the layout that the kernels read; packed and decoded in plain torch.

    w[n, k] = (code[n, k] - zero) * scale[k // group, n]              zero: a constant, or zeros[k // group, n]
    w[n, k] = code[n, k] * scale[k // group, n] + minima[k // group, n]
    w[n, k] = table[code[n, k]] * scale[k // group, n]                 codes that stand for no integers (NF4, MXFP4)

A chunk is 256 inputs of a row: 32 words, of which word i holds the low 4 bits of inputs i, i + 32, ..., i + 224, the first in its
lowest bits. The j-th nibbles of a chunk's words are a plane: 32 inputs that lie together in x too. Bits beyond the fourth have such
words of their own: 8 bits (1 of each input), 16 bits (2) or 32 bits (4). The last chunk of a row is filled up with zeros.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.mxfp4.reference import VALUES

CHUNK, PLANE, PLANES = 256, 32, 8
_WORDS = {5: torch.uint8, 6: torch.int16, 8: torch.int32}  # of the bits beyond the fourth
BITS = (4, 5, 6, 8)
WARM_ROWS = (1, 4, 8, 16, 32, 64, 128)
"""So many rows meet every variant of the kernels."""


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution (Dettmers et al. 2023, "QLoRA", appendix E)."""
FP4 = tuple(sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3))
"""The numbers that bitsandbytes calls fp4."""
TABLES: dict[str, tuple[float, ...]] = {"nf4": NF4, "fp4": FP4, "mxfp4": VALUES}


class PackedWeight(NamedTuple):
    """A weight [outputs, inputs]."""

    low: Tensor  # int32 [outputs, chunks * 32]
    high: Tensor | None  # the same with words for the other bits
    scales: Tensor  # floats [groups, outputs]
    zeros: Tensor | None = None  # uint8 [groups, outputs]
    minima: Tensor | None = None  # of the scales' dtype, [groups, outputs]
    table: Tensor | None = None  # float32 [16]
    order: Tensor | None = None  # int64 [inputs]: which of x's columns each input is; None: its own
    bits: int = 4
    group: int = PLANE  # inputs that share a scale: 16, 32, 64, 128 or a multiple of 256
    zero: int = 0  # of all, where there are no `zeros`
    inputs: int = 0
    # the kernel of one row computes with it: it was proven to be right (workers/formats/self_test.py)
    one_row: bool = False
    some_rows: bool = False  # the same of the kernel of some rows
    few_rows: bool = False  # and of kernels/packed_few
    columns: int = 0  # of x, where `order` brings some in that count for nothing; 0: as many as inputs

    @property
    def outputs(self) -> int:
        return self.low.shape[0]

    @property
    def variant(self) -> object:
        """The constants that kernels are compiled for, beside the sizes."""
        kinds = self.zeros is None, self.minima is None, self.table is None, self.order is None
        return self.bits, self.group, self.zero, self.inputs, self.scales.dtype, kinds


def pack(codes: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """uint8 [outputs, inputs] -> the words of the low bits, and of the others."""
    outputs, inputs = codes.shape
    padded = F.pad(codes, (0, -inputs % CHUNK)).view(outputs, -1, PLANES, PLANE)
    shape, device = (outputs, padded.shape[1], PLANE), codes.device
    low = torch.zeros(shape, dtype=torch.int32, device=device)
    for plane in range(PLANES):
        low |= (padded[:, :, plane].to(torch.int32) & 15) << 4 * plane
    if bits == 4:
        return low.flatten(1), None
    rest = bits - 4
    high = torch.zeros(shape, dtype=torch.int32, device=device)
    for plane in range(PLANES):
        high |= (padded[:, :, plane].to(torch.int32) >> 4 & (1 << rest) - 1) << rest * plane
    return low.flatten(1), high.to(_WORDS[bits]).flatten(1)


def unpack(weight: PackedWeight) -> Tensor:
    """The codes, uint8 [outputs, inputs], in the order of the packed inputs."""
    outputs, rest = weight.outputs, weight.bits - 4
    low = weight.low.view(outputs, -1, 1, PLANE)
    planes = torch.arange(PLANES, dtype=torch.int32, device=low.device)[:, None]
    codes = low >> 4 * planes & 15
    if weight.high is not None:
        high = weight.high.view(outputs, -1, 1, PLANE).to(torch.int32)
        codes |= (high >> rest * planes & (1 << rest) - 1) << 4
    return codes.to(torch.uint8).flatten(1)[:, : weight.inputs]


def decode(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The values [outputs, inputs], rounded once, in the order of x's columns."""
    codes = unpack(weight)
    values = codes.to(torch.float32) if weight.table is None else weight.table[codes.long()]

    def spread(of_groups: Tensor) -> Tensor:
        return of_groups.t().float().repeat_interleave(weight.group, dim=1)[:, : weight.inputs]

    if weight.minima is not None:
        values = values * spread(weight.scales) + spread(weight.minima)
    else:
        values -= spread(weight.zeros) if weight.zeros is not None else weight.zero
        values *= spread(weight.scales)
    found = values.to(dtype)
    if weight.order is None:
        return found
    restored = found.new_zeros(weight.outputs, weight.columns or weight.inputs)
    return restored.index_add_(1, weight.order, found)


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [m, inputs] -> [m, outputs]."""
    return F.linear(x, decode(weight, x.dtype), bias)
