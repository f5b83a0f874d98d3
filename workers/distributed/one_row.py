"""Steps of one row under tensor parallelism: products send their parts to all ranks, products that follow receive them.

    embedding, o or down -> packets in every rank's inbox -> the norm in front of gate and up, or of the next layer's qkv

There is no kernel for the sum in between (kernels/gemv). The head's columns go the same way, in a room of their own. Turns of a
step are counted here, behind the last allreduce_rmsnorm, which ends every step (the norm before the head) and so advances the
count on the device: a CUDA graph replays with new numbers. Used by distributed/ops.py; made by distributed/symmetric.py, for bfloat16.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from meshlm.kernels.allreduce_rmsnorm.kernel import Workspace, allreduce_rmsnorm
from meshlm.kernels.embedding import kernel as embedding
from meshlm.kernels.gemv.kernel import Turn, gemv, pays
from meshlm.kernels.gemv.side_by_side import side_by_side
from meshlm.kernels.packets import FOR_EVER


class OneRow:
    """All ranks make the same calls. At most one sum is on its way."""

    def __init__(self, workspace: Workspace, share: Callable[[int], Tensor]) -> None:
        """share: so many int64 zeros of each rank, that all can reach; their addresses by rank. Collective."""
        self.workspace, self._share, self.patience = workspace, share, FOR_EVER
        self._heads: dict[int, Workspace] = {}  # by columns of a rank
        self._nth = 0  # of the next sum, behind the last allreduce_rmsnorm
        self._in_flight = False  # that sum was sent and has not been received
        self._zeros = torch.zeros(1, workspace.columns, dtype=torch.bfloat16, device=workspace.turns.device)

    def send(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """x W^T + b, this rank's term of a sum; what is returned has the sum's shape and no content. None: not for this size."""
        assert not self._in_flight, "the sum before has not been received"
        if not pays(weight, x.shape[0]) or weight.shape[0] != self.workspace.columns:
            assert self._nth == 0, "the allreduce_rmsnorm that does this one would count its turn from 0"
            return None
        sent, _ = gemv(x, weight, bias, sends=Turn(self.workspace, self._nth))
        self._in_flight = True
        return sent

    def send_row(self, ids: Tensor, table: Tensor, first: int) -> Tensor:
        """The same of a row of a table, of which this rank has those of ids from `first` on. It begins a step.

        What is left of a step before was never launched: its capture failed.
        """
        self._nth = 0
        self._in_flight = True
        return embedding.send(ids, table, first, Turn(self.workspace, self._nth))

    def norm_linear(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm: tuple[Tensor, float],
        weight: Tensor,
        bias: Tensor | None,
        *,
        gate: str,
    ) -> tuple[Tensor, Tensor] | None:
        """See `Ops.norm_linear`, of the sum in flight, whose shape x has. None, and it is still in flight: not for this weight."""
        residual = self._zeros if residual is None else residual
        if not pays(weight, 1) or (gate and bias is not None):
            return None
        turn = Turn(self.workspace, self._nth, self.patience)
        found = gemv(x, weight, bias, norm=norm[0], residual=residual, eps=norm[1], gate=gate, receives=turn)
        self._in_flight, self._nth = False, self._nth + 1
        return found

    def norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += the sum in flight, whose shape x has; the norm of that."""
        assert self._in_flight, "no sum was sent"
        found = allreduce_rmsnorm(x, residual, weight, eps, self.workspace, self.patience, sent=self._nth)
        self._in_flight, self._nth = False, 0
        return found

    def receive(self, x: Tensor) -> Tensor:
        """The sum in flight alone, whose shape x has: what `norm` adds to a residual of zeros."""
        found = torch.zeros_like(x)
        self.norm(x, found, self._zeros[0], 1.0)
        return found

    def logits(self, hidden: Tensor, weight: Tensor, width: int, out: Tensor | None) -> Tensor | None:
        """hidden W^T of each rank side by side, [1, width]; what is right of it is padding. None: not for this size.

        The first call for a size makes room for it, so it must not be in a CUDA graph.
        """
        each = weight.shape[0]
        if hidden.shape[0] != 1 or each % 2 or width % 2 or not pays(weight, 1):
            return None
        if each not in self._heads:
            addresses = self._share(2 * self.workspace.size * each // 2)
            turns = torch.tensor([1, 0], dtype=torch.int32, device=addresses.device)
            three = (addresses, addresses, addresses)
            self._heads[each] = Workspace(self.workspace.rank, self.workspace.size, 1, each, three, turns, 1)
        turn = Turn(self._heads[each], 0, self.patience)
        gemv(hidden, weight, sends=turn)
        whole = out if out is not None else torch.empty(1, width, dtype=hidden.dtype, device=hidden.device)
        return side_by_side(whole, turn)
