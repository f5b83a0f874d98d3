"""Rows of a .gguf file as codes, scales and minima (reference.py). Block layouts: ggml-common.h of llama.cpp."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from meshlm.kernels.packed_gemm.reference import PackedWeight, pack


class Blocks(NamedTuple):
    """Rows in blocks: codes uint8 [rows, blocks, inputs of a block], scales float32 [rows, blocks, groups of a block]."""

    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None  # as the scales


class Layout(NamedTuple):
    """How a type's blocks lie."""

    bits: int
    group: int
    zero: int
    bytes: int  # of a block
    read: Callable[[Tensor], Blocks]  # of uint8 [rows, blocks, bytes]


def _half(data: Tensor, at: int) -> Tensor:
    return data[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """[..., bytes] -> [..., 2 bytes]: the low halves, then the high ones."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _bits(data: Tensor, width: int) -> Tensor:
    """[..., bytes] -> [..., 8 / width, bytes]: the first bits of all bytes, then the next."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=data.device)
    return data.unsqueeze(-2) >> shifts[:, None] & (1 << width) - 1


def _fifth(data: Tensor) -> Tensor:
    """Four bytes -> the fifth bits of 32 codes, in their place."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return (data.unsqueeze(-1) >> shifts & 1).flatten(-2) << 4


def _q5_1(data: Tensor) -> Blocks:
    return Blocks(_nibbles(data[..., 8:]) | _fifth(data[..., 4:8]), _half(data, 0), _half(data, 2))


def _scales_k(data: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of eight times 32 inputs: 6 bits each in 12 bytes, times one number for all scales and one for all minima."""
    low, middle, high = data[..., 4:8], data[..., 8:12], data[..., 12:16]
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=-1)
    minima = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), dim=-1)
    return _half(data, 0) * scales, -(_half(data, 2) * minima)


def _pairs(data: Tensor) -> Tensor:
    """128 bytes -> 256 codes: 32 low halves, their high halves, and so on."""
    return _nibbles(data.unflatten(-1, (4, 32))).flatten(-2)


def _q5_k(data: Tensor) -> Blocks:
    return Blocks(_pairs(data[..., 48:]) | _bits(data[..., 16:48], 1).flatten(-2) << 4, *_scales_k(data))


def _q6_k(data: Tensor) -> Blocks:
    low = _nibbles(data[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    high = _bits(data[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-3)
    scales = data[..., 192:208].contiguous().view(torch.int8).float()
    return Blocks(low | high << 4, _half(data, 208) * scales)


LAYOUTS = {
    2: Layout(4, 32, 8, 18, lambda data: Blocks(_nibbles(data[..., 2:]), _half(data, 0))),
    3: Layout(4, 32, 0, 20, lambda data: Blocks(_nibbles(data[..., 4:]), _half(data, 0), _half(data, 2))),
    6: Layout(5, 32, 16, 22, lambda data: Blocks(_nibbles(data[..., 6:]) | _fifth(data[..., 2:6]), _half(data, 0))),
    7: Layout(5, 32, 0, 24, _q5_1),
    8: Layout(8, 32, 128, 34, lambda data: Blocks(data[..., 2:] ^ 128, _half(data, 0))),
    12: Layout(4, 32, 0, 144, lambda data: Blocks(_pairs(data[..., 16:]), *_scales_k(data))),
    13: Layout(5, 32, 0, 176, _q5_k),
    14: Layout(6, 16, 32, 210, _q6_k),
}
"""By ggml's number of a type: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K."""


def packed(data: Tensor, ggml_type: int, dtype: torch.dtype) -> PackedWeight:
    """uint8 [rows, bytes of a row] -> the weight, whose scales are float32 or rounded to float16."""
    layout = LAYOUTS[ggml_type]
    found = layout.read(data.unflatten(1, (-1, layout.bytes)))
    codes = found.codes.flatten(1)
    low, high = pack(codes, layout.bits)
    kept = torch.float32 if dtype == torch.float32 else torch.float16

    def by_group(values: Tensor) -> Tensor:
        return values.flatten(1).t().to(kept).contiguous()

    minima = None if found.minima is None else by_group(found.minima)
    return PackedWeight(
        low, high, by_group(found.scales), minima=minima, bits=layout.bits, group=layout.group, zero=layout.zero,
        inputs=codes.shape[1],
    )  # fmt: skip
