"""Mixtures of experts on a GPU: one row, few and many, sorted and not, inside graphs and outside, against transformers."""

from pathlib import Path

import pytest
import torch
from expert_weights import fp8_experts

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import engine
from near_transformers import MIXTURES, errors, history, transformers_model

from meshlm.kernels.moe_routing.reference import Rule, select_experts
from meshlm.kernels.packed_experts.layout import ExpertWeight
from meshlm.protocol.model import QuantizationScheme
from meshlm.workers.formats.eight_bits import FP8, Fp8Format
from meshlm.workers.formats.format import plain_experts
from meshlm.workers.moe.dispatch.none import NoDispatch
from meshlm.workers.moe.experts.reference import ReferenceExperts
from meshlm.workers.moe.experts.triton import TritonExperts
from meshlm.workers.moe.fused_moe import Dispatcher, ExpertExtras, ExpertWeights, FusedMoE, Routing, WeightAndReduce
from meshlm.workers.partial_sum import Kind

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
@pytest.mark.parametrize("name", MIXTURES)
def test_error_is_no_worse_than_transformers_bfloat16(name: str, mode: str, tmp_path: Path) -> None:
    """Prompts in chunks and behind a cached prefix, decodes, a preempted request: against float32."""
    theirs = transformers_model(name, tmp_path)
    ours, error = errors(theirs, history(engine(tmp_path, load_format="auto", cudagraph_mode=mode)))
    assert ours <= 1.2 * error, f"mean error {ours:.4f}, transformers' own {error:.4f}"


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_experts_that_become_integers_have_the_values_of_vllms_formula(mode: str, tmp_path: Path) -> None:
    """--quantization experts_int8: the kernels keep the codes, a scale for each output."""
    theirs = transformers_model("qwen3-moe", tmp_path)
    made = engine(tmp_path, load_format="auto", cudagraph_mode=mode, quantization="experts_int8")
    for mixture in made.model.mixtures():
        assert all(isinstance(linear.grouped().kernel, ExpertWeight) for linear in mixture.experts.linears())
    for name, parameter in theirs.named_parameters():
        if ".mlp.experts." in name:
            scale = parameter.data.abs().amax(-1, keepdim=True) / 127
            parameter.data = (parameter.data / scale).round() * scale
    ours, error = errors(theirs, history(made))
    assert ours <= 1.2 * error, f"mean error {ours:.4f}, the values' own {error:.4f}"


NUM, TOPK, HIDDEN, WIDE = 12, 4, 512, 256
SCHEMES = {
    "16 bits": None,
    "tokens and channels": QuantizationScheme(targets=(), weight="channel", activation="token"),
    "blocks": QuantizationScheme(targets=(), weight="block", block=(128, 128), activation="group", group=128),
    "weights alone": QuantizationScheme(targets=(), weight="channel", activation="none"),
}


@pytest.mark.parametrize(
    ("name", "biased", "gated"),
    [*((name, False, gated) for name in SCHEMES for gated in (True, False)), ("16 bits", True, True)],
)
def test_kernels_give_what_plain_torch_gives(name: str, biased: bool, gated: bool) -> None:
    """One row, few and many; some tokens are padding."""
    scheme = SCHEMES[name]
    if scheme is not None and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    torch.manual_seed(0)
    gate_up = torch.randn(NUM, 2 * WIDE, HIDDEN, device="cuda").bfloat16() / HIDDEN**0.5
    down = torch.randn(NUM, HIDDEN, WIDE, device="cuda").bfloat16() / WIDE**0.5
    some: list[torch.Tensor] = []
    if scheme is not None:
        gate_up, down = (weight.mul(100).to(FP8) for weight in (gate_up, down))
        some = [
            torch.rand(*weight.shape[:2], Fp8Format(scheme).num_groups(weight.shape[2]), device="cuda") / 100 + 0.005
            for weight in (gate_up, down)
        ]
    extras, act = None, "silu"
    if not gated:
        gate_up, act = gate_up[:, :WIDE].contiguous(), "relu2"
        some = [some[0][:, :WIDE].contiguous(), some[1]] if some else some
    if biased:
        above, below = (torch.randn(NUM, outputs, device="cuda").bfloat16() for outputs in (2 * WIDE, HIDDEN))
        extras = ExpertExtras(above, below, (1.702, 1.5))
    dispatcher: Dispatcher = NoDispatch(0, NUM, NUM, finishes=frozenset(WeightAndReduce))
    products = [plain_experts(weight) for weight in (gate_up, down) if scheme is None]
    if scheme is not None:
        codes = zip((gate_up, down), some, strict=True)
        products = [fp8_experts(weight, scale, scheme, torch.bfloat16) for weight, scale in codes]
    weights = ExpertWeights(products[0], products[1], act, extras, gated)
    made = FusedMoE(dispatcher, ReferenceExperts(weights)), FusedMoE(dispatcher, TritonExperts(weights))
    for rows in (1, 9, 70, 700):
        x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        slots = torch.arange(rows, device="cuda")
        slots[1::5] = -1
        routing = Routing(
            *select_experts(torch.randn(rows, NUM, device="cuda"), Rule(TOPK, renormalise=True), None, slots)
        )
        (expected, _), (found, _) = (fused.forward(x, routing) for fused in made)
        total = found.value.sum(0) if found.kind is Kind.SPLIT_K else found.value
        error = (total.float() - expected.value.float()).abs().mean() / expected.value.float().abs().mean()
        assert float(error) < 0.03, rows  # what 16-bit roundings before 8-bit ones flip: 0.016, of one row 0.025
        assert not total[1::5].any(), "padding goes nowhere"
