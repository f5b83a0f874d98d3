"""Experts whose weights and activations are 8-bit integers, in the kernels: few rows and sorted ones, beside plain torch."""

import pytest
import torch
from expert_weights import int8_experts

from meshlm.kernels.moe_routing.reference import Rule, select_experts
from meshlm.kernels.quantise_int8.reference import quantise
from meshlm.protocol.model import QuantizationScheme
from meshlm.workers.moe.dispatch.none import NoDispatch
from meshlm.workers.moe.experts.reference import ReferenceExperts
from meshlm.workers.moe.experts.triton import TritonExperts
from meshlm.workers.moe.fused_moe import ExpertWeights, FusedMoE, Quantisation, Routing, WeightAndReduce
from meshlm.workers.partial_sum import Kind

HIDDEN, WIDE, NUM, TOPK = 256, 128, 5, 2
SCHEME = QuantizationScheme(targets=(), weight="channel", activation="token", integers=True)
ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = (torch.device("cuda"), torch.bfloat16) if ON_GPU else (torch.device("cpu"), torch.float32)
pytestmark = [pytest.mark.gpu] if ON_GPU else []


@pytest.mark.filterwarnings(
    "ignore:invalid value", "ignore:overflow"
)  # the interpreter's numpy, of rows that fill a tile
@pytest.mark.parametrize("rows", [1, 7, 70])
def test_kernels_round_as_the_definition_says(rows: int) -> None:
    torch.manual_seed(0)
    weights = []
    for outputs, inputs in ((2 * WIDE, HIDDEN), (HIDDEN, WIDE)):
        codes, scales, _ = quantise(torch.randn(NUM * outputs, inputs, device=DEVICE) / inputs**0.5, True)
        weights.append(int8_experts(codes.view(NUM, outputs, inputs), scales.view(NUM, outputs, 1), SCHEME, DTYPE))
    given = ExpertWeights(weights[0], weights[1])
    whole = NoDispatch(0, NUM, NUM, finishes=frozenset(WeightAndReduce))
    plain = ReferenceExperts(given)
    kernels = TritonExperts(given)
    assert kernels.quantisation is Quantisation.INT8_TOKEN
    x = torch.randn(rows, HIDDEN, device=DEVICE).to(DTYPE)
    routing = Routing(*select_experts(torch.randn(rows, NUM, device=DEVICE), Rule(TOPK, renormalise=True)))
    sums = []
    for experts in (plain, kernels):
        found, _ = FusedMoE(whole, experts).forward(x, routing)
        sums.append((found.value.sum(0) if found.kind is Kind.SPLIT_K else found.value).float())
    error = float((sums[1] - sums[0]).abs().mean() / sums[0].abs().mean())
    assert error < (0.02 if ON_GPU else 0.01), "an inner activation may round to the code beside"
