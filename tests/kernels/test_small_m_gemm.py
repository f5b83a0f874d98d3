"""Products of few rows, whole, gated and as parts that the norm adds up, against their references."""

from itertools import product

import pytest
import torch
from device import DEVICE, DTYPES, MARKS, near
from torch import Tensor

from meshlm.kernels.moe_routing.reference import Rule, select_experts
from meshlm.kernels.norm.kernel import add_rms_norm
from meshlm.kernels.silu_mul.reference import act_mul
from meshlm.kernels.small_m_gemm import kernel, reference
from meshlm.kernels.small_m_gemm.kernel import Shape, small_m_gemm
from meshlm.kernels.small_m_gemm.op import SHAPES, candidates
from meshlm.workers.layers.ops import RouterWeights
from meshlm.workers.partial_sum import Kind, PartialSum

pytestmark = MARKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [2, 17, 64, 65])
def test_parts_and_their_norm(rows: int, shape: Shape, dtype: torch.dtype) -> None:
    outputs, inputs = 2 * shape.block_n, shape.splits * shape.block_k * 2
    x = torch.randn(rows, inputs, device=DEVICE, dtype=dtype)
    w = torch.randn(outputs, inputs, device=DEVICE, dtype=dtype) / inputs**0.5
    weight = torch.randn(outputs, device=DEVICE, dtype=dtype)
    residual = torch.randn(rows, outputs, device=DEVICE, dtype=dtype)
    parts, expected_parts = small_m_gemm(x, w, shape, "parts"), reference.parts(x, w, shape.splits)
    near(parts, expected_parts, dtype)
    expected_residual = residual.clone()
    expected = reference.add_allreduce_rmsnorm(expected_parts, expected_residual, weight, 1e-6)
    near(add_rms_norm(parts, residual, weight, 1e-6), expected, dtype, 4.0)
    near(residual, expected_residual, dtype, 2.0)


@pytest.mark.parametrize("columns", [1, 100, 1000])
def test_the_norm_of_parts_at_odd_widths(columns: int) -> None:
    parts = torch.randn(3, 5, columns, device=DEVICE)
    residual, weight = torch.randn(5, columns, device=DEVICE), torch.randn(columns, device=DEVICE)
    expected_residual = residual.clone()
    expected = reference.add_allreduce_rmsnorm(parts, expected_residual, weight, 1e-5)
    near(add_rms_norm(parts, residual, weight, 1e-5), expected, torch.float32)
    near(residual, expected_residual, torch.float32)


def test_candidates_fit_and_fill_the_gpu() -> None:
    keys: list[kernel.Key] = [
        (1024, 2048, "parts"),
        (4096, 14336, "parts"),
        (6144, 1024, "gate"),
        (4096, 1024, "product"),
    ]
    for rows, key in product((8, 64, 256), keys):
        found = candidates(rows, key)
        assert found
        assert all((shape.splits > 1) == (key[2] == "parts") for shape in found)
    assert not candidates(8, (100, 2048, "parts"))


@pytest.mark.parametrize("gate", ["", "silu", "gelu"])
def test_ops_go_by_the_table(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshlm.workers.layers import triton_ops

    shape, use = SHAPES[0], "gate" if gate == "silu" else "product"
    table = {(64, 256, "parts"): [(1, 16, shape)], (128, 64, use): [(1, 8, shape._replace(splits=1))]}
    monkeypatch.setattr(kernel, "_table", lambda: table)
    kernel.shape_for.cache_clear()
    ops = triton_ops.TritonOps()
    w, norm = torch.randn(64, 256, device=DEVICE).half() / 16, torch.ones(64, device=DEVICE).half()
    following = torch.randn(128, 64, device=DEVICE).half() / 8
    for rows, split in ((2, True), (16, True), (17, False)):
        x, residual = torch.randn(rows, 256, device=DEVICE).half(), torch.randn(rows, 64, device=DEVICE).half()
        made = ops.row_parallel_linear(x, w, None, 64, residual)
        assert made.kind is (Kind.SPLIT_K if split else Kind.WHOLE)
        assert made.residual is residual
        near(ops.finish_sum(made, x.dtype), torch.nn.functional.linear(x, w), torch.float16, 4.0)
        expected_stream = residual + torch.nn.functional.linear(x, w)
        normed = torch.nn.functional.rms_norm(expected_stream.float(), (64,), eps=1e-6).half()
        out, stream = ops.norm_linear(made, (norm, 1e-6), following, None, 128, gate=gate)
        near(stream, expected_stream, torch.float16, 4.0)
        expected = reference.product(normed, following)
        near(out, act_mul(expected, gate) if gate else expected, torch.float16, 8.0)
    kernel.shape_for.cache_clear()


@pytest.mark.parametrize("rows", [17, 33])
def test_a_choice_of_experts_adds_up_the_routers_parts(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more rows than one kernel chooses for; with and without the table's entry."""
    from meshlm.workers.layers import triton_ops

    monkeypatch.setattr(kernel, "_table", lambda: {(16, 256, "parts"): [(1, 32, Shape(16, 16, 64, 4, 4, 3))]})
    used: list[Shape] = []

    def counted(x: Tensor, weight: Tensor, shape: Shape, use: str) -> Tensor:
        used.append(shape)
        return small_m_gemm(x, weight, shape, use)

    monkeypatch.setattr(triton_ops, "small_m_gemm", counted)
    kernel.shape_for.cache_clear()
    w, norm = torch.randn(16, 256, device=DEVICE).half() / 4, torch.ones(256, device=DEVICE).half()
    x, residual = (torch.randn(rows, 256, device=DEVICE).half() for _ in range(2))
    router = RouterWeights(w, None, None, Rule(2, renormalise=True), 16)
    stream = (x + residual).clone()
    slots = torch.arange(rows, device=DEVICE)
    slots[3] = -1
    given = PartialSum(x, residual=residual)
    y, found_stream, experts, weights = triton_ops.TritonOps().norm_route(given, (norm, 1e-6), router, slots)
    near(found_stream, stream, torch.float16, 2.0)
    near(y, torch.nn.functional.rms_norm(stream.float(), (256,), eps=1e-6).half(), torch.float16, 2.0)
    expected, expected_weights = select_experts(y.float() @ w.float().t(), router.rule, None, slots)
    same = (experts == expected).all(dim=1)  # a product that is rounded to 16 bits may choose otherwise
    assert same.all() or not used
    near(weights[same], expected_weights[same], torch.float16, 2.0)
    assert bool(used) == (rows <= 32)
    kernel.shape_for.cache_clear()


def test_a_stages_last_sum_is_rounded_as_the_norm_rounds_it() -> None:
    """Before it is added. The parts are such that float32 has their sums exactly, in any order."""
    from meshlm.workers.layers.triton_ops import TritonOps

    parts = torch.randn(4, 8, 256, device=DEVICE).mul(4096).round() / 4096
    stream = torch.randn(8, 256, device=DEVICE).half() * 16
    other = stream.clone()
    add_rms_norm(parts, stream, torch.ones(256, device=DEVICE).half(), 1e-6)
    whole = TritonOps().finish_sum(PartialSum(parts, Kind.SPLIT_K, other), other.dtype)
    assert whole.dtype == other.dtype
    assert torch.equal(other + whole, stream)
