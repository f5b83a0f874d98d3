"""A norm behind a norm, rope_cache and products of one row against their references, at odd shapes; test_ops.py has the plain cases."""

from typing import Any

import pytest
import torch
from device import DEVICE, DTYPES, MARKS, ON_GPU, WIDE, near, near_in_fp8, needs_fp8

from meshlm.kernels.fp8_gemm.reference import Fp8Weight, quantised_rows
from meshlm.kernels.gemv import kernel as gemv
from meshlm.kernels.gemv import reference as gemv_reference
from meshlm.kernels.norm import kernel as norm
from meshlm.kernels.norm import reference as norm_reference
from meshlm.kernels.rope_cache import kernel as rope
from meshlm.kernels.rope_cache import reference as rope_reference
from meshlm.kernels.silu_mul import kernel as gate
from meshlm.kernels.silu_mul import reference as gate_reference

pytestmark = MARKS
SHAPES = [(1, 64), (3, 576), (7, 1000), (17, 129)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_a_norm_of_what_is_added_before_it_is(parts: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """parts: float32 parts of the sum; 0: it is whole."""
    torch.manual_seed(0)
    x = torch.randn(parts, *shape, device=DEVICE) if parts else torch.randn(shape, device=DEVICE).to(dtype)
    residual = torch.randn(shape, device=DEVICE).to(dtype)
    weight, own = torch.rand(2, shape[1], device=DEVICE) + 0.5
    whole = x.sum(0).to(dtype) if parts else x
    ours, theirs = residual.clone(), residual.clone()
    found = norm.add_rms_norm(x, ours, weight, 1e-5, (own, 1e-2))
    near(found, norm_reference.add_rms_norm(whole, theirs, weight, 1e-5, (own, 1e-2)), dtype, 2)
    near(ours, theirs, dtype)
    again = residual.clone()
    norm.add_rms_norm(norm.rms_norm(whole, own, 1e-2), again, weight, 1e-5)
    near(ours, again, dtype)


def test_silu_is_one_of_the_activations_and_others_are_refused() -> None:
    x = torch.randn(3, 48, device=DEVICE)
    assert torch.equal(gate.silu_mul(x), gate.act_mul(x, "silu"))
    near(gate.silu_mul(x), gate_reference.silu_mul(x), torch.float32)
    with pytest.raises(ValueError, match="swish"):
        gate.act_mul(x, "swish")


@needs_fp8
@pytest.mark.parametrize(("kind", "least"), [(torch.float8_e4m3fn, -448.0), (torch.float8_e5m2, -12288.0)])
def test_rope_cache_in_fp8(kind: torch.dtype, least: float) -> None:
    """Divided by the scales, and no larger than the format can hold."""
    torch.manual_seed(0)
    qkv = torch.randn(5, 8, 64, device=DEVICE).to(WIDE)
    qkv[2, 4:, 7] = -3000.0
    table = torch.cat((torch.ones(9, 32), torch.zeros(9, 32)), 1).to(DEVICE)
    positions, slots = torch.arange(5, device=DEVICE), torch.tensor([5, 31, 0, 17, -1], device=DEVICE)
    caches = torch.zeros(4, 2, 16, 2, 64, device=DEVICE).to(kind)
    both = qkv.clone()
    ours = rope.rope_cache(qkv.view(5, -1), positions, slots, table, None, 0.0, caches[0], caches[1], 4, 0.5, 0.25)
    theirs = rope_reference.rope_cache(
        both.view(5, -1), positions, slots, table, None, 0.0, caches[2], caches[3], 4, 0.5, 0.25
    )
    near(ours, theirs, WIDE)
    near_in_fp8(caches[:2], caches[2:])
    assert float(caches[:2].float().min()) == least


@needs_fp8
@pytest.mark.parametrize(
    ("group", "rounded", "known"), [(0, 0, False), (0, 0, True), (128, 128, False), (0, None, False)]
)
@pytest.mark.parametrize("inputs", [320, 2304, 5120, 18944] if ON_GPU else [320, 2304])
def test_gemv_of_8_bit_floats(inputs: int, group: int, rounded: int | None, known: bool) -> None:
    torch.manual_seed(0)
    outputs = 12
    x, residual = torch.randn(2, 1, inputs, device=DEVICE).to(WIDE)
    codes, scales = quantised_rows(torch.randn(2 * outputs, inputs, device=DEVICE) / inputs**0.5)
    if group:
        scales = torch.rand(2 * outputs, -(-inputs // group), device=DEVICE) / 400
    weight = Fp8Weight(codes, scales, group, rounded, torch.tensor(0.01, device=DEVICE) if known else None)
    norm = torch.rand(inputs, device=DEVICE).to(WIDE) + 0.5
    for options in (
        {"bias": torch.randn(2 * outputs, device=DEVICE).to(WIDE)},
        {"norm": norm, "residual": residual, "eps": 1e-5},
        {"norm": norm, "residual": residual, "eps": 1e-5, "gate": "silu"},
        {"norm": norm, "residual": residual, "eps": 1e-5, "own": (norm + 0.25, 1e-3), "gate": "gelu"},
    ):
        ours, stream = gemv.gemv(x, weight, **options)
        theirs, expected = gemv_reference.gemv(x, weight, **options)
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert float(error) <= (0.02 if ON_GPU or rounded is None else 0.35), "the interpreter loses carries"
        same_stream(stream, expected, options)


def same_stream(ours: torch.Tensor, theirs: torch.Tensor, options: dict[str, Any]) -> None:
    """To the last bit, if no norm is summed up before it."""
    if "own" in options:
        near(ours, theirs, ours.dtype)
    else:
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(48, 64), (100, 576), (7, 1536), (264, 2048), (6, 2304), (5, 5000), (3, 17480)]
)
def test_gemv(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 1, inputs, device=DEVICE).to(dtype)
    weight = (torch.randn(2 * outputs, inputs, device=DEVICE) / inputs**0.5).to(dtype)
    bias = torch.randn(2 * outputs, device=DEVICE).to(dtype)
    norm_weight = torch.rand(inputs, device=DEVICE).to(dtype) + 0.5
    for options in (
        {"bias": bias},
        {"norm": norm_weight, "eps": 1e-5},
        {"norm": norm_weight, "residual": residual, "eps": 1e-5},
        {"norm": norm_weight, "residual": residual, "eps": 1e-5, "gate": "silu"},
        {"norm": norm_weight, "residual": residual, "eps": 1e-5, "own": (norm_weight.float() + 0.25, 1e-3)},
        {"norm": norm_weight, "residual": residual, "eps": 1e-5, "own": (norm_weight, 1e-3), "gate": "relu2"},
        {"gate": "gelu_pytorch_tanh"},
    ):
        ours, stream = gemv.gemv(x, weight, **options)
        theirs, expected = gemv_reference.gemv(x, weight, **options)
        near(ours, theirs, dtype, 2)
        same_stream(stream, expected, options)
