"""MXFP4 weights of experts as kernel.py reads them: 64 bytes of a row hold the codes of 128 inputs, a word their four scales.

    codes int16 [..., outputs, chunks, 32]: word j has the codes of inputs 32 p + j of the chunk, p = 0 to 3
    scales uint8 [..., outputs, chunks, 4]: e8m0 of inputs 32 p .. 32 p + 31

A code is a sign and three digits. Those of the first three stand so that a shift by 0, 3 and 6 brings them where sign, exponent and
mantissa of a bfloat16 are; those of the fourth have the bits that are left (`PLACES`). A row has whole chunks; behind the last
input codes are 0 and scales 127 (a factor of 1). The format itself: kernels/mxfp4.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.mxfp4.reference import GROUP, VALUES, decode_mxfp4

PLANES = 4  # groups of a chunk
CHUNK = PLANES * GROUP  # inputs
ONE = 127  # the scale that changes nothing
PLACES = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (10, 13, 14, 11))
"""In a word: where the bits of its four codes stand, of each the lowest first."""


class MXFP4Weight(NamedTuple):
    """Weights of experts [experts, outputs, inputs]."""

    codes: Tensor  # int16 [experts, outputs, chunks * 32]
    scales: Tensor  # uint8 [experts, outputs, chunks * 4]
    inputs: int


def encode(values: Tensor) -> dict[str, Tensor]:
    """[outputs, inputs] -> codes (as bytes) and scales, by the names of parameters: each value the nearest one of its group.

    A group's scale is the least power of two with which its largest value is no more than 6: what was MXFP4 comes back exactly.
    """
    parted = F.pad(values.float(), (0, -values.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    exponents = parted.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2
    scaled = parted / torch.exp2(exponents)[..., None]
    borders = torch.tensor([(a + b) / 2 for a, b in pairwise(VALUES[:8])], dtype=torch.float32, device=values.device)
    codes = torch.bucketize(scaled.abs(), borders).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    words, scales = pack(codes[..., ::2] | codes[..., 1::2] << 4, (exponents + ONE).to(torch.uint8))
    return {"weight": words.view(torch.uint8), "weight_scale": scales}


def chunks_of(inputs: int) -> int:
    return -(-inputs // CHUNK)


def pack(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [..., groups, 16] and [..., groups], as files have them (kernels/mxfp4) -> codes and scales, as above but flat."""
    missing = -scales.shape[-1] % PLANES
    blocks, scales = F.pad(blocks, (0, 0, 0, missing)), F.pad(scales, (0, missing), value=ONE)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [..., groups, 32]
    planes = codes.unflatten(-2, (-1, PLANES)).to(torch.int32)
    words = sum(
        (planes[..., nth, :] >> bit & 1) << place
        for nth, places in enumerate(PLACES)
        for bit, place in enumerate(places)
    )
    assert isinstance(words, Tensor)
    return words.to(torch.int16).flatten(-2), scales


def unpack(weight: MXFP4Weight, dtype: torch.dtype) -> Tensor:
    """The values [..., outputs, inputs] of some experts, or of one."""
    words = weight.codes.unflatten(-1, (-1, GROUP)).to(torch.int32)
    codes = [sum((words >> place & 1) << bit for bit, place in enumerate(places)) for places in PLACES]
    planes = torch.stack([torch.as_tensor(each) for each in codes], dim=-2).flatten(-3, -2)  # [..., groups, 32]
    blocks = (planes[..., ::2] | planes[..., 1::2] << 4).to(torch.uint8)
    return decode_mxfp4(blocks, weight.scales, dtype)[..., : weight.inputs]
