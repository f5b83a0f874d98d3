"""Dispatchers between ranks, with every kind of experts, give what one rank with all experts computes; other pairs are refused."""

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from expert_ranks import connected, together
from torch import Tensor

from meshlm.kernels.moe_routing.reference import Rule, select_experts
from meshlm.protocol.wire.ids import Epoch
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.distributed.lockstep import StepAborted
from meshlm.workers.formats.format import plain_experts
from meshlm.workers.moe.dispatch.collective import Members
from meshlm.workers.moe.dispatch.none import NoDispatch
from meshlm.workers.moe.experts.reference import ReferenceExperts
from meshlm.workers.moe.fused_moe import ExpertWeights, FusedMoE, Quantisation, Routing, WeightAndReduce
from meshlm.workers.moe.registry import EXPERTS, GROUP_DISPATCHERS
from meshlm.workers.partial_sum import Kind

NUM, HIDDEN, WIDE, TOPK = 6, 16, 24, 3
ROWS = ((3, 1), (0, 5), (1, 1), (4, 0), (7, 7))  # of the first and of all other ranks


def weights(first: int = 0, count: int = NUM) -> ExpertWeights:
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(NUM, 2 * WIDE, HIDDEN, generator=generator) / HIDDEN**0.5
    down = torch.randn(NUM, HIDDEN, WIDE, generator=generator) / WIDE**0.5
    mine = slice(first, first + count)
    return ExpertWeights(plain_experts(gate_up[mine]), plain_experts(down[mine]), "silu")


def routing_of(rows: int, slots: Tensor | None = None) -> Routing:
    return Routing(*select_experts(torch.randn(rows, NUM), Rule(TOPK, renormalise=True), None, slots))


def expected(x: Tensor, routing: Routing) -> Tensor:
    """By one rank with all experts."""
    return FusedMoE(NoDispatch(0, NUM, NUM), ReferenceExperts(weights())).forward(x, routing)[0].value


@pytest.fixture(scope="module", params=[2, 3])
def groups(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ExpertGroup]]:
    with connected(tmp_path_factory.mktemp("group"), request.param) as found:
        yield found


def members_of(group: ExpertGroup) -> Members:
    each = NUM // group.size
    return Members(group, tuple(each * rank for rank in range(group.size)), each, Kind.WHOLE)


def made(group: ExpertGroup, dispatcher: str, experts: str) -> FusedMoE:
    members = members_of(group)
    return FusedMoE(
        GROUP_DISPATCHERS[dispatcher](members), EXPERTS[experts].make(weights(members.first, members.num_experts))
    )


PAIRS = list(product(GROUP_DISPATCHERS, EXPERTS))


@pytest.mark.parametrize(("dispatcher", "experts"), PAIRS)
def test_every_legal_pair(groups: list[ExpertGroup], dispatcher: str, experts: str) -> None:
    """Ranks with different numbers of tokens, without any, and with padding among them."""
    members = members_of(groups[0])
    if EXPERTS[experts].unsupported(weights(members.first, members.num_experts)) is not None:
        pytest.skip("not on this device")
    for first, others in ROWS:
        sizes = [first, *(others for _ in groups[1:])]
        slots = [torch.where(torch.arange(size) % 4 == 3, -1, torch.arange(size)) for size in sizes]
        given = [(torch.randn(size, HIDDEN), routing_of(size, of)) for size, of in zip(sizes, slots, strict=True)]

        def one(group: ExpertGroup, given: list[tuple[Tensor, Routing]] = given, most: int = max(sizes)) -> Tensor:
            group.num_tokens = most
            return made(group, dispatcher, experts).forward(*given[group.rank])[0].value

        for found, (x, routing) in zip(together(groups, one), given, strict=True):
            torch.testing.assert_close(found, expected(x, routing), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("left", WeightAndReduce)
@pytest.mark.parametrize("dispatcher", GROUP_DISPATCHERS)
def test_what_experts_leave_to_be_done(groups: list[ExpertGroup], dispatcher: str, left: WeightAndReduce) -> None:
    """The sums of parts that lie apart are no dispatcher's affair: such experts find no pair here, or leave something else."""
    x, routing = torch.randn(5, HIDDEN), routing_of(5)

    def one(group: ExpertGroup) -> Tensor | None:
        group.num_tokens = 5
        members = members_of(group)
        experts = ReferenceExperts(weights(members.first, members.num_experts))
        experts.leaves = (left,)
        way = GROUP_DISPATCHERS[dispatcher](members)
        if left is WeightAndReduce.PARTS:
            with pytest.raises(ProcessFatal, match="they leave to be done: parts, which it does not do"):
                FusedMoE(way, experts)
            return None
        return FusedMoE(way, experts).forward(x, routing)[0].value

    for found in together(groups, one):
        if found is not None:
            torch.testing.assert_close(found, expected(x, routing), atol=1e-5, rtol=1e-4)


class Rounding(ReferenceExperts):
    """Wants 8-bit integers with a scale for each token, which its quantise makes; computes with what they stand for."""

    quantisation = Quantisation.FP8_TOKEN

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        scales = x.abs().amax(dim=1, keepdim=True).clamp(min=1e-6) / 127
        return (x / scales).round().to(torch.int8), scales

    def apply(self, given, out, spaces, left) -> None:  # type: ignore[no-untyped-def]
        assert given.x.dtype == torch.int8
        super().apply(given._replace(x=given.x.float() * given.scales), out, spaces, left)


@pytest.mark.parametrize("dispatcher", GROUP_DISPATCHERS)
def test_what_is_quantised_travels_with_its_scales(groups: list[ExpertGroup], dispatcher: str) -> None:
    given = [(torch.randn(5, HIDDEN), routing_of(5)) for _ in groups]

    def one(group: ExpertGroup) -> Tensor:
        group.num_tokens = 5
        members = members_of(group)
        experts = Rounding(weights(members.first, members.num_experts))
        return FusedMoE(GROUP_DISPATCHERS[dispatcher](members), experts).forward(*given[group.rank])[0].value

    for found, (x, routing) in zip(together(groups, one), given, strict=True):
        values, scales = Rounding(weights()).quantise(x)
        assert scales is not None
        torch.testing.assert_close(found, expected(values.float() * scales, routing), atol=1e-5, rtol=1e-4)


def test_before_they_have_met_a_rank_computes_as_much_as_with_others() -> None:
    """The memory profile at the start is of such steps."""
    rows: list[int] = []

    class Counting(ReferenceExperts):
        def apply(self, given, out, spaces, left) -> None:  # type: ignore[no-untyped-def]
            rows.append(len(given.x))
            super().apply(given, out, spaces, left)

    group = ExpertGroup(1, 3, "0", torch.device("cpu"))
    for make in GROUP_DISPATCHERS.values():
        way = make(members_of(group))
        FusedMoE(way, Counting(weights(2, 2))).forward(torch.randn(4, HIDDEN), routing_of(4))
        assert rows.pop() == 12


def test_ranks_listen_on_this_host_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without NVLink multicast."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    with connected(tmp_path, 2):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        assert os.environ["NCCL_NVLS_ENABLE"] == "0"


@pytest.mark.parametrize("size", [2, 4])
def test_when_one_is_gone_nobody_waits_for_it(size: int, tmp_path: Path) -> None:
    """And all the others leave, each of whom another one may wait for; in the next epoch they meet again."""
    with connected(tmp_path, size) as groups:
        groups[1].close()

        def one(group: ExpertGroup) -> str:
            if group.rank == 1:
                return "gone"
            try:
                for _ in range(3):
                    group.all_gather(torch.zeros(2, 3))
            except StepAborted:
                return "aborted"
            return "done"

        assert sorted(set(together(groups, one))) == ["aborted", "gone"]
        together(groups, lambda group: group.connect(str(tmp_path), Epoch(2)))
        found = together(groups, lambda group: group.all_gather(torch.full((1,), float(group.rank))).tolist())
        assert found == [[float(rank) for rank in range(size)]] * size


def test_a_rank_whose_peers_never_come_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    from meshlm.workers.distributed import expert_group

    monkeypatch.setattr(expert_group, "MEET", timedelta(seconds=0.2))
    group = ExpertGroup(0, 2, "0", torch.device("cpu"))
    with pytest.raises(StepAborted):
        group.connect(str(tmp_path), Epoch(1))
