"""The gated MLP of a layer."""

from torch import Tensor, nn

from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import StepInputs
from meshlm.workers.layers.linear import Linear
from meshlm.workers.layers.norm import RMSNorm
from meshlm.workers.layers.ops import Ops
from meshlm.workers.partial_sum import PartialSum


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, spec: ModelSpec, size: int | None = None) -> None:
        """size: between gate and down, where it is not the model's."""
        super().__init__()
        size = spec.intermediate_size if size is None else size
        self.gate_up = Linear(spec.hidden_size, 2 * size, bias=spec.mlp_bias)
        self.down = Linear(size, spec.hidden_size, bias=spec.mlp_bias)
        self._act = spec.hidden_act

    def forward(self, x: PartialSum, norm: RMSNorm, batch: StepInputs, ops: Ops) -> PartialSum:
        """Computes what the MLP adds to the residual, which has x in it then."""
        hidden, residual = self.activated(x, norm, ops)
        return self.down.row_parallel(hidden, residual, ops)

    def activated(self, x: PartialSum, norm: RMSNorm, ops: Ops) -> tuple[Tensor, Tensor]:
        """act(gate) * up of the norm, before the down projection; and the residual with x in it."""
        return self.gate_up.after_norm(x, norm, ops, gate=self._act)

    def of_normed(self, x: Tensor, ops: Ops) -> PartialSum:
        """The MLP of what is normed already, without a residual."""
        return self.down.row_parallel(ops.act_mul(self.gate_up(x, ops), self._act), None, ops)
