"""The self-test of --deterministic says which kernel gives a row other bits beside others, and nothing of kernels that do not."""

import pytest
import torch
from device import DEVICE, MARKS, ON_GPU
from torch import Tensor

from meshlm.kernels.batch_invariant import gemm, self_test
from meshlm.kernels.batch_invariant.self_test import Layers, why_variant

pytestmark = MARKS
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def layers() -> Layers:
    """Small whole numbers: their sums are exact, so the interpreter's products have the same bits in any order, too."""
    weight = torch.randint(-2, 3, (64, 48), device=DEVICE).to(DTYPE)
    return Layers([(weight, False)], [(4, 2, 64)], [0, 100], 16, 1024)


@pytest.fixture
def whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *sizes, **options: real(*sizes, **options).round())


@pytest.mark.skipif(not ON_GPU, reason="the interpreter's last bit of attention depends on the place of a row")
def test_right_kernels_are_taken() -> None:
    assert why_variant(layers()) == ""


@pytest.mark.usefixtures("whole_numbers")
def test_a_product_that_depends_on_its_rows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = gemm.gemm
    assert not list(self_test._products(layers().weights[0][0], gate=False))
    monkeypatch.setattr(gemm, "gemm", lambda x, w, **options: real(x, w, **options) + (len(x) > 64))
    assert why_variant(layers()) == "a row's product with a weight of 64 x 48 is another one among 128 rows"


@pytest.mark.usefixtures("whole_numbers")
def test_attention_that_is_another_in_a_decode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        at: object,
        scale: float,
        out: Tensor,
        *rest: object,
        decodes: bool,
        **options: object,
    ) -> None:
        out.fill_(float(decodes))

    monkeypatch.setattr(self_test, "attention", attention)
    assert why_variant(layers()) == "attention with heads of 64 gives a decode other bits than a prompt"
    monkeypatch.setattr(
        self_test,
        "attention",
        lambda query, *rest, decodes, **options: rest[4].fill_(0.0 if decodes or len(query) > 300 else 1.0),
    )
    assert why_variant(layers()) == "attention with heads of 64 gives a chunk other bits than a prompt"
