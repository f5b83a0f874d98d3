"""Two halves of a step that take turns: while the tokens of one travel to experts or back, the other computes (dual batch overlap).

    compute  |-A0₀-A1₀-||-MLP₁-||-S₁-MLP₀-||-S₀-A0₁-A1₁-|
    network  |----D₁---||--D₀--||----C₁---||-----C₀-----|

(A0 projections, A1 attention, output and router, D dispatch, MLP experts, S shared experts, C combine; 1 is the half that leads.) Both
halves are the same code that computes whole steps, on one stream. A half gives the turn away where it would wait for what travels
(`ExpertGroup.start`), and goes on there at its next turn. The half with the earlier tokens leads and stays ahead in each layer: so a
request that the cut divides finds the keys and values of its first part. Greenlets of the stepper's thread do it. Torch's modes and
streams, which belong to threads, are the same for both, and a CUDA graph that is captured holds what was interleaved.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
from greenlet import getcurrent, greenlet

from meshlm.protocol.edges.step import StepPlan
from meshlm.workers.distributed.expert_group import ExpertGroup

T = TypeVar("T")


class Turns:
    """One for all steps of an engine whose experts are those of a group. Outside of `run` nobody pauses."""

    def __init__(self, experts: ExpertGroup) -> None:
        self.experts = experts
        self._halves: list[greenlet] = []

    def run(self, works: list[Callable[[], T]]) -> list[T]:
        """What each gives; the first one leads. What one raises ends all."""
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
