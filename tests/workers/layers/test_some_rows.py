"""A model whose small products leave parts of sums, or are computed with gate: what receives them gets the same stream and states."""

from typing import Any

import pytest
import torch
from two_layers import same_states, two_layers

pytest.importorskip("triton")
from torch import Tensor

from meshlm.kernels.norm import kernel as norms
from meshlm.kernels.norm.kernel import rms_norm
from meshlm.kernels.small_m_gemm.kernel import Shape
from meshlm.workers.layers import triton_ops
from meshlm.workers.layers.ops import TorchOps
from meshlm.workers.layers.triton_ops import TritonOps
from meshlm.workers.models import decoder
from meshlm.workers.models.gemma import Gemma

if torch.cuda.is_available():
    pytest.skip("these tensors are on the CPU, where only the interpreter's kernels run", allow_module_level=True)

SHAPE = Shape(16, 16, 16, 1, 4, 3)
USED = {"parts", "product", "gate"}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every product of 2 to 16 rows goes by kernels/small_m_gemm; which of its uses were asked for and there."""
    found: set[str] = set()

    def shape_for(rows: int, outputs: int, inputs: int, use: str) -> Shape | None:
        if not 1 < rows <= 16:
            return None
        found.add(use)
        return SHAPE._replace(splits=2) if use == "parts" else SHAPE

    monkeypatch.setattr(triton_ops, "shape_for", shape_for)
    monkeypatch.setattr(decoder, "make_ops", lambda device, dtype: TorchOps())  # weights stay as they are
    return found


@pytest.mark.parametrize("last", [True, False], ids=["last", "stage"])
@pytest.mark.parametrize("lengths", [[1, 1, 5], [1]])
@pytest.mark.parametrize(
    ("settings", "uses"),
    [
        ({}, USED),
        ({"qk_norm": True, "sliding_window": 4}, USED),
        ({"hidden_act": "gelu_pytorch_tanh"}, {"parts", "product"}),
        ({"output_bias": True, "mlp_bias": True, "attention_bias": True}, set()),
        ({"attention_bias": True}, {"parts", "gate"}),
    ],
    ids=["plain", "window", "gelu", "biases", "qkv-bias"],
)
def test_the_same_states(
    used: set[str], settings: dict[str, Any], uses: set[str], lengths: list[int], last: bool
) -> None:
    same_states(two_layers(64, **settings), TritonOps(), lengths, last=last)
    assert used == (uses if sum(lengths) > 1 else set())


@pytest.mark.parametrize("last", [True, False], ids=["last", "stage"])
@pytest.mark.parametrize("lengths", [[1, 1, 5], [1], [9, 9]])
@pytest.mark.parametrize("act", ["gelu_pytorch_tanh", "silu"])
def test_norms_of_what_is_added_are_left_to_the_norm_behind(
    used: set[str], act: str, lengths: list[int], last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma: of parts of a sum, of a whole sum, and in the product of one row."""
    alone: list[int] = []

    def counted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        alone.append(x.shape[0])
        return rms_norm(x, weight, eps)

    monkeypatch.setattr(norms, "rms_norm", counted)
    monkeypatch.setattr(TritonOps, "rms_norm", staticmethod(counted))
    same_states(two_layers(64, Gemma, hidden_act=act), TritonOps(), lengths, last=last)
    several = 1 if sum(lengths) > 1 else 0  # the first layer's first norm, where no product has it
    assert len(alone) == several + (not last)
