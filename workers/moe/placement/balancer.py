"""Moves experts between ranks while they serve: when, on the grounds of which steps, and what becomes of it when a rank is lost.

Made and used by the engine of a worker whose ranks step together, in the stepper thread. All members of its expert group make the same
calls before the same steps, sum up what each has counted, and come to the same placement without a word more. A group that meets anew
goes on with the experts where they are if all members agree on where that is; a rank that returns does not, and then all go back to the
first placement, for which each reads its own experts again.
"""

import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import structlog
import torch
from torch import Tensor

from meshlm.protocol.config.experts import EPLBConfig
from meshlm.protocol.layers import MoESpec
from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.moe.placement.balance import balance, balancedness, first_placement, rank_loads
from meshlm.workers.moe.placement.slots import Replicas, rearrange

_log = structlog.get_logger()
BROKEN = -1


class Experts(NamedTuple):
    """The experts that members of a group have together: numbers of the model's experts, rank by rank; and slots beyond one for
    each."""

    numbers: list[int]
    num_redundant: int
    num_experts: int  # of the model

    @classmethod
    def of(cls, moe: MoESpec, shard: Shard, group: ExpertGroup) -> "Experts":
        """Makes them for a group that `shard` belongs to: the workers of one tensor-parallel rank, or those of all of them."""
        begin, end = shard.experts(moe.num_experts)
        stride = (end - begin) * (shard.ep_size // group.size)
        first = begin - group.rank * stride
        numbers = [first + rank * stride + nth for rank in range(group.size) for nth in range(end - begin)]
        return cls(numbers, shard.redundant_experts * group.size, moe.num_experts)


class Balancer:
    """layers: the weights of each layer's slots, [slots, ...]. reload: read the first experts again."""

    def __init__(
        self,
        config: EPLBConfig,
        group: ExpertGroup,
        experts: Experts,
        layers: Sequence[Sequence[Tensor]],
        reload: Callable[[], None],
        *,
        same_rows: bool = False,
    ) -> None:
        """same_rows: members have the same rows, not each its own; then all choose the same replica for a row."""
        self._config, self._group, self._layers, self._reload = config, group, layers, reload
        self._experts = experts.numbers
        self._first = first_placement(len(experts.numbers), experts.num_redundant, group.size)
        self._counts = torch.zeros(len(layers), experts.num_experts + 1, dtype=torch.int64, device=group.device)
        sender = 0 if same_rows else group.rank
        self.replicas = [Replicas(experts.num_experts, experts.numbers, sender, counts) for counts in self._counts]
        # by layer: the expert of each slot, counted from the first of `experts.numbers`
        self.slots: list[list[int]] = []
        self._moving = False
        self._num_steps = 0  # of the group
        self.asked = False  # to move experts before the next step of all
        self._before: deque[Tensor] = deque()  # the counts where windows begin that have not ended
        self._logged = torch.empty(0)
        self.loads: tuple[int, ...] = ()  # tokens of each rank in the last window that was looked at, over all layers
        self._place([self._first] * len(layers))

    def _place(self, slots: Sequence[Sequence[int]]) -> None:
        self.slots = [list(one) for one in slots]
        for replicas, held in zip(self.replicas, self.slots, strict=True):
            replicas.place(held)

    def begin(self) -> None:
        """The group has met: steps are counted from here on. Collective. StepAborted."""
        self._num_steps = 0
        self.asked = False
        self._counts.zero_()
        self._before.clear()
        self._logged = self._counts.clone()
        where = BROKEN if self._moving else zlib.crc32(repr(self.slots).encode())
        all_where = self._group.all_gather(torch.tensor([where], device=self._group.device)).tolist()
        if where != BROKEN and set(all_where) == {where}:
            return
        if self._moving or self.slots != [self._first] * len(self._layers):
            self._reload()
            self._place([self._first] * len(self._layers))
            self._moving = False

    def before_step(self, *, asked: bool = False) -> None:
        """All take a step now, and have agreed on it: move experts first if it is time, or all were asked to. Then it is a
        collective. StepAborted. Who asks out of turn gets what was counted since the window that is open began, or in all."""
        done, config = self._num_steps, self._config
        self._num_steps += 1
        if config.log_balancedness and done and done % config.log_balancedness_interval == 0:
            self._log_balancedness()
        if done and done % config.step_interval == 0:
            since = self._before.popleft() if done >= config.window_size else torch.zeros_like(self._counts)
            self._rearrange(self._load(since))
        elif asked:
            self._rearrange(self._load(self._before[0] if self._before else torch.zeros_like(self._counts)))
        self.asked = self.asked and not asked
        if (done + config.window_size) % config.step_interval == 0:
            self._before.append(self._counts.clone())

    def _load(self, since: Tensor) -> list[list[int]]:
        """Counts by layer the tokens of each expert since then, on all ranks. Waits for the device."""
        of_ranks = self._group.all_gather((self._counts - since)[None])
        load: list[list[int]] = of_ranks.sum(dim=0)[:, [number + 1 for number in self._experts]].tolist()
        each = [rank_loads(of, held, self._group.size) for of, held in zip(load, self.slots, strict=True)]
        self.loads = tuple(round(sum(of_rank)) for of_rank in zip(*each, strict=True))
        return load

    def _rearrange(self, load: list[list[int]]) -> None:
        begun, size = time.monotonic(), self._group.size
        new = [balance(of_layer, held, self._first, size) for of_layer, held in zip(load, self.slots, strict=True)]
        self._moving = True  # until all is done: a group that breaks meanwhile has experts anywhere
        for weights, held, wanted in zip(self._layers, self.slots, new, strict=True):
            rearrange(weights, held, wanted, self._group)
        changed = sum(map(int.__ne__, chain(*self.slots), chain(*new)))
        self._place(new)
        self._moving = False
        _log.info(
            "experts moved", slots=changed, of=len(new) * len(self._first), took_s=round(time.monotonic() - begun, 3)
        )

    def _log_balancedness(self) -> None:
        """The mean over layers, of the steps since the last time."""
        load = self._load(self._logged)
        self._logged = self._counts.clone()
        size = self._group.size
        each = [balancedness(rank_loads(of, held, size)) for of, held in zip(load, self.slots, strict=True)]
        if self._group.rank == 0:
            _log.info("expert load", balancedness=round(sum(each) / len(each), 4), steps=self._num_steps - 1)
