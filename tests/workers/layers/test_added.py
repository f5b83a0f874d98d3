"""A model whose o and down projections add to the stream themselves: the same states as with the sum in the norm."""

from typing import Any

import pytest
import torch
from two_layers import same_states, two_layers

pytest.importorskip("triton")
from torch import Tensor

from meshlm.kernels.gemm import kernel
from meshlm.kernels.gemm.kernel import add_gemm
from meshlm.workers.layers.ops import TorchOps
from meshlm.workers.layers.triton_ops import TritonOps
from meshlm.workers.models import decoder
from meshlm.workers.models.gemma import Gemma

if torch.cuda.is_available():
    pytest.skip("these tensors are on the CPU, where only the interpreter's kernels run", allow_module_level=True)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps of 4 tokens or more add in the product. How many rows each such product had."""
    found: list[int] = []

    def add(x: Tensor, w: Tensor, to: Tensor) -> Tensor:
        found.append(x.shape[0])
        return add_gemm(x, w, to)

    monkeypatch.setattr(kernel, "ADDED_ROWS", 4)
    monkeypatch.setattr(kernel, "add_gemm", add)
    monkeypatch.setattr(decoder, "make_ops", lambda device, dtype: TorchOps())  # weights stay as they are
    return found


@pytest.mark.parametrize("last", [True, False], ids=["last", "stage"])
@pytest.mark.parametrize("lengths", [[1, 1, 5], [9], [1, 1]])
@pytest.mark.parametrize(
    ("settings", "products"),
    [({}, 4), ({"hidden_act": "gelu_pytorch_tanh"}, 4), ({"output_bias": True, "mlp_bias": True}, 0)],
    ids=["plain", "gelu", "biases"],
)
def test_the_same_states(
    added: list[int], settings: dict[str, Any], products: int, lengths: list[int], last: bool
) -> None:
    same_states(two_layers(56, **settings), TritonOps(), lengths, last=last)
    tokens = sum(lengths)
    assert added == [tokens] * (products if tokens >= 4 else 0)


@pytest.mark.parametrize("lengths", [[1, 1, 5], [9]])
def test_what_is_normed_first_is_not_added_by_the_product(added: list[int], lengths: list[int]) -> None:
    """Gemma: the norm of what o and down give goes into the residual."""
    same_states(two_layers(56, Gemma), TritonOps(), lengths)
    assert added == []
