"""The engine's end of ranks that step together: what this worker proposes before a step, and the group in which experts meet.

Owned by the engine; used by the stepper thread.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from greenlet import getcurrent, greenlet

from meshlm.protocol.config import ExpertConfig
from meshlm.protocol.edges.step import StepPlan
from meshlm.protocol.lockstep import StepAgreement
from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.distributed.lockstep import StepExchange
from meshlm.workers.graphs.dispatcher import Dispatcher
from meshlm.workers.graphs.keys import Key
from meshlm.workers.rows.step_columns import StepColumns

T = TypeVar("T")


class Turns:
    """One for all steps of an engine whose experts are those of a group. Outside of `run` nobody pauses."""

    def __init__(self, experts: ExpertGroup) -> None:
        self.experts = experts
        self._halves: list[greenlet] = []

    def run(self, works: list[Callable[[], T]]) -> list[T]:
        """Runs all and gives their results; the first one leads. What one raises ends all."""
        found: dict[int, T] = {}

        def half(nth: int) -> None:
            found[nth] = works[nth]()

        self.experts.pause = self.pause
        self._halves = [greenlet(partial(half, nth)) for nth in range(len(works))]
        try:
            while left := [one for one in self._halves if not one.dead]:  # one goes on alone when the other is done
                left[0].switch()
        finally:
            self.experts.pause = None
            halves, self._halves = self._halves, []
            for one in halves:
                one.throw()  # where it still waits for a turn, which never comes
        return [found[nth] for nth in range(len(works))]

    def pause(self) -> None:
        """Let the other half compute until it pauses or is done."""
        for other in self._halves:
            if other is not getcurrent() and not other.dead:
                other.switch()
                return


def cut_of(num_tokens: int) -> int:
    """Tokens of the first half, and of the padded second; even, so that what is cut off stays aligned."""
    return (num_tokens + 3) // 4 * 2


def reads_across(plan: StepPlan) -> bool:
    """Whether a request that begins finds a prefix which another one computes in this very step, and which may be in the other half."""
    if not plan.remembered or not plan.new_rows:
        return False
    computed = set(np.frombuffer(plan.remembered, np.int32).tolist())
    return any(not computed.isdisjoint(np.frombuffer(new.block_ids, np.int32).tolist()) for new in plan.new_rows)


class StepExecution(NamedTuple):
    """The way in which a step is taken."""

    key: Key | None  # of the CUDA graph that is replayed
    cut: int = 0  # tokens of the first half, if two halves take turns
    rebalance: bool = False  # experts move first, since all ranks were asked to


EAGER = StepExecution(None)


class Together:
    """Steps are counted from 1 in each group, as all its members count."""

    def __init__(self, experts: ExpertGroup, config: ExpertConfig) -> None:
        self.experts, self._config = experts, config
        self._thresholds = config.dbo_decode_token_threshold, config.prefill_threshold(experts.size)
        self.turns = Turns(experts)
        self._exchange: StepExchange | None = None
        self._num_steps = 0
        self.halved: Counter[str] = Counter()  # steps whose halves took turns, by kind
        self.whole: Counter[str] = Counter()  # steps that were not halved with --enable-dbo, by reason

    def join(self, exchange: StepExchange | None) -> None:
        self.leave()
        self._exchange, self._num_steps = exchange, 0
        if exchange is not None:
            exchange.when_aborted(self.experts.abort)
            exchange.connect()
            self.experts.connect(exchange.folder, exchange.group.epoch)

    def leave(self) -> None:
        """A step of this worker failed in the middle: the others must not wait for the rest of it."""
        if self._exchange is not None:
            self._exchange.close()
        self.experts.close()

    def vote(self, yes: bool) -> bool:
        """Whether all say yes, between two steps."""
        self._num_steps += 1
        own = StepAgreement(self._num_steps, 0, yes, False)
        return (own if self._exchange is None else self._exchange.agree(own)).graph

    def execution(
        self, step: StepColumns, graphs: Dispatcher, *, graph: bool, across: bool, rebalance: bool = False
    ) -> StepExecution:
        """How all take the step that begins; waits for their hosts, and no device. StepAborted.

        graph: it may be a CUDA graph here. across: its requests read what others of the step write, so it may not be halved.
        rebalance: experts should move before it."""
        halved = self.may_halve(step.t, uniform=step.uniform) and not across
        agreed = self._agree(step, graph=graph, micro_batches=halved, rebalance=rebalance)
        num_tokens, key = agreed.num_tokens, None
        if agreed.graph and num_tokens:
            key = self._graph(agreed, graphs)
            num_tokens = num_tokens if key is None else key.tokens
        self.experts.num_tokens = num_tokens
        halves = key.halves if key is not None else agreed.micro_batches and agreed.fewest_tokens > cut_of(num_tokens)
        if halves:
            self.halved["decode" if agreed.uniform else "mixed"] += 1
        elif self._config.enable_dbo and step.t:
            long_enough = self.may_halve(step.t, uniform=step.uniform)
            own = "few_tokens" if not long_enough else "reads_across" if across else ""
            self.whole[own or ("uneven_ranks" if agreed.micro_batches else "other_rank")] += 1
        return StepExecution(key, cut_of(num_tokens) if halves else 0, agreed.rebalance)

    def _agree(self, step: StepColumns, *, graph: bool, micro_batches: bool, rebalance: bool) -> StepAgreement:
        self._num_steps += 1
        own = StepAgreement(self._num_steps, step.t, graph, micro_batches, step.uniform, step.n, step.t, rebalance)
        return own if self._exchange is None else self._exchange.agree(own)

    def may_halve(self, num_tokens: int, *, uniform: bool) -> bool:
        """--dbo-decode-token-threshold and --dbo-prefill-token-threshold; a half has a token at least."""
        decode, prefill = self._thresholds
        return self._config.enable_dbo and num_tokens >= max(2, decode if uniform else prefill)

    def _graph(self, agreed: StepAgreement, graphs: Dispatcher) -> Key | None:
        """The same on all ranks, which have the same graphs."""
        size, uniform = (agreed.num_tokens, agreed.num_requests), agreed.uniform
        if agreed.micro_batches:
            key = graphs.find(*size, uniform=uniform, halves=True)
            if key is not None and agreed.fewest_tokens > cut_of(key.tokens):
                return key
        return graphs.find(*size, uniform=uniform)
