"""Weights of 4 or 8 bits whose words hold several codes (GPTQ, AWQ, pack-quantized, bitsandbytes, MXFP4): (code - zero) * scale, or
table[code] * scale.

Files fill parameters of one form (weights/scales.py), whatever their own: bytes of codes in the order of inputs. After loading
they become the words of kernels/packed_gemm on a GPU, and values on a CPU.

Weights of a .gguf file are its bytes until then; rows of one layer may be of several types. They stay packed in a GPU's memory, or
are decoded there after loading.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.packed_experts import layout as packed_experts
from meshlm.kernels.packed_experts.layout import Format, format_of_blocks, of_blocks
from meshlm.kernels.packed_gemm import reference
from meshlm.kernels.packed_gemm.ggml import packed
from meshlm.kernels.packed_gemm.reference import CHUNK, PLANE, TABLES, WARM_ROWS, PackedWeight, decode, pack
from meshlm.protocol.model import QuantizationScheme
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.formats.expert_codes import ExpertCodes
from meshlm.workers.formats.format import Encode, ProductOps, WeightedLayer, has_kernels

PACKED_ROWS = 16  # of up to so many rows a product with packed weights takes less time (docs/quantization.md)


class PackedFormat(ExpertCodes):
    """A CPU has the values, and computes with them as if they had never been packed."""

    def __init__(self, scheme: QuantizationScheme) -> None:
        """The scheme is that of a layer (`packed_quantization.of_layer`)."""
        self.scheme = scheme
        self.encode: Encode | None = self._encoded if scheme.online else None
        self.weight: PackedWeight | None = None
        self._has_part = False  # of the inputs, which are in an order of their own
        self.keeps_values = False
        """Whether the layer has its values, too, for products of many rows; set before `finish`."""

    def add_parameters(self, layer: WeightedLayer) -> None:
        """uint8 codes [outputs, inputs * bits / 8] and zero points [outputs, groups]; float32 scales; the groups of inputs."""
        scheme, own = self.scheme, -(-layer.inputs // self.scheme.weight_group)
        groups = scheme.num_groups if scheme.act_order else own
        self._has_part = own < groups
        layer.add("weight", layer.outputs, layer.inputs * scheme.bits // 8, dtype=torch.uint8)
        layer.add("weight_scale", layer.outputs, groups, dtype=torch.float32)
        if scheme.zeros:
            layer.add("weight_zero", layer.outputs, groups, dtype=torch.uint8)
        if scheme.act_order:
            layer.add("input_group", scheme.projections, layer.inputs, dtype=torch.int32)

    def finish(self, layer: WeightedLayer, ops: ProductOps) -> None:
        """Nothing of the files' form is left."""
        if self.keeps_codes and layer.stack:
            self.keep_codes(layer, lambda own: self._experts(own, layer.dtype))
            return
        if layer.weight.device.type == "cpu" or layer.stack:
            layer.keep("weight", self.values(layer))
            layer.drop_others()
            super().finish(layer, ops)
            return
        self.weight = tested(self._packed_matrix(layer.matrices()[0], layer.dtype), layer.dtype)
        layer.drop_others()
        if self.keeps_values:
            layer.keep("weight_values", ops.pack(decode(self.weight, layer.dtype)))
        layer.keep("weight", self.weight.low)

    @property
    def is_fusible(self) -> bool:
        return self.weight is None

    @property
    def codes_format(self) -> packed_experts.Format | None:
        """None of a rank's part of inputs that are in an order of their own: it has some of each group."""
        scheme = self.scheme
        if self._has_part:
            return None
        if scheme.values == "mxfp4":
            return packed_experts.MXFP4
        size = -(-scheme.weight_group // packed_experts.CHUNK) * packed_experts.CHUNK
        group = scheme.weight_group if scheme.weight_group in (PLANE, 64) else size
        return packed_experts.Format(scheme.bits, group, scheme.values)

    def _experts(self, own: dict[str, Tensor], dtype: torch.dtype) -> packed_experts.ExpertWeight:
        """The weights of some experts as kernels read them."""
        codes, scale, format = unpacked(own["weight"], self.scheme.bits), own["weight_scale"], self.codes_format
        assert format is not None
        if format.values == "mxfp4":
            blocks = (codes[..., ::2] | codes[..., 1::2] << 4).unflatten(-1, (-1, PLANE // 2))
            words, powers = packed_experts.pack_mxfp4(blocks, (scale.log2() + packed_experts.ONE).to(torch.uint8))
            return packed_experts.ExpertWeight(words, powers, codes.shape[-1])
        middle = 0 if self.scheme.values != "integers" else 1 << self.scheme.bits - 1
        offsets = own["weight_zero"] if self.scheme.zeros else torch.full_like(scale, middle)
        order = None
        if self.scheme.act_order:
            groups = torch.stack([self._groups(each) for each in own["input_group"]])
            order = groups.argsort(dim=-1, stable=True)
            regular = torch.arange(groups.shape[-1], device=groups.device) // self.scheme.weight_group
            if not torch.equal(groups.gather(-1, order), regular.expand_as(groups)):
                raise ProcessFatal("quantization_config: desc_act: experts' groups of inputs are of several sizes")
            codes, order = codes.gather(-1, order[:, None].expand_as(codes)), order.to(torch.int32)
        return packed_experts.pack(codes, scale, offsets, format, dtype, order=order, columns=codes.shape[-1])

    def values(self, layer: WeightedLayer) -> Tensor:
        found = [decode(self._packed_matrix(matrix, layer.dtype), layer.dtype) for matrix in layer.matrices()]
        return torch.stack(found) if layer.stack else found[0]

    def apply(self, layer: WeightedLayer, x: Tensor, ops: ProductOps) -> Tensor:
        if self.weight is None:
            return super().apply(layer, x, ops)
        if self.keeps_values and x.shape[0] > PACKED_ROWS:
            return ops.linear(x, layer.get_parameter("weight_values"), layer.bias, layer.outputs)
        return packed_linear(x, self.weight, layer.bias)

    def variant(self) -> object:
        return None if self.weight is None else (self.weight.variant, self.keeps_values)

    def warm_rows(self) -> set[int]:
        if self.weight is None:
            return set()
        return {rows for rows in WARM_ROWS if rows <= PACKED_ROWS} if self.keeps_values else set(WARM_ROWS)

    def _encoded(self, values: Tensor) -> dict[str, Tensor]:
        """Each group to the nearest of its codes, which reach from its least value to its largest."""
        bits, size = self.scheme.bits, self.scheme.weight_group
        groups = -(-values.shape[1] // size)
        parted = F.pad(values.float(), (0, groups * size - values.shape[1])).unflatten(1, (groups, size))
        if self.scheme.values != "integers":
            scales = parted.abs().amax(-1)
            if self.scheme.values == "mxfp4":  # powers of two; the largest number is 6, the largest power in it 4
                scales = torch.exp2(scales.clamp(min=1e-30).log2().floor() - 2)
            codes = nearest(parted, scales, TABLES[self.scheme.values]).flatten(1)[:, : values.shape[1]]
            return {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales}
        low, high, most = parted.amin(2).clamp(max=0), parted.amax(2).clamp(min=0), (1 << bits) - 1
        if self.scheme.zeros:
            scale = ((high - low) / most).clamp(min=1e-8)
            zero = (-low / scale).round().clamp(0, most)
        else:
            scale = (torch.maximum(-low, high) * 2 / most).clamp(min=1e-8)
            zero = torch.full_like(scale, 1 << bits - 1)
        codes = (parted / scale[..., None] + zero[..., None]).round().clamp(0, most).to(torch.uint8)
        codes = codes.flatten(1)[:, : values.shape[1]]
        found = {
            "weight": codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4,
            "weight_scale": scale.half().float(),
        }
        return found | ({"weight_zero": zero.to(torch.uint8)} if self.scheme.zeros else {})

    def _packed_matrix(self, matrix: dict[str, Tensor], dtype: torch.dtype) -> PackedWeight:
        scheme, scale = self.scheme, matrix["weight_scale"]
        codes = unpacked(matrix["weight"], scheme.bits)
        if scheme.values != "integers":
            low, high = pack(codes, scheme.bits)
            table = torch.tensor(TABLES[scheme.values], dtype=torch.float32, device=codes.device)
            scales = scale.t().to(torch.float32 if dtype == torch.float32 else torch.float16).contiguous()
            if scheme.values == "mxfp4":
                scales = compact(scale.t())  # powers of two, also such as float16 does not hold
            return PackedWeight(low, high, scales, table=table, group=scheme.weight_group, inputs=codes.shape[1])
        zero = (
            matrix["weight_zero"] if scheme.zeros else torch.full_like(scale, 1 << scheme.bits - 1, dtype=torch.uint8)
        )
        size, order = scheme.weight_group, None
        if scheme.act_order:
            codes, scale, zero, size, order = in_order(codes, scale, zero, self._groups(matrix["input_group"]), size)
        size = size if size in (PLANE, 64, 128) else -(-size // CHUNK) * CHUNK
        one_zero = int(zero.flatten()[0]) if bool((zero == zero.flatten()[0]).all()) else None
        low, high = pack(codes, scheme.bits)
        return PackedWeight(
            low, high, compact(scale.t()), None if one_zero is not None else zero.t().contiguous(), order=order,
            bits=scheme.bits, group=size, zero=one_zero or 0, inputs=codes.shape[1],
            columns=matrix["weight"].shape[1] * 8 // scheme.bits,
        )  # fmt: skip

    def _groups(self, of_inputs: Tensor) -> Tensor:
        """The group of each input, the same for all projections of the product. ProcessFatal."""
        first = of_inputs[0]
        if bool((of_inputs != first).any()):
            raise ProcessFatal(
                "quantization_config: desc_act: projections that are one product here order their inputs in different ways"
            )
        if bool((first < 0).any()) or bool((first >= self.scheme.num_groups).any()):
            raise ProcessFatal(
                f"quantization_config: desc_act: an input is in a group that is none of {self.scheme.num_groups}"
            )
        return first.long()


def tested(weight: PackedWeight, dtype: torch.dtype) -> PackedWeight:
    """The weight, and which kernels of this device compute right with it."""
    if not has_kernels(weight.low.device, dtype):
        return weight
    from meshlm.workers.formats import self_test

    return self_test.tested_packed(weight, dtype)


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """x [m, inputs] -> [m, outputs]."""
    if not has_kernels(x.device, x.dtype):
        return reference.packed_linear(x, weight, bias)
    from meshlm.kernels.packed_gemm import kernel

    return kernel.packed_linear(x, weight, bias)


def nearest(values: Tensor, scales: Tensor, table: tuple[float, ...]) -> Tensor:
    """values [rows, groups, size] -> codes uint8 of the nearest entries, once each group is divided by its scale."""
    known, order = torch.tensor(table, device=values.device).sort()
    scaled = values / scales.clamp(min=1e-20)[..., None]
    return order.to(torch.uint8)[torch.bucketize(scaled, (known[1:] + known[:-1]) / 2)]


def unpacked(codes: Tensor, bits: int) -> Tensor:
    """Bytes of files' parameters -> one code in each."""
    return codes if bits == 8 else torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def compact(scales: Tensor) -> Tensor:
    """The scales as 16-bit floats, where those hold them exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scales.to(dtype).to(scales.dtype), scales):
            return scales.to(dtype).contiguous()
    return scales.contiguous()


def in_order(
    codes: Tensor, scale: Tensor, zero: Tensor, groups: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor, int, Tensor | None]:
    """Inputs sorted by their groups: codes, scales, zero points, the size of a group, and which inputs these are (None: as they were).

    A rank's part of the inputs has some of each group: then groups are filled up to planes of 32, with weights that are zero."""
    order = torch.argsort(groups, stable=True)
    regular = torch.arange(len(groups), device=groups.device) // size
    if torch.equal(groups[order], regular):
        as_they_were = torch.equal(groups, regular)
        return (codes if as_they_were else codes[:, order]), scale, zero, size, None if as_they_were else order
    counts = torch.bincount(groups, minlength=scale.shape[1])
    planes = -(-counts // PLANE)
    of_plane = torch.repeat_interleave(torch.arange(len(counts), device=groups.device), planes)
    begins = (planes.cumsum(0) - planes) * PLANE  # of each group, in the new order
    nth = torch.arange(len(groups), device=groups.device) - (counts.cumsum(0) - counts)[groups[order]]
    to = begins[groups[order]] + nth
    filled = zero[:, of_plane].repeat_interleave(PLANE, dim=1)
    filled[:, to] = codes[:, order]
    columns = torch.zeros(len(of_plane) * PLANE, dtype=torch.long, device=groups.device)
    columns[to] = order
    return filled, scale[:, of_plane], zero[:, of_plane], PLANE, columns


class Span(NamedTuple):
    """Some rows of a weight, all of one type."""

    rows: int
    ggml_type: int
    row_bytes: int


class DecodedGGUF(ExpertCodes):
    """Until `finish` the weight is the file's bytes, span after span; then it is their values."""

    def __init__(self, spans: tuple[Span, ...]) -> None:
        self._spans = spans

    def add_parameters(self, layer: WeightedLayer) -> None:
        layer.add("weight", sum(span.rows * span.row_bytes for span in self._spans), dtype=torch.uint8)

    @property
    def codes_format(self) -> Format | None:
        return format_of_blocks(self._spans[0].ggml_type) if len(self._spans) == 1 else None

    def finish(self, layer: WeightedLayer, ops: ProductOps) -> None:
        if self.keeps_codes and layer.stack:
            ((rows, ggml_type, _),) = self._spans
            self.keep_codes(
                layer, lambda own: of_blocks(own["weight"].unflatten(-1, (rows, -1)), ggml_type, layer.dtype)
            )
            return
        layer.keep("weight", self.values(layer))
        super().finish(layer, ops)

    def values(self, layer: WeightedLayer) -> Tensor:
        found = [
            torch.cat([decode(weight, layer.dtype) for weight in self._packed(matrix["weight"], layer.dtype)])
            for matrix in layer.matrices()
        ]
        return torch.stack(found) if layer.stack else found[0]

    def _packed(self, data: Tensor, dtype: torch.dtype) -> tuple[PackedWeight, ...]:
        sizes = [span.rows * span.row_bytes for span in self._spans]
        return tuple(
            packed(part.view(span.rows, -1), span.ggml_type, dtype)
            for span, part in zip(self._spans, data.split(sizes), strict=True)
        )


class GGUFFormat(DecodedGGUF):
    """The file's codes stay packed."""

    weights: tuple[PackedWeight, ...] = ()

    @property
    def is_fusible(self) -> bool:
        return False

    def finish(self, layer: WeightedLayer, ops: ProductOps) -> None:
        if layer.stack:
            super().finish(layer, ops)
            return
        self.weights = tuple(tested(weight, layer.dtype) for weight in self._packed(layer.weight.data, layer.dtype))
        layer.keep("weight", self.weights[0].low)

    def apply(self, layer: WeightedLayer, x: Tensor, ops: ProductOps) -> Tensor:
        sizes = [span.rows for span in self._spans]
        biases = [None] * len(sizes) if layer.bias is None else list(layer.bias.split(sizes))
        products = [packed_linear(x, weight, bias) for weight, bias in zip(self.weights, biases, strict=True)]
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)

    def variant(self) -> object:
        return tuple(weight.variant for weight in self.weights)

    def warm_rows(self) -> set[int]:
        return set(WARM_ROWS)
