"""Experts that move between ranks: what is counted, which weights are where afterwards, and that results stay the same."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from expert_ranks import connected, together
from torch import Tensor

from meshlm.protocol.config.experts import EPLBConfig
from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.distributed.lockstep import StepAborted
from meshlm.workers.layers.ops import TorchOps
from meshlm.workers.moe.fused_moe import NOWHERE, Routing
from meshlm.workers.moe.placement import slots
from meshlm.workers.moe.placement.balance import balance, first_placement, rank_loads
from meshlm.workers.moe.placement.balancer import Balancer, Experts
from meshlm.workers.moe.placement.slots import Replicas


def routing(experts: Sequence[Sequence[int]]) -> Routing:
    chosen = torch.tensor(experts, dtype=torch.int32)
    return Routing(chosen, torch.ones(chosen.shape))


def weights_of(slots: Sequence[int], rank: int, size: int) -> list[Tensor]:
    """Each expert's say which it is."""
    each = len(slots) // size
    own = torch.tensor(slots[rank * each : (rank + 1) * each], dtype=torch.float32)
    codes = (own[:, None] + torch.arange(5.0) / 8).to(torch.float8_e4m3fn)
    return [own[:, None, None] * 100 + torch.arange(15.0).view(3, 5), own[:, None] + torch.arange(7.0) / 8, codes]


def test_replicas_take_turns_and_tokens_are_counted() -> None:
    counts = torch.zeros(9, dtype=torch.int64)
    replicas = Replicas(8, [2, 3, 6, 7], 1, counts)
    replicas.place([0, 1, 2, 3, 1, 1])  # of the four
    found = replicas.of(routing([[3, 6], [3, 0], [NOWHERE, NOWHERE], [3, 7], [3, 2]]), TorchOps())
    assert found.experts.tolist() == [[4, 2], [5, NOWHERE], [NOWHERE, NOWHERE], [4, 3], [5, 0]]
    assert counts.tolist() == [2, 1, 0, 1, 4, 0, 0, 1, 1]
    many = replicas.of(routing([[3]] * 60), TorchOps()).experts
    assert [int((many == slot).sum()) for slot in (1, 4, 5)] == [20, 20, 20]


@pytest.mark.parametrize("piece", [1, 64, slots.PIECE])
@pytest.mark.parametrize("size", [2, 3])
def test_weights_go_where_the_placement_says(
    size: int, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "PIECE", piece)
    torch.manual_seed(size)
    placements = [first_placement(2 * size, size, size)]
    for _ in range(4):
        load = torch.randint(0, 50, (2 * size,)).tolist()
        placements.append(balance(load, placements[-1], placements[0], size))
    placements.append(placements[0])
    assert placements[1] != placements[0]
    with connected(tmp_path, size) as groups:

        def one(group: ExpertGroup) -> None:
            weights = weights_of(placements[0], group.rank, size)
            for old, new in pairwise(placements):
                slots.rearrange(weights, old, new, group)
                for found, wanted in zip(weights, weights_of(new, group.rank, size), strict=True):
                    assert torch.equal(found.float(), wanted.float())

        together(groups, one)


class Rank:
    """A balancer of one layer of eight experts, and its weights."""

    def __init__(self, group: ExpertGroup, config: EPLBConfig) -> None:
        self.group, self.reloads = group, 0
        self.first = first_placement(8, 2, 2)
        self.weights = weights_of(self.first, group.rank, 2)
        experts = Experts(list(range(8)), 2, 8)
        self.balancer = Balancer(config, group, experts, [self.weights], self.reload)

    def reload(self) -> None:
        self.reloads += 1
        for weight, first in zip(self.weights, weights_of(self.first, self.group.rank, 2), strict=True):
            weight.copy_(first)

    def step(self, experts: Sequence[int]) -> list[int]:
        """The placement, after a step whose tokens go to these."""
        self.balancer.before_step()
        self.balancer.replicas[0].of(routing([[one] for one in experts]), TorchOps())
        return list(self.balancer.slots[0])


@pytest.mark.parametrize(("window", "interval"), [(2, 5), (5, 5), (7, 3)])
def test_the_tokens_of_the_last_steps_count(
    window: int, interval: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both ranks; whatever is longer, window or interval."""
    loads: list[list[list[int]]] = []
    config = EPLBConfig(window_size=window, step_interval=interval, num_redundant_experts=2)
    of_step = [[(7 * step + 3 * rank) % 8 for rank in range(2)] for step in range(20)]
    with connected(tmp_path, 2) as groups:
        ranks = [Rank(group, config) for group in groups]
        monkeypatch.setattr(ranks[0].balancer, "_rearrange", loads.append)
        monkeypatch.setattr(ranks[1].balancer, "_rearrange", lambda load: None)

        def one(rank: Rank) -> None:
            rank.balancer.begin()
            for experts in of_step:
                rank.step([experts[rank.group.rank]])

        together(ranks, one)
    wanted = []
    for done in range(interval, 20, interval):
        of_window = [expert for experts in of_step[max(0, done - window) : done] for expert in experts]
        wanted.append([[of_window.count(expert) for expert in range(8)]])
    assert loads == wanted
    last = tuple(round(load) for load in rank_loads(wanted[-1][0], ranks[0].first, 2))
    assert [rank.balancer.loads for rank in ranks] == [last, last]


def run(rank: Rank) -> list[list[int]]:
    rank.balancer.begin()
    return [rank.step([0, 0, 0, 1, 2]) for _ in range(6)]


def test_experts_move_before_the_same_step_and_back_when_a_rank_returns(tmp_path: Path) -> None:
    config = EPLBConfig(window_size=4, step_interval=4, num_redundant_experts=2)
    with connected(tmp_path, 2) as groups:
        ranks = [Rank(group, config) for group in groups]
        first, second = together(ranks, run)
        assert first == second
        assert [slots == ranks[0].first for slots in first] == [True] * 4 + [False] * 2
        moved = first[-1]
    for rank in ranks:
        for found, wanted in zip(rank.weights, weights_of(moved, rank.group.rank, 2), strict=True):
            assert torch.equal(found.float(), wanted.float())
    with connected(tmp_path, 2, 2) as groups:  # all are still there: nothing is lost
        for rank, group in zip(ranks, groups, strict=True):
            rank.group = rank.balancer._group = group
        together(ranks, lambda rank: rank.balancer.begin())
        assert [rank.balancer.slots for rank in ranks] == [[moved]] * 2
        assert [rank.reloads for rank in ranks] == [0, 0]
    with connected(tmp_path, 2, 3) as groups:  # one was started again
        ranks[0].group = ranks[0].balancer._group = groups[0]
        ranks[1] = Rank(groups[1], config)
        together(ranks, lambda rank: rank.balancer.begin())
        assert [rank.reloads for rank in ranks] == [1, 0]
        again = together(ranks, lambda rank: [rank.step([0, 0, 0, 1, 2]) for _ in range(6)])
        assert again == [first, first]
    for rank in ranks:
        for found, wanted in zip(rank.weights, weights_of(moved, rank.group.rank, 2), strict=True):
            assert torch.equal(found.float(), wanted.float())


def test_a_rank_is_lost_while_experts_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows then which of them are where: all go back to the first placement."""
    config = EPLBConfig(window_size=4, step_interval=4, num_redundant_experts=2)
    with connected(tmp_path, 2) as groups:
        ranks = [Rank(group, config) for group in groups]
        exchange = groups[1].exchange

        def dies(x: Tensor, sends: list[int], takes: list[int]) -> Tensor:
            exchange(x, sends, takes)
            groups[1].close()
            raise StepAborted("killed")

        monkeypatch.setattr(groups[1], "exchange", dies)

        def lost(rank: Rank) -> None:
            with pytest.raises(StepAborted):
                run(rank)

        together(ranks, lost)
    with connected(tmp_path, 2, 2) as groups:
        ranks[0].group = ranks[0].balancer._group = groups[0]
        ranks[1] = Rank(groups[1], config)
        together(ranks, lambda rank: rank.balancer.begin())
        assert [rank.balancer.slots for rank in ranks] == [[ranks[0].first]] * 2
        assert ranks[0].reloads == 1
        for rank in ranks:
            for found, wanted in zip(rank.weights, weights_of(rank.first, rank.group.rank, 2), strict=True):
                assert torch.equal(found.float(), wanted.float())
