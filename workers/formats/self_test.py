"""At each start, on the very GPU: do the kernels of quantised weights give what plain torch gives? Small random cases.

What differs, or cannot be compiled or launched, is not used: another way computes instead, and one line in the log says so.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import structlog
import torch
from torch import Tensor

from meshlm.kernels.fp8_gemm.kernel import fp8_gemm, int8_gemm
from meshlm.kernels.fp8_gemm.reference import Fp8Weight
from meshlm.kernels.fp8_gemm.reference import fp8_gemm as fp8_reference
from meshlm.kernels.gemv import kernel as row
from meshlm.kernels.gemv import reference as row_reference
from meshlm.kernels.packed_few import plan as packed_few
from meshlm.kernels.packed_gemm import gemv, reference
from meshlm.kernels.packed_gemm import kernel as packed
from meshlm.kernels.packed_gemm.reference import PackedWeight
from meshlm.kernels.quantise_fp8 import kernel as quantise_fp8
from meshlm.kernels.quantise_int8 import kernel as quantise_int8
from meshlm.kernels.quantise_int8.reference import Int8Weight, int8_linear
from meshlm.kernels.self_test import Result, same_numbers, why_wrong

NEAR = 0.05  # largest error, in standard deviations of what must come out, beyond
STEP = 2**-7  # of it: results are rounded, and products of a gate are large where both factors are
ROUNDING = 0.05  # mean distance of what 8 bits leave of normal numbers, at most
COUNTS = (1, 20, 60, 100, 300)  # rows that meet all ways to multiply 8 bits
FEW = {3: packed_few.Shape(2, 2), 1: packed_few.Shape(1, 1, 2)}  # by rows; of the second all is asked for at once
MOST_INPUTS = 16384  # of a product of one row, all of which a program holds
ROWS = 200  # outputs of a case: no multiple of any tile
_log = structlog.get_logger()
Case = Callable[[], tuple[Tensor, Tensor]]  # found, and what it must be


def holds(what: str, instead: str, cases: list[Case]) -> bool:
    """Whether all cases are near. Waits for the device."""
    why = why_wrong(_result(*case()) for case in cases)
    if why:
        _log.warning(f"{what} is not right on this GPU: {instead}", reason=why)
    return not why


def _result(found: Tensor, expected: Tensor) -> Result:
    exact = expected.float()
    error = (((found.float() - exact).abs() - STEP * exact.abs()) / exact.std()).max()
    return Result("a result is off by", error, NEAR, "standard deviations and a step of bfloat16")


def tested_packed(weight: PackedWeight, dtype: torch.dtype) -> PackedWeight:
    """The weight, with the kernels that may compute with it: those of its own tiles, bits, groups and scales are right.

    NF4 is decoded for each product, which is faster than to look up each code (docs/quantization.md)."""
    if weight.table is not None or dtype == torch.float32:
        return weight
    kind = weight.bits, weight.group, weight.zero, weight.zeros is None, weight.minima is None, weight.scales.dtype
    sizes, device = (weight.outputs, weight.inputs), weight.low.device
    _, shape = packed.one_row_of(weight)
    one = gemv.takes(weight) and _one_row(kind, dtype, weight.inputs % 256 == 0, shape, device)
    shapes = tuple(packed.default_shape(rows, *sizes, device) for rows in (16, 32, 64))
    some = all(_some_rows(kind, dtype, weight.inputs % 256 == 0, shape, device) for shape in shapes)
    few = _few_rows(kind, dtype, weight.inputs % 256 == 0, device) if packed_few.takes(weight) else False
    return weight._replace(one_row=one, some_rows=some, few_rows=few)


Kind = tuple[int, int, int, bool, bool, torch.dtype]


@cache
@same_numbers()
def _one_row(kind: Kind, dtype: torch.dtype, whole: bool, shape: gemv.Shape, device: torch.device) -> bool:
    def run(x: Tensor, weight: PackedWeight) -> Tensor:
        return packed.one_row_of(weight)[0](x, weight, shape)

    case = _case(kind, dtype, whole, 1, shape.splits, run, device)
    return holds("the packed kernel of one row", "tensor cores compute it", [case])


@cache
@same_numbers()
def _few_rows(kind: Kind, dtype: torch.dtype, whole: bool, device: torch.device) -> bool:
    from meshlm.kernels.packed_few import kernel  # its dialect takes long to import

    def run(x: Tensor, weight: PackedWeight) -> Tensor:
        return kernel.packed_few(x, weight, FEW[len(x)])

    cases = [_case(kind, dtype, whole, rows, 1, run, device) for rows in FEW]
    return holds("the packed kernel of few rows", "others compute them", cases)


@cache
@same_numbers()
def _some_rows(kind: Kind, dtype: torch.dtype, whole: bool, shape: packed.Shape, device: torch.device) -> bool:
    rows = shape.block_m - 1
    case = _case(kind, dtype, whole, rows, shape.splits, lambda x, w: packed.parts(x, w, shape), device)
    return holds("the packed kernel of some rows", "weights are decoded for each product", [case])


def _case(
    kind: Kind, dtype: torch.dtype, whole: bool, rows: int, splits: int, run: Callable[[Tensor, PackedWeight], Tensor],
    device: torch.device,
) -> Case:  # fmt: skip
    """A product with a random weight of this kind, of as few inputs as have all parts; whole: of whole chunks."""

    def case() -> tuple[Tensor, Tensor]:
        inputs = 512 * splits - (0 if whole else 96)
        weight = random_packed(kind, inputs, device)
        x = torch.randn(rows, inputs, dtype=dtype, device=device)
        found = run(x, weight)
        return (found.sum(0) if splits > 1 else found), x.float() @ reference.decode(weight, torch.float32).t()

    return case


def random_packed(kind: Kind, inputs: int, device: torch.device) -> PackedWeight:
    """A weight of any codes and scales."""
    bits, group, zero, no_zeros, no_minima, scales_dtype = kind
    group = min(group, -(-inputs // 256) * 256)
    groups = -(-inputs // group)
    codes = torch.randint(0, 1 << bits, (ROWS, inputs), dtype=torch.uint8, device=device)
    low, high = reference.pack(codes, bits)
    scales = (torch.rand(groups, ROWS, device=device) + 0.5).to(scales_dtype)
    zeros = None if no_zeros else torch.randint(0, 1 << bits, (groups, ROWS), dtype=torch.uint8, device=device)
    minima = None if no_minima else (torch.rand(groups, ROWS, device=device) * -(1 << bits)).to(scales_dtype)
    return PackedWeight(low, high, scales, zeros, minima, bits=bits, group=group, zero=zero, inputs=inputs)


def tested_fp8(weight: Fp8Weight, dtype: torch.dtype) -> Fp8Weight | None:
    """The weight, if its products are right, of one row, some and many; and whether kernels/gemv computes that of one row."""
    codes, known = weight.codes, weight.input_scale is not None
    if not _fp8(weight.group, weight.rounded, known, codes.shape[1] % 128, dtype, codes.device):
        return None
    groups = weight.group, weight.rounded or 0
    able = dtype == torch.bfloat16 and codes.shape[1] % 16 == 0 and max(groups) <= codes.shape[1] <= MOST_INPUTS
    able = able and all(group & group - 1 == 0 for group in groups)
    return weight._replace(
        one_row=able and _fp8_row(weight.group, weight.rounded, known, codes.shape[1], dtype, codes.device)
    )


@cache
@same_numbers()
def _fp8_row(
    group: int, rounded: int | None, known: bool, inputs: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """A norm, a product with gate and one without, of as many inputs as the model's."""
    weight = _some_fp8(2 * ROWS, inputs, group, rounded, known, device)
    x, residual = torch.randn(2, 1, inputs, dtype=dtype, device=device)
    norm = torch.rand(inputs, dtype=dtype, device=device) + 0.5

    def case(gate: str) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"norm": norm, "residual": residual, "eps": 1e-5, "gate": gate}
        return row.gemv(x, weight, **options)[0], row_reference.gemv(x, weight, **options)[0]

    return holds(
        "the kernel of one row in 8-bit floats", "tensor cores compute it", [partial(case, ""), partial(case, "silu")]
    )


def _some_fp8(
    outputs: int, inputs: int, group: int, rounded: int | None, known: bool, device: torch.device
) -> Fp8Weight:
    codes = (torch.randn(outputs, inputs, device=device) * 30).clamp(-400, 400).to(torch.float8_e4m3fn)
    scales = (torch.rand(outputs, -(-inputs // group) if group else 1, device=device) + 0.5) / (30 * inputs**0.5)
    return Fp8Weight(codes, scales, group, rounded, torch.tensor(0.01, device=device) if known else None)


@cache
@same_numbers()
def _fp8(group: int, rounded: int | None, known: bool, beyond: int, dtype: torch.dtype, device: torch.device) -> bool:
    """beyond: inputs behind the last whole tile."""
    inputs = 1024 + beyond - beyond % 16
    codes = (torch.randn(ROWS + 8, inputs, device=device) * 30).clamp(-400, 400).to(torch.float8_e4m3fn)
    scales = torch.rand(ROWS + 8, -(-inputs // group) if group else 1, device=device) + 0.5
    scale = torch.tensor(0.01, device=device) if known else None

    def case(rows: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, inputs, dtype=dtype, device=device)
        if rounded is None:
            return fp8_gemm(x, None, codes, scales, None, dtype, group), fp8_reference(
                x, None, codes, scales, None, torch.float32
            )
        values, x_scales = quantise_fp8.quantise(x, rounded, scale)
        size = rounded or inputs
        shown = values.float() * x_scales.repeat_interleave(size, dim=1)[:, :inputs]
        if not float((shown - (x.clamp(-4.48, 4.48) if known else x)).abs().mean()) <= ROUNDING:
            raise ValueError("activations are rounded to other numbers")
        found = fp8_gemm(values, x_scales, codes, scales, None, dtype, group)
        return found, fp8_reference(values, x_scales, codes, scales, None, torch.float32)

    return holds(
        "a product of 8-bit floats", "weights are decoded for each", [partial(case, count) for count in COUNTS]
    )


def is_int8_right(weight: Int8Weight, dtype: torch.dtype) -> bool:
    """Whether the products of such weights are right, of one row, some and many."""
    zero = weight.input_zero is not None
    return _int8(
        weight.symmetric, weight.input_scale is not None, zero, weight.codes.shape[1] % 128, dtype, weight.codes.device
    )


@cache
@same_numbers()
def _int8(symmetric: bool, known: bool, zero: bool, beyond: int, dtype: torch.dtype, device: torch.device) -> bool:
    inputs = 1024 + beyond
    codes = torch.randint(-128, 128, (ROWS, inputs), dtype=torch.int8, device=device)
    weight = Int8Weight(
        codes, torch.rand(ROWS, 1, device=device) + 0.5, codes.sum(1, dtype=torch.int32).float(), symmetric,
        torch.tensor(0.03, device=device) if known else None, torch.tensor(-5.0, device=device) if zero else None,
    )  # fmt: skip

    def case(rows: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, inputs, dtype=dtype, device=device) + 0.2
        rounded, scales, zeros = quantise_int8.quantise(x, symmetric, weight.input_scale, weight.input_zero)
        given = None if symmetric else zeros
        found = int8_gemm(rounded, scales, given, codes, weight.scales, weight.sums, None, dtype)
        return found, int8_linear(x.float(), weight)

    return holds("a product of 8-bit integers", "weights are decoded", [partial(case, count) for count in COUNTS])
