"""One layer of MXFP4 experts to be measured: random weights, from memory, since tokens choose again and again."""

import torch
from torch import Tensor

from meshlm.kernels.grouped_gemm.plan import PARTS_ROWS, Layer
from meshlm.kernels.moe_align.kernel import most_tiles
from meshlm.kernels.moe_sum.kernel import weighted_sum
from meshlm.kernels.mxfp4.reference import GROUP
from meshlm.kernels.mxfp4_experts import layer as layers
from meshlm.kernels.mxfp4_experts.kernel import Parts
from meshlm.kernels.mxfp4_experts.layout import CHUNK, PLACES, PLANES, MXFP4Weight, chunks_of
from meshlm.kernels.mxfp4_experts.plan import Plan

BYTES_AT_ONCE = 400 << 20  # of weights that are read for all choices, at least
HIGHEST = 256  # rows of a tile
CUDA = torch.device("cuda")


def random_weight(
    experts: int, outputs: int, inputs: int, device: torch.device, random: torch.Generator | None = None
) -> MXFP4Weight:
    """Any codes, and scales of about 1/100."""
    chunks = chunks_of(inputs)
    sizes = experts, outputs, chunks * GROUP
    codes = torch.randint(-(1 << 15), 1 << 15, sizes, dtype=torch.int16, device=device, generator=random)
    there = torch.arange(CHUNK).view(PLANES, GROUP) < inputs - (chunks - 1) * CHUNK  # of the last chunk's inputs
    bits = torch.tensor([sum(1 << place for place in places) for places in PLACES])
    codes[..., -GROUP:] &= (there * bits[:, None]).sum(0).to(torch.int16).to(device)
    sizes = experts, outputs, chunks * PLANES
    scales = torch.randint(118, 124, sizes, dtype=torch.uint8, device=device, generator=random)
    return MXFP4Weight(codes, scales, inputs)


class Runs:
    """Runs of a layer with so many rows, which share weights and tokens."""

    def __init__(
        self, layer: Layer, rows: int, device: torch.device = CUDA, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.layer, self.rows = layer, rows
        count, topk, hidden, wide = layer
        copies = max(1, min(16, BYTES_AT_ONCE // (min(count, rows * topk) * hidden * wide)))
        self._gate_up = random_weight(count, 2 * wide, hidden, device)
        self._down = random_weight(count, hidden, wide, device)
        self.choices = [
            torch.rand(rows, count, device=device).topk(topk).indices.to(torch.int32) for _ in range(copies)
        ]
        self._weights = torch.rand(rows, topk, device=device)
        self._x = torch.randn(rows, hidden, device=device, dtype=dtype)
        most = max(rows * topk, most_tiles(rows * topk, count, HIGHEST) * HIGHEST)
        self._inner = torch.randn(most, wide, device=device, dtype=dtype)
        self._sorted = torch.empty(most, hidden, device=device, dtype=dtype)
        self._parts = torch.zeros(topk, min(rows, PARTS_ROWS), hidden, device=device)
        self._whole = torch.empty(rows, hidden, device=device, dtype=dtype)

    def touched(self) -> float:
        """Experts, on the average of the choices."""
        return sum(len(choice.unique()) for choice in self.choices) / len(self.choices)

    def gate(self, plan: Plan) -> None:
        """The first products, and the order of rows, of each choice."""
        for choice in self.choices:
            given = layers.order(plan, choice, self.layer.experts)
            layers.gate(plan, self._x, self._gate_up, choice, given, self._inner[: self._count(plan)])

    def down(self, plan: Plan) -> None:
        """The same for the second ones."""
        for choice in self.choices:
            self._down_of(plan, choice, layers.order(plan, choice, self.layer.experts))

    def of(self, plan: Plan) -> Tensor:
        """The whole layer, of each choice. What the last one gives, float32 or bfloat16 [rows, hidden]."""
        for choice in self.choices:
            given = layers.order(plan, choice, self.layer.experts)
            layers.gate(plan, self._x, self._gate_up, choice, given, self._inner[: self._count(plan)])
            self._down_of(plan, choice, given)
        return self._parts.sum(0) if self.rows <= PARTS_ROWS else self._whole

    def _count(self, plan: Plan) -> int:
        return layers.num_rows(plan, self.rows, self.layer.topk, self.layer.experts)

    def _down_of(self, plan: Plan, choice: Tensor, given: layers.Order | None) -> None:
        inner, to = self._inner[: self._count(plan)], Parts(choice, self._weights)
        if self.rows <= PARTS_ROWS:
            layers.down(plan, inner, self._down, to, given, self._parts, parts=True)
            return
        assert given is not None
        results = self._sorted[: len(inner)]
        layers.down(plan, inner, self._down, to, given, results, parts=False)
        weighted_sum(results, given.positions, self._weights, self._whole)
