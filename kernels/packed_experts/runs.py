"""One layer of experts with packed weights to be measured: random weights, from memory, since tokens choose again and again."""

import torch
from torch import Tensor

from meshlm.kernels.grouped_gemm.plan import PARTS_ROWS, Layer
from meshlm.kernels.moe_align.kernel import most_tiles
from meshlm.kernels.moe_sum.kernel import weighted_sum
from meshlm.kernels.packed_experts import layer as layers
from meshlm.kernels.packed_experts.kernel import Parts
from meshlm.kernels.packed_experts.layout import CHUNK, MXFP4, PLACES, PLANE, PLANES, ExpertWeight, Format, chunks_of
from meshlm.kernels.packed_experts.plan import Plan

BYTES_AT_ONCE = 400 << 20  # of weights that are read for all choices, at least
HIGHEST = 256  # rows of a tile
CUDA = torch.device("cuda")


def random_weight(
    experts: int, outputs: int, inputs: int, device: torch.device, random: torch.Generator | None = None, format: Format = MXFP4
) -> ExpertWeight:  # fmt: skip
    """Any codes, and scales of about 1/100."""
    lines, chunks = (experts, outputs), chunks_of(inputs)

    def integers(low: int, high: int, dtype: torch.dtype, *last: int) -> Tensor:
        return torch.randint(low, high, (*lines, *last), dtype=dtype, device=device, generator=random)

    words = chunks * (2 * PLANE if format.bits == 8 else PLANE)
    codes = integers(-(1 << 15), 1 << 15, torch.int16, words)
    if format.values == "mxfp4":
        there = torch.arange(CHUNK).view(PLANES, PLANE) < inputs - (chunks - 1) * CHUNK  # of the last chunk's inputs
        bits = torch.tensor([sum(1 << place for place in places) for places in PLACES])
        codes[..., -PLANE:] &= (there * bits[:, None]).sum(0).to(torch.int16).to(device)
        return ExpertWeight(codes, integers(118, 124, torch.uint8, chunks * PLANES), inputs)
    groups, middle = -(-inputs // format.group), 1 << format.bits - 1
    scales = integers(50, 150, torch.int32, groups) / (1024 * middle)
    offsets = integers(middle - 2, middle + 3, torch.int32, groups).float()
    if format.values == "minima":
        offsets *= -scales
    high = integers(0, 256, torch.uint8, 16 * chunks * (format.bits - 4)) if format.bits in (5, 6) else None
    return ExpertWeight(codes, torch.stack((scales, offsets), -1).half(), inputs, format, high)


class Runs:
    """Runs of a layer with so many rows, which share weights and tokens."""

    def __init__(
        self, layer: Layer, rows: int, device: torch.device = CUDA, dtype: torch.dtype = torch.bfloat16, kind: str = MXFP4.name
    ) -> None:  # fmt: skip
        """kind: `plan.kind_of` the weights."""
        self.layer, self.rows = layer, rows
        count, topk, hidden, wide = layer
        at_once = BYTES_AT_ONCE if device.type == "cuda" else 1
        copies = max(1, min(16, at_once // (min(count, rows * topk) * hidden * wide)))
        formats = [Format.of_name(name) for name in kind.split(" and ")]
        self.gate_up = random_weight(count, 2 * wide, hidden, device, format=formats[0])
        self.down_weight = random_weight(count, hidden, wide, device, format=formats[-1])
        self.choices = [
            torch.rand(rows, count, device=device).topk(topk).indices.to(torch.int32) for _ in range(copies)
        ]
        self.weights = torch.rand(rows, topk, device=device)
        self.x = torch.randn(rows, hidden, device=device, dtype=dtype)
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
            layers.gate(plan, self.x, self.gate_up, choice, given, self._inner[: self._count(plan)])

    def down(self, plan: Plan) -> None:
        for choice in self.choices:
            self._down_of(plan, choice, layers.order(plan, choice, self.layer.experts))

    def of(self, plan: Plan) -> Tensor:
        """The whole layer, of each choice. What the last one gives, float32 or bfloat16 [rows, hidden]."""
        for choice in self.choices:
            given = layers.order(plan, choice, self.layer.experts)
            layers.gate(plan, self.x, self.gate_up, choice, given, self._inner[: self._count(plan)])
            self._down_of(plan, choice, given)
        return self._parts.sum(0) if self.rows <= PARTS_ROWS else self._whole

    def _count(self, plan: Plan) -> int:
        return layers.num_rows(plan, self.rows, self.layer.topk, self.layer.experts)

    def _down_of(self, plan: Plan, choice: Tensor, given: layers.Order | None) -> None:
        inner, to = self._inner[: self._count(plan)], Parts(choice, self.weights)
        if self.rows <= PARTS_ROWS:
            layers.down(plan, inner, self.down_weight, to, given, self._parts, parts=True)
            return
        assert given is not None
        results = self._sorted[: len(inner)]
        layers.down(plan, inner, self.down_weight, to, given, results, parts=False)
        weighted_sum(results, given.positions, self.weights, self._whole)
