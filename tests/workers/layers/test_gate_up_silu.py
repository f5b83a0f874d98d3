"""A model whose gate and up projections are one kernel with the gate: the same states as unfused."""

from typing import Any

import pytest
import torch
from two_layers import same_states, two_layers

pytest.importorskip("triton")
from meshlm.kernels.gate_up_silu import kernel
from meshlm.kernels.gate_up_silu.kernel import Shape
from meshlm.workers.layers.ops import TorchOps
from meshlm.workers.layers.triton_ops import TritonOps
from meshlm.workers.models import decoder

if torch.cuda.is_available():
    pytest.skip("these tensors are on the CPU, where only the interpreter's kernels run", allow_module_level=True)

TILE = Shape(16, 16, 16, 4, 3)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Every such projection of 8 rows or more goes by kernels/gate_up_silu; which weights did."""
    found: set[tuple[int, int]] = set()

    def shape_for(rows: int, outputs: int, inputs: int) -> Shape | None:
        if rows < 8:
            return None
        found.add((outputs, inputs))
        return TILE

    monkeypatch.setattr(kernel, "shape_for", shape_for)
    monkeypatch.setattr(decoder, "make_ops", lambda device, dtype: TorchOps())  # weights stay as they are
    return found


@pytest.mark.parametrize("lengths", [[1, 1, 13], [5, 9, 7], [1, 1]])
@pytest.mark.parametrize(
    ("settings", "uses"),
    [
        ({}, {(112, 32)}),
        ({"qk_norm": True, "sliding_window": 4}, {(112, 32)}),
        ({"hidden_act": "gelu_pytorch_tanh"}, set()),
        ({"output_bias": True, "mlp_bias": True, "attention_bias": True}, set()),
    ],
    ids=["plain", "window", "gelu", "biases"],
)
def test_the_same_states(
    used: set[tuple[int, int]], settings: dict[str, Any], uses: set[tuple[int, int]], lengths: list[int]
) -> None:
    same_states(two_layers(56, **settings), TritonOps(), lengths)
    assert used == (uses if sum(lengths) >= 8 else set())
