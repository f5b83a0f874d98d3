"""Integer products of a CPU are used where they are right, and left out, with a line that says so, where they are not."""

from collections.abc import Iterator

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from meshlm.kernels.cpu import kernel, packed, self_test
from meshlm.kernels.cpu.library import library

pytestmark = pytest.mark.skipif(
    library() is None or not packed.can_round(), reason="activations are not rounded on this processor"
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    self_test.rounds.cache_clear()
    yield
    self_test.rounds.cache_clear()


def test_right_products_are_used() -> None:
    with capture_logs() as lines:
        assert self_test.rounds()
    assert not lines


@pytest.mark.parametrize("nth", range(2 * len(self_test.KINDS)))
@pytest.mark.parametrize("wrong", [1.001, torch.nan])
def test_a_wrong_one_is_not(wrong: float, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them it is."""
    linear, calls = kernel.linear, iter(range(100))

    def broken(x: Tensor, weight: Tensor, bias: Tensor | None, n: int) -> Tensor:
        found = linear(x, weight, bias, n)
        if next(calls) == nth:
            found[10, 20] = found.abs().max() * wrong + 1
        return found

    monkeypatch.setattr(kernel, "linear", broken)
    with capture_logs() as lines:
        assert not self_test.rounds()
    assert [line["event"] for line in lines] == [
        "integer products are not right on this processor: activations stay float32"
    ]
