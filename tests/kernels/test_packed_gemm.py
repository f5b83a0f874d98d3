"""Products with packed weights, and their decoding, against plain torch; what is packed comes out again."""

import pytest
import torch
from device import DEVICE, DTYPES, MARKS, near
from packed_weights import weight_of

from meshlm.kernels.packed_gemm import gemv, kernel, pairs, reference
from meshlm.kernels.packed_gemm.kernel import Shape

pytestmark = MARKS
KINDS = [
    ("symmetric", 4, 128), ("symmetric", 4, 32), ("zeros", 4, 64), ("zeros", 4, 512), ("minima", 4, 32), ("table", 4, 64),
    ("minima", 5, 32), ("symmetric", 6, 16), ("symmetric", 8, 32), ("zeros", 8, 128),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "bits", "group"), KINDS)
def test_decoding(kind: str, bits: int, group: int) -> None:
    for inputs in (512, 320):
        weight, values = weight_of(kind, 40, inputs, bits, group)
        assert weight.low.shape == (40, -(-inputs // 256) * 32)
        torch.testing.assert_close(reference.decode(weight, torch.float32), values)
        near(kernel.decode(weight, torch.float32), values, torch.float32)
        order = torch.randperm(inputs, device=DEVICE)
        assert torch.equal(reference.decode(weight._replace(order=order), torch.float32)[:, order], values)


CASES = [
    *((kind, bits, group, DTYPES[1]) for kind, bits, group in KINDS),
    *(("zeros", 4, 64, dtype) for dtype in (DTYPES[0], *DTYPES[2:])),
    *((kind, bits, group, DTYPES[2]) for kind, bits, group in KINDS if DTYPES[2:]),
]


@pytest.mark.parametrize(("kind", "bits", "group", "dtype"), CASES)
def test_products(kind: str, bits: int, group: int, dtype: torch.dtype) -> None:
    """Of few rows and of some, in parts, of sizes that are no multiples of a tile or of a chunk."""
    for rows, inputs, shape in (
        (1, 512, Shape(16, 64, 2, 4, 2)),
        (5, 320, Shape(16, 64, 1, 4, 2, swap=True)),
        (33, 320, Shape(64, 64, 1, 4, 2)),
    ):
        weight, values = weight_of(kind, 40, inputs, bits, group)
        x = torch.randn(rows, inputs, device=DEVICE, dtype=dtype) / inputs**0.5
        found = kernel.parts(x, weight, shape)
        found = found.sum(0) if shape.splits > 1 else found
        near(found, x.float() @ values.t(), dtype, 4.0)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("kind", "bits", "group"), [case for case in KINDS if case[2] >= 32])
def test_one_row(kind: str, bits: int, group: int, dtype: torch.dtype) -> None:
    for inputs, shape in ((512, gemv.Shape(32, 2, 4, 2)), (320, gemv.Shape(64, 1, 4, 2))):
        weight, values = weight_of(kind, 40, inputs, bits, group)
        x = torch.randn(1, inputs, device=DEVICE, dtype=dtype) / inputs**0.5
        found = gemv.parts(x, weight, shape)
        near(found.sum(0) if shape.splits > 1 else found, x.float() @ values.t(), dtype, 4.0)


@pytest.mark.parametrize("size", [1.0, 1e4, 1e-3])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("kind", "group"), [("symmetric", 128), ("zeros", 512), ("zeros", 128)])
def test_one_row_in_pairs(kind: str, group: int, dtype: torch.dtype, size: float) -> None:
    """Sums of four products do not overflow, nor do small inputs vanish."""
    for inputs, shape in (
        (512, gemv.Shape(32, 2, 4, 2)),
        (320, gemv.Shape(64, 2, 4, 2)),
        (1100, gemv.Shape(32, 3, 2, 2)),
    ):
        weight, values = weight_of(kind, 72, inputs, 4, group)
        assert pairs.takes(weight)
        x = (torch.randn(1, inputs, device=DEVICE) * size).to(dtype)
        found = pairs.parts(x, weight, shape).float()
        near(found.sum(0) / size, x.float() @ values.t() / size, dtype, 16.0)


def test_nothing_of_a_row_of_zeros() -> None:
    weight, _ = weight_of("zeros", 40, 512, 4, 128)
    assert not pairs.parts(torch.zeros(1, 512, device=DEVICE, dtype=DTYPES[1]), weight, gemv.Shape(32, 1, 4, 2)).any()


@pytest.mark.parametrize(("kind", "bits", "group"), [case for case in KINDS if case[1:] not in ((4, 128), (4, 512))])
def test_what_pairs_do_not_take(kind: str, bits: int, group: int) -> None:
    assert not pairs.takes(weight_of(kind, 8, 512, bits, group)[0])


@pytest.mark.parametrize("rows", [1, 40, 300])
def test_any_number_of_rows(rows: int) -> None:
    """With a bias, and inputs in another order."""
    weight, _ = weight_of("zeros", 48, 1024, 4, 128)
    weight = weight._replace(order=torch.randperm(1024, device=DEVICE), one_row=True, some_rows=True)
    x, bias = torch.randn(rows, 1024, device=DEVICE).half() / 32, torch.randn(48, device=DEVICE).half()
    expected = x.float() @ reference.decode(weight, torch.float32).t() + bias.float()
    near(kernel.packed_linear(x, weight, bias), expected, torch.float16, 2.0)
    near(reference.packed_linear(x, weight, bias), expected, torch.float16, 2.0)


def test_every_size_has_a_shape() -> None:
    for rows in (1, 8, 16, 64, 256):
        for outputs, inputs in ((6144, 4096), (576, 576), (4096, 14336), (28672, 4096), (16, 32)):
            shape = kernel.default_shape(rows, outputs, inputs, DEVICE)
            assert 16 <= shape.block_m <= 64
            assert shape.splits <= -(-inputs // 256)
