"""All legal pairs of dispatchers and experts compute the same; other pairs are refused, with the reason."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.moe_routing.reference import Rule, select_experts
from meshlm.kernels.packed_experts.layout import ExpertWeight, encode_mxfp4, unpack
from meshlm.protocol.layers import MoESpec
from meshlm.workers.formats.expert_codes import packed_experts
from meshlm.workers.formats.format import KernelWeight, plain_experts
from meshlm.workers.moe.dispatch.none import NoDispatch
from meshlm.workers.moe.experts.reference import ReferenceExperts
from meshlm.workers.moe.fused_moe import (
    Dispatcher,
    ExpertExtras,
    ExpertWeights,
    FusedMoE,
    Quantisation,
    Routing,
    WeightAndReduce,
    WorkspaceShape,
    refusal,
    workspaces,
)
from meshlm.workers.moe.registry import EXPERTS, _other_activation, no_dispatch
from meshlm.workers.partial_sum import Kind, PartialSum

NUM, HIDDEN, WIDE, TOPK = 6, 16, 24, 3
Ranks = list[tuple[int, int]]  # of each rank: its first expert, and how many
DISPATCHERS: dict[str, Callable[[int, int], Dispatcher]] = {
    "none": lambda first, count: no_dispatch(
        MoESpec(
            num_experts=NUM, num_experts_per_tok=TOPK, moe_intermediate_size=WIDE, local_experts=(first, first + count)
        ),
        NUM // count,
    )
}


SWIGLU = (1.702, 0.9)  # alpha, limit: many values are beyond it


def weights(first: int = 0, count: int = NUM, kind: str = "silu") -> ExpertWeights:
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(NUM, 2 * WIDE, HIDDEN, generator=generator) / HIDDEN**0.5
    down = torch.randn(NUM, HIDDEN, WIDE, generator=generator) / WIDE**0.5
    above, below = (torch.randn(NUM, outputs, generator=generator) for outputs in (2 * WIDE, HIDDEN))
    mine = slice(first, first + count)
    if kind == "no gate":
        up = plain_experts(gate_up[mine, :WIDE].contiguous())
        return ExpertWeights(up, plain_experts(down[mine]), "relu2", gated=False)
    extras = None if kind == "silu" else ExpertExtras(above[mine], below[mine], None if kind == "biases" else SWIGLU)
    if kind != "mxfp4":
        return ExpertWeights(plain_experts(gate_up[mine]), plain_experts(down[mine]), "silu", extras)
    packed = [packed_experts(mxfp4_of(weight[mine]), torch.float32) for weight in (gate_up, down)]
    return ExpertWeights(packed[0], packed[1], "silu", extras)


def mxfp4_of(weight: Tensor) -> ExpertWeight:
    """Each number to the nearest that MXFP4 has."""
    parts = [encode_mxfp4(matrix) for matrix in weight]
    codes, scales = (torch.stack([part[name] for part in parts]) for name in ("weight", "weight_scale"))
    return ExpertWeight(codes.view(torch.int16), scales, weight.shape[2])


def routing_of(rows: int, slots: Tensor | None = None) -> Routing:
    return Routing(*select_experts(torch.randn(rows, NUM), Rule(TOPK, renormalise=True), None, slots))


def values_of(weight: KernelWeight) -> Tensor:
    return unpack(weight, torch.float32) if isinstance(weight, ExpertWeight) else torch.as_tensor(weight)


def expected(x: Tensor, routing: Routing, kind: str = "silu") -> Tensor:
    """Token by token."""
    given = weights(kind=kind)
    extras, gated = given.extras, given.gated
    gate_up, down = (values_of(product.kernel) for product in (given.gate_up, given.down))
    out = torch.zeros_like(x)
    for token, (experts, scale) in enumerate(zip(*routing, strict=True)):
        for expert, weight in zip(experts.tolist(), scale, strict=True):
            if expert >= 0:
                both, below = gate_up[expert] @ x[token], torch.zeros(HIDDEN)
                if extras is not None and extras.gate_up_bias is not None and extras.down_bias is not None:
                    both, below = both + extras.gate_up_bias[expert], extras.down_bias[expert]
                gate, up = both.chunk(2) if gated else (both, both)
                inner = F.silu(gate) * up if gated else both.relu() ** 2
                if extras is not None and extras.swiglu is not None:
                    alpha, limit = extras.swiglu
                    gate = gate.minimum(torch.tensor(limit))
                    inner = gate / (1 + torch.exp(-alpha * gate)) * (1 + up.clip(-limit, limit))
                out[token] += weight * (down[expert] @ inner + below)
    return out


DONE_BY_TORCH = [left for left in WeightAndReduce if left is not WeightAndReduce.PARTS]
OF_THREE: Ranks = [(0, 2), (2, 2), (4, 2)]
OF_PACKED, OF_BITS = "it computes with packed weights", "it computes with weights of 16 and 8 bits"
PAIRS = list(product(DISPATCHERS, EXPERTS))


@pytest.mark.parametrize(("dispatcher", "experts"), PAIRS)
@pytest.mark.parametrize(
    ("ranks", "weight"),
    [
        ([(0, NUM)], "silu"),
        (OF_THREE, "silu"),
        ([(0, NUM)], "biases"),
        (OF_THREE, "gpt-oss"),
        ([(0, NUM)], "mxfp4"),
        (OF_THREE, "no gate"),
    ],
)
def test_every_legal_pair(dispatcher: str, experts: str, ranks: Ranks, weight: str) -> None:
    """The matrix: all ranks together, with padding among the tokens, one token, and none for some experts."""
    if ("packed" in experts and weight != "mxfp4") or ("triton" in experts and weight == "mxfp4"):
        assert EXPERTS[experts].unsupported(weights(kind=weight)) in (OF_PACKED, OF_BITS)
        return
    if not experts.startswith("reference") and torch.cuda.is_available():
        pytest.skip("without the interpreter its kernels are on the GPU: tests/workers/cuda/test_moe.py")
    for rows in (1, 2, 70):
        slots = torch.arange(rows)
        slots[rows // 2 + 1 :: 3] = -1
        x, routing = torch.randn(rows, HIDDEN), routing_of(rows, slots)
        total = torch.zeros_like(x)
        for first, count in ranks:
            kind, way = EXPERTS[experts], DISPATCHERS[dispatcher](first, count)
            made = kind.make(weights(first, count, weight))
            found, beside = FusedMoE(way, made).forward(x, routing)
            assert beside is None
            total += found.value.sum(0) if found.kind is Kind.SPLIT_K else found.value
        torch.testing.assert_close(total, expected(x, routing, weight), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("left", DONE_BY_TORCH)
def test_weighting_and_the_sum_are_done_by_one_of_the_two(left: WeightAndReduce) -> None:
    experts = ReferenceExperts(weights())
    experts.leaves = (left,)
    x, routing = torch.randn(5, HIDDEN), routing_of(5, torch.tensor([0, 1, -1, 2, 3]))
    fused = FusedMoE(NoDispatch(0, NUM, NUM), experts)
    assert fused.allowed == (left,)
    found, _ = fused.forward(x, routing)
    assert found.kind is Kind.WHOLE
    torch.testing.assert_close(found.value, expected(x, routing), atol=1e-5, rtol=1e-4)


def test_many_rows_are_computed_some_at_a_time() -> None:
    sizes: list[int] = []

    class Counting(ReferenceExperts):
        def workspaces(self, x: tuple[int, ...], num_topk: int, left: WeightAndReduce) -> tuple[WorkspaceShape, ...]:
            sizes.append(x[0])
            return ()

    x, routing = torch.randn(23, HIDDEN), routing_of(23)
    found, _ = FusedMoE(NoDispatch(0, NUM, NUM), Counting(weights()), chunk=5).forward(x, routing)
    torch.testing.assert_close(found.value, expected(x, routing), atol=1e-5, rtol=1e-4)
    assert sizes == [5, 5, 5, 5, 3]


def test_what_changes_experts_is_told_which_of_the_steps_tokens_go_to_them() -> None:
    told: dict[str, list[tuple[int, int]]] = {"gate_up": [], "down": []}

    class Told:
        def add(self, product: str, number: int, x: Tensor, tokens: Tensor, out: Tensor) -> None:
            assert len(x) == len(tokens) == len(out)
            told[product] += [(token, number) for token in tokens.tolist()]
            if product == "down":
                out[tokens % 2 == 1] = 0.0

    x, routing = torch.randn(23, HIDDEN), routing_of(23)
    experts = ReferenceExperts(weights()).changed(Told())
    found, _ = FusedMoE(NoDispatch(0, NUM, NUM), experts, chunk=5).forward(x, routing)
    torch.testing.assert_close(found.value[::2], expected(x, routing)[::2], atol=1e-5, rtol=1e-4)
    assert not found.value[1::2].any()
    wanted = sorted((token, int(one)) for token in range(23) for one in set(routing.experts[token].tolist()) - {-1})
    assert sorted(told["gate_up"]) == sorted(told["down"]) == wanted


def test_which_activations_kernels_have_without_a_gate() -> None:
    given = weights(kind="no gate")
    biases = ExpertExtras(torch.zeros(NUM, WIDE), None, None)
    assert _other_activation(given) is None
    for other in (given._replace(act="gelu"), given._replace(act="silu"), given._replace(extras=biases)):
        assert str(_other_activation(other)).startswith("without a gate it computes relu2 without biases")


def test_shared_experts_run_while_tokens_travel() -> None:
    order: list[str] = []

    class Travelling(NoDispatch):
        def prepare_async(self, *given):  # type: ignore[no-untyped-def]
            receive = super().prepare_async(*given)
            order.append("sent")

            def received():  # type: ignore[no-untyped-def]
                order.append("received")
                return receive()

            return received

    def shared() -> PartialSum:
        order.append("shared")
        return PartialSum(torch.ones(2, HIDDEN))

    fused = FusedMoE(Travelling(0, NUM, NUM), ReferenceExperts(weights()))
    _, beside = fused.forward(torch.randn(2, HIDDEN), routing_of(2), shared)
    assert beside is not None
    assert order == ["sent", "shared", "received"]


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    experts = ReferenceExperts(weights())
    experts.leaves = (WeightAndReduce.PARTS,)
    assert "they leave to be done: parts, which it does not do" in str(refusal(NoDispatch(0, NUM, NUM), experts))
    experts.quantisation = Quantisation.FP8_TOKEN
    plain = NoDispatch(0, NUM, NUM, quantisations=frozenset((Quantisation.NONE,)))
    assert "fp8, a scale for each token, which it does not send" in str(refusal(plain, experts))


def test_workspaces_are_parts_of_one_buffer() -> None:
    a, b = workspaces(
        (WorkspaceShape((3, 5), torch.float32), WorkspaceShape((7,), torch.bfloat16)), torch.device("cpu")
    )
    assert (a.shape, a.dtype, b.shape, b.dtype) == ((3, 5), torch.float32, (7,), torch.bfloat16)
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert b.data_ptr() - a.data_ptr() == 256


def test_numbers_that_no_kernel_has_written_are_no_experts() -> None:
    """A GPU's start runs steps without launching kernels: what routing would have written is whatever memory held."""
    x, routing = torch.randn(3, HIDDEN), routing_of(3)
    garbage = routing._replace(experts=torch.tensor([[0, 1, 2], [NUM, -7, 2**31 - 1], [3, 4, 5]], dtype=torch.int32))
    found, _ = FusedMoE(NoDispatch(0, NUM, NUM), ReferenceExperts(weights())).forward(x, garbage)
    assert found.value.isfinite().all()
    assert not found.value[1].any()


def test_one_plan_for_any_number_of_rows() -> None:
    """The kernels of --deterministic (bits: tests/workers/cuda/test_invariance.py): nothing is left to be summed elsewhere."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("without the interpreter its kernels are on the GPU")
    from meshlm.kernels.grouped_gemm.plan import INVARIANT, warm_rows_of
    from meshlm.workers.moe.experts.triton import TritonExperts

    given, dispatcher = weights(), DISPATCHERS["none"](0, NUM)
    kernels, plain = TritonExperts(given, INVARIANT), ReferenceExperts(given)
    for rows in (1, 7, 70):
        x = torch.randn(rows, HIDDEN)
        routing = Routing(*select_experts(torch.randn(rows, NUM), Rule(TOPK, renormalise=True)))
        expected, _ = FusedMoE(dispatcher, plain).forward(x, routing)
        found, _ = FusedMoE(dispatcher, kernels).forward(x, routing)
        assert found.kind is Kind.WHOLE
        total = expected.value.sum(0) if expected.kind is Kind.SPLIT_K else expected.value
        torch.testing.assert_close(found.value, total, atol=1e-5, rtol=1e-4)
    assert kernels.warm_rows(8, 300) == warm_rows_of(8, 300) == {1, 9, 17, 33, 65, 129, 257}
