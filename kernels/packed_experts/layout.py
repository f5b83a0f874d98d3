"""Packed weights of experts as kernel.py and direct.py read them, packed and decoded in plain torch.

    integers   w[n, k] = (code - zero) * scale       scale and zero of a group of inputs
    minima     w[n, k] = code * scale + minimum      the same
    nf4, fp4   w[n, k] = table[code] * scale         codes that stand for no integers
    mxfp4      w[n, k] = e2m1(code) * 2^(s - 127)     a scale for 32 inputs (kernels/mxfp4)

A chunk is 128 inputs of a row, in four planes of 32. Word j of a chunk holds the codes of inputs j, 32 + j, 64 + j and 96 + j, so two
words that are neighbours hold four pairs of inputs that are neighbours: an operand of a tensor core is a shift and a mask away.

    codes int16 [..., outputs, chunks * 32]      4 bits of plane p from bit 4 p on; MXFP4 places bits of its own (`PLACES`)
          int16 [..., outputs, chunks * 64]      8 bits: the words of planes 0 and 1, then those of planes 2 and 3
    high  uint8 [..., outputs, chunks * 16]      the fifth bits: byte j has those of word j, and of word j + 16 from bit 4 on
          uint8 [..., outputs, chunks * 32]      the fifth and sixth bits of word j
    scales      [..., outputs, groups, 2]        scale and zero point (or minimum), side by side
          uint8 [..., outputs, chunks * 4]       e8m0 of MXFP4

MXFP4's codes are a sign and three digits. Those of the first three planes stand so that a shift by 0, 3 and 6 brings them where sign,
exponent and mantissa of a bfloat16 are; those of the fourth have the bits that are left. Behind the last input of a row codes are 0,
and scales of MXFP4 127 (a factor of 1).
"""

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.mxfp4.reference import GROUP, VALUES, decode_mxfp4
from meshlm.kernels.packed_gemm.ggml import LAYOUTS
from meshlm.kernels.packed_gemm.reference import TABLES

PLANES, PLANE = 4, 32
CHUNK = PLANES * PLANE  # inputs
ONE = 127  # the scale of MXFP4 that changes nothing
PLACES = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (10, 13, 14, 11))
"""In a word of MXFP4: where the bits of its four codes stand, of each the lowest first."""
LEAST_NORMAL, MOST = 2.0**-14, 65504.0  # of float16


class Format(NamedTuple):
    """How codes become weights."""

    bits: int  # 4, 5, 6 or 8
    group: int  # inputs that share a scale: 16, 32, 64 or a multiple of 128
    values: Literal["integers", "minima", "nf4", "fp4", "mxfp4"] = "integers"

    @property
    def has_table(self) -> bool:
        """Whether codes stand for numbers of a table (`table_of`)."""
        return self.values in ("nf4", "fp4")

    @property
    def name(self) -> str:
        """The name by which the tuner tells layers apart, beside their sizes."""
        if self.values == "mxfp4":
            return "mxfp4"
        kind = "" if self.values == "integers" else f", {self.values}"
        return f"{self.bits} bits, groups of {min(self.group, CHUNK)}{kind}"

    @classmethod
    def of_name(cls, name: str) -> "Format":
        """The format of that name; of groups that are longer than a chunk one of chunks."""
        if name == "mxfp4":
            return MXFP4
        bits, groups, *values = name.split(", ")
        made: Format = cls(int(bits.split()[0]), int(groups.split()[-1]), *values)  # type: ignore[arg-type]
        return made


MXFP4 = Format(4, GROUP, "mxfp4")


class ExpertWeight(NamedTuple):
    """Weights of experts [experts, outputs, inputs]. Each tensor begins with a dimension of experts."""

    codes: Tensor
    scales: Tensor
    inputs: int
    format: Format = MXFP4
    high: Tensor | None = None
    order: Tensor | None = None  # int32 [experts, inputs]: which of x's columns each input is; None: its own
    columns: int = 0  # of x, where `order` brings some in that count for nothing; 0: as many as inputs

    @property
    def outputs(self) -> int:
        return self.codes.shape[-2]

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.scales.shape[-1] // PLANES if self.format.values == "mxfp4" else self.scales.shape[-2]

    def tensors(self) -> dict[str, Tensor]:
        """All that it holds on the device."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}

    def of_expert(self, number: int) -> "ExpertWeight":
        return self.of_tensors({name: tensor[number] for name, tensor in self.tensors().items()})

    def of_tensors(self, tensors: Mapping[str, Tensor]) -> "ExpertWeight":
        """The same with other tensors in the place of its own."""
        return self._replace(**tensors)  # type: ignore[arg-type]


def concatenate(weights: list[ExpertWeight]) -> ExpertWeight:
    first = weights[0]
    return first.of_tensors({name: torch.cat([each.tensors()[name] for each in weights]) for name in first.tensors()})


@cache
def table_of(values: str, device: torch.device) -> Tensor:
    """The 16 numbers, float32, that codes of nf4 or fp4 stand for."""
    return torch.tensor(TABLES[values], dtype=torch.float32, device=device)


def chunks_of(inputs: int) -> int:
    return -(-inputs // CHUNK)


def pack(
    codes: Tensor, scales: Tensor, offsets: Tensor, format: Format, dtype: torch.dtype, *, order: Tensor | None = None, columns: int = 0
) -> ExpertWeight:  # fmt: skip
    """codes uint8 [..., outputs, inputs], in the packed order; scales and offsets (zero points or minima) [..., outputs, groups].

    dtype: of the activations. With those of 16 bits scales are rounded to float16, unless that does not reach as far."""
    inputs = codes.shape[-1]
    planes = F.pad(codes, (0, -inputs % CHUNK)).unflatten(-1, (-1, PLANES, PLANE)).to(torch.int32)
    high = None
    if format.bits == 8:
        words = planes[..., ::2, :] | planes[..., 1::2, :] << 8
    else:
        words = _side_by_side(planes & 15, 4)
    if format.bits in (5, 6):
        rest = format.bits - 4
        beyond = _side_by_side(planes >> 4, rest)
        if rest == 1:
            beyond = beyond[..., :16] | beyond[..., 16:] << 4
        high = beyond.to(torch.uint8).flatten(-2)
    pairs = torch.stack((scales.float(), offsets.float().expand(scales.shape)), dim=-1)
    words = words.to(torch.int16).flatten(-3 if format.bits == 8 else -2)
    kept = pairs.to(_dtype_of_scales(pairs, dtype)).contiguous()
    return ExpertWeight(words, kept, inputs, format, high, order, columns)


def _side_by_side(planes: Tensor, width: int) -> Tensor:
    """int32 [..., PLANES, 32] -> [..., 32]: each plane from bit `width` times its number on."""
    words = torch.zeros_like(planes[..., 0, :])
    for nth in range(PLANES):
        words |= planes[..., nth, :] << width * nth
    return words


def _dtype_of_scales(pairs: Tensor, dtype: torch.dtype) -> torch.dtype:
    for kept in (torch.float16, torch.bfloat16):
        if torch.equal(pairs.to(kept).float(), pairs):
            return kept
    sizes = pairs.abs()
    has_room = bool(((sizes == 0) | ((sizes >= LEAST_NORMAL) & (sizes <= MOST))).all())
    return torch.float16 if has_room and dtype != torch.float32 else torch.float32


@cache
def format_of_blocks(ggml_type: int) -> Format:
    return of_blocks(torch.zeros(1, LAYOUTS[ggml_type].bytes, dtype=torch.uint8), ggml_type, torch.float16).format


def of_blocks(data: Tensor, ggml_type: int, dtype: torch.dtype) -> ExpertWeight:
    """Rows of a .gguf file, uint8 [..., outputs, bytes of a row], of a type of kernels/packed_gemm/ggml.py."""
    layout = LAYOUTS[ggml_type]
    found = layout.read(data.unflatten(-1, (-1, layout.bytes)))
    scales = found.scales.flatten(-2)
    if found.minima is None:
        offsets, format = torch.full_like(scales, layout.zero), Format(layout.bits, layout.group)
    else:
        offsets, format = found.minima.flatten(-2), Format(layout.bits, layout.group, "minima")
    return pack(found.codes.flatten(-2), scales, offsets, format, dtype)


def pack_mxfp4(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [..., groups, 16] and [..., groups], as files have them (kernels/mxfp4) -> codes and scales of an ExpertWeight."""
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


def encode_mxfp4(values: Tensor) -> dict[str, Tensor]:
    """[outputs, inputs] -> codes (as bytes) and scales, by the names of parameters: each value the nearest one of its group.

    A group's scale is the least power of two with which its largest value is no more than 6: what was MXFP4 comes back exactly."""
    grouped = F.pad(values.float(), (0, -values.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    exponents = grouped.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2
    scaled = grouped / torch.exp2(exponents)[..., None]
    borders = torch.tensor([(a + b) / 2 for a, b in pairwise(VALUES[:8])], dtype=torch.float32, device=values.device)
    codes = torch.bucketize(scaled.abs(), borders).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    words, scales = pack_mxfp4(codes[..., ::2] | codes[..., 1::2] << 4, (exponents + ONE).to(torch.uint8))
    return {"weight": words.view(torch.uint8), "weight_scale": scales}


def unpack(weight: ExpertWeight, dtype: torch.dtype) -> Tensor:
    """The values [..., outputs, inputs] of some experts, or of one, rounded once, in the order of x's columns."""
    if weight.format.values == "mxfp4":
        return _unpack_mxfp4(weight, dtype)
    codes = _codes(weight)
    scale, offset = (each.float() for each in weight.scales.unbind(-1))

    def spread(of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(weight.format.group, dim=-1)[..., : weight.inputs]

    if weight.format.has_table:
        values = table_of(weight.format.values, codes.device)[codes.long()] * spread(scale)
    elif weight.format.values == "minima":
        values = codes.float() * spread(scale) + spread(offset)
    else:
        values = (codes.float() - spread(offset)) * spread(scale)
    found = values.to(dtype)
    if weight.order is None:
        return found
    restored: Tensor = found.new_zeros(*found.shape[:-1], weight.columns or weight.inputs)
    return restored.scatter_add_(-1, weight.order.unsqueeze(-2).expand(found.shape).long(), found)


def _codes(weight: ExpertWeight) -> Tensor:
    """uint8 [..., outputs, inputs]."""
    bits, chunks = weight.format.bits, chunks_of(weight.inputs)
    device = weight.codes.device
    nth = torch.arange(PLANES, dtype=torch.int32, device=device)[:, None]
    words = weight.codes.unflatten(-1, (chunks, -1, PLANE)).to(torch.int32)
    if bits == 8:
        codes = words[..., [0, 0, 1, 1], :] >> (8 * (nth % 2)) & 255
    else:
        codes = words >> 4 * nth & 15
    assert isinstance(codes, Tensor)
    if weight.high is not None:
        rest = bits - 4
        beyond = weight.high.unflatten(-1, (chunks, -1)).to(torch.int32)
        if rest == 1:
            beyond = torch.cat((beyond & 15, beyond >> 4), dim=-1)
        codes |= (beyond[..., None, :] >> rest * nth & (1 << rest) - 1) << 4
    return codes.to(torch.uint8).flatten(-3)[..., : weight.inputs]


def _unpack_mxfp4(weight: ExpertWeight, dtype: torch.dtype) -> Tensor:
    words = weight.codes.unflatten(-1, (-1, GROUP)).to(torch.int32)
    codes = [sum((words >> place & 1) << bit for bit, place in enumerate(places)) for places in PLACES]
    planes = torch.stack([torch.as_tensor(each) for each in codes], dim=-2).flatten(-3, -2)  # [..., groups, 32]
    blocks = (planes[..., ::2] | planes[..., 1::2] << 4).to(torch.uint8)
    return decode_mxfp4(blocks, weight.scales, dtype)[..., : weight.inputs]
