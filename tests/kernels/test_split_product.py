"""Products left as parts, and the norm that adds them up, against their references."""

from itertools import product

import pytest
import torch
from device import DEVICE, DTYPES, MARKS, near

from meshlm.kernels.norm.kernel import add_rms_norm
from meshlm.kernels.split_product import kernel, reference, tune
from meshlm.kernels.split_product.kernel import Shape, split_product

pytestmark = MARKS
SHAPES = [Shape(16, 32, 64, 2, 4, 3), Shape(32, 64, 64, 4, 4, 3), Shape(64, 128, 64, 2, 4, 3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [2, 17, 64, 65])
def test_parts_and_their_norm(rows: int, shape: Shape, dtype: torch.dtype) -> None:
    outputs, inputs = 2 * shape.block_n, shape.splits * shape.block_k * 2
    x = torch.randn(rows, inputs, device=DEVICE, dtype=dtype)
    w = torch.randn(outputs, inputs, device=DEVICE, dtype=dtype) / inputs**0.5
    weight = torch.randn(outputs, device=DEVICE, dtype=dtype)
    residual = torch.randn(rows, outputs, device=DEVICE, dtype=dtype)
    parts, expected_parts = split_product(x, w, shape), reference.split_product(x, w, shape.splits)
    near(parts, expected_parts, dtype)
    expected_residual = residual.clone()
    expected = reference.add_sum_norm(expected_parts, expected_residual, weight, 1e-6)
    near(add_rms_norm(parts, residual, weight, 1e-6), expected, dtype, 4.0)
    near(residual, expected_residual, dtype, 2.0)


@pytest.mark.parametrize("columns", [1, 100, 1000])
def test_the_norm_of_parts_at_odd_widths(columns: int) -> None:
    parts = torch.randn(3, 5, columns, device=DEVICE)
    residual, weight = torch.randn(5, columns, device=DEVICE), torch.randn(columns, device=DEVICE)
    expected_residual = residual.clone()
    expected = reference.add_sum_norm(parts, expected_residual, weight, 1e-5)
    near(add_rms_norm(parts, residual, weight, 1e-5), expected, torch.float32)
    near(residual, expected_residual, torch.float32)


def test_candidates_fit_and_fill_the_gpu() -> None:
    for rows, (outputs, inputs) in product((8, 64, 256), ((1024, 2048), (4096, 14336))):
        found = tune.candidates(rows, outputs, inputs)
        assert found
        assert all(shape.splits > 1 for shape in found)
    assert not tune.candidates(8, 100, 2048)


def test_only_what_is_clearly_faster_is_entered() -> None:
    a, b, _ = SHAPES
    times = {16: (10.0, {a: 9.9, b: 11.0}), 64: (10.0, {a: 9.0, b: 8.0}), 128: (10.0, {}), 256: (10.0, {a: 5.0})}
    assert tune.choose(times) == [[16, 64, list(b)], [128, 256, list(a)]]


def test_ops_go_by_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshlm.workers.layers import triton_ops

    table = {(64, 256): [(1, 16, SHAPES[0])]}
    monkeypatch.setattr(kernel, "_table", lambda: table)
    kernel.shape_for.cache_clear()
    ops = triton_ops.TritonOps()
    w, norm = torch.randn(64, 256, device=DEVICE).half() / 16, torch.ones(64, device=DEVICE).half()
    following = torch.randn(128, 64, device=DEVICE).half() / 8
    for rows, split in ((2, True), (16, True), (17, False)):
        x, residual = torch.randn(rows, 256, device=DEVICE).half(), torch.randn(rows, 64, device=DEVICE).half()
        made = ops.part(x, w, None, 64)
        assert (made.dim() == 3) == split
        near(ops.whole(made), torch.nn.functional.linear(x, w), torch.float16, 4.0)
        expected_stream = residual + torch.nn.functional.linear(x, w)
        normed = torch.nn.functional.rms_norm(expected_stream.float(), (64,), eps=1e-6).half()
        out, stream = ops.norm_linear(made, residual, (norm, 1e-6), following, None, 128)
        near(stream, expected_stream, torch.float16, 4.0)
        near(out, torch.nn.functional.linear(normed, following), torch.float16, 8.0)
    kernel.shape_for.cache_clear()
