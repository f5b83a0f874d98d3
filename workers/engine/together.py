"""The engine's end of ranks that step together: what this worker proposes before a step, and the group in which experts meet.

Owned by the engine; used by the stepper thread.
"""

from meshlm.protocol.lockstep import StepAgreement
from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.distributed.lockstep import StepExchange
from meshlm.workers.engine.columns import StepColumns


class Together:
    """Steps are counted from 1 in each group, as all its members count."""

    def __init__(self, experts: ExpertGroup) -> None:
        self.experts = experts
        self._exchange: StepExchange | None = None
        self._num_steps = 0

    def join(self, exchange: StepExchange | None) -> None:
        """See `LockstepEngine.join`."""
        if self._exchange is not None:
            self._exchange.close()
        self.experts.close()
        self._exchange, self._num_steps = exchange, 0
        if exchange is not None:
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

    def agree(self, step: StepColumns, *, graph: bool, micro_batches: bool = False) -> StepAgreement:
        """What all do in the step that begins; waits for their hosts, and no device. StepAborted."""
        self._num_steps += 1
        own = StepAgreement(self._num_steps, step.t, graph, micro_batches, step.uniform, step.n)
        agreed = own if self._exchange is None else self._exchange.agree(own)
        self.experts.num_tokens = agreed.num_tokens
        return agreed
