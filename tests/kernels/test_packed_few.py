"""Products of a few rows with weights of 4 bits, by tensor cores; without a GPU what the kernel computes (gluon_on_torch.py)."""

import pytest
import torch
from device import DEVICE, MARKS, near
from gluon_on_torch import on_torch
from packed_weights import weight_of
from torch import Tensor

from meshlm.kernels import tables
from meshlm.kernels.packed_few import kernel as few
from meshlm.kernels.packed_few import plan
from meshlm.kernels.packed_few.plan import Shape
from meshlm.kernels.packed_gemm import kernel
from meshlm.kernels.packed_gemm.reference import PackedWeight
from meshlm.kernels.tuning import core

pytestmark = MARKS
KERNELS = few if DEVICE.type == "cuda" else on_torch(few)
KINDS = [
    ("symmetric", 128),
    ("symmetric", 32),
    ("zeros", 32),
    ("zeros", 64),
    ("zeros", 128),
    ("zeros", 512),
    ("minima", 32),
    ("minima", 128),
]
SIZES = [
    (1, 40, 512, Shape(1, 1)),
    (1, 72, 1024, Shape(2, 4)),  # the last program has outputs that are not there
    (3, 32, 768, Shape(2, 2)),  # a warp has no chunk in the last turn
    (5, 40, 320, Shape(1, 2)),  # half a chunk is not there
    (16, 16, 480, Shape(1, 2)),
    (2, 16, 256, Shape(1, 4)),  # three warps have nothing
    (1, 40, 1024, Shape(1, 2, 2)),  # all is asked for at once
    (4, 40, 1280, Shape(2, 1, 2)),  # twice, and once more for a chunk
    (9, 16, 1184, Shape(1, 2, 4)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_products(kind: str, group: int, dtype: torch.dtype) -> None:
    for rows, outputs, inputs, shape in SIZES:
        weight, values = weight_of(kind, outputs, inputs, 4, group)
        assert plan.takes(weight)
        x = torch.randn(rows, inputs, device=DEVICE, dtype=dtype) / inputs**0.5
        near(KERNELS.packed_few(x, weight, shape), x.float() @ values.t(), dtype)


def test_a_bias_and_what_is_far_from_one() -> None:
    weight, values = weight_of("zeros", 48, 1024, 4, 128)
    for size in (1e3, 1e-3):
        x, bias = torch.randn(2, 1024, device=DEVICE).bfloat16() * size, torch.randn(48, device=DEVICE).bfloat16()
        found = KERNELS.packed_few(x, weight, Shape(1, 4), bias).float()
        near(found / size, (x.float() @ values.t() + bias.float()) / size, torch.bfloat16, 4.0)


@pytest.mark.parametrize(
    ("kind", "bits", "group"), [("symmetric", 6, 16), ("minima", 5, 32), ("table", 4, 64), ("zeros", 8, 128)]
)
def test_what_it_does_not_take(kind: str, bits: int, group: int) -> None:
    assert not plan.takes(weight_of(kind, 8, 512, bits, group)[0])


def test_more_rows_than_it_has_are_refused() -> None:
    weight, _ = weight_of("zeros", 16, 256, 4, 128)
    with pytest.raises(ValueError, match="17 rows, 16 at most"):
        few.packed_few(torch.randn(17, 256, device=DEVICE), weight, Shape(1, 1))


@pytest.mark.parametrize("chunks", [1, 2, 3, 16, 56])
def test_every_size_has_shapes(chunks: int) -> None:
    """None of them twice: what is asked for ahead cannot be more than there is."""
    found = plan.shapes_of(chunks)
    different = {(each.tiles, each.warps, min(each.depth, -(-chunks // each.warps))) for each in found}
    assert 2 <= len(found) == len(different) <= 8
    assert all(each.warps <= chunks for each in found)


def test_it_computes_what_it_was_measured_to_be_faster_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many rows, if it is right on this GPU; else kernels/packed_gemm does. A model asks for each of its sizes."""
    weight, values = weight_of("zeros", 48, 512, 4, 128)
    weight = weight._replace(one_row=True, some_rows=True)
    calls: list[tuple[int, Shape]] = []

    compute = KERNELS.packed_few

    def noted(x: Tensor, weight: PackedWeight, shape: Shape, bias: Tensor | None = None) -> Tensor:
        calls.append((x.shape[0], shape))
        return compute(x, weight, shape, bias)  # type: ignore[no-any-return]

    monkeypatch.setattr(few, "packed_few", noted)
    tables.forget(all_of_it=True)
    for able in (False, True):
        for rows in (1, 3, 5):
            x = torch.randn(rows, 512, device=DEVICE, dtype=torch.float16) / 512**0.5
            near(kernel.packed_linear(x, weight._replace(few_rows=able)), x.float() @ values.t(), torch.float16, 2.0)
    assert calls == []
    key = (48, 512, "zeros, groups of 128")
    assert tables.unmeasured() == [("packed_few", key)]
    tables.add([("packed_few", core.entry_of("packed_few", key, {1: (), 4: (1, 2, 1), 8: ()}))])
    for rows in (1, 3, 5):
        x = torch.randn(rows, 512, device=DEVICE, dtype=torch.float16) / 512**0.5
        near(kernel.packed_linear(x, weight._replace(few_rows=True)), x.float() @ values.t(), torch.float16, 2.0)
    assert calls == [(3, Shape(1, 2))]
    tables.forget(all_of_it=True)
