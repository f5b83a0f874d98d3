"""Kernels of quantised weights are used where they are right, and left out, with a line that says so, where they are not."""

from typing import Any

import pytest
import torch
from device import DEVICE, MARKS, WIDE, needs_fp8
from gluon_on_torch import on_torch
from structlog.testing import capture_logs

from meshlm.kernels.fp8_gemm.reference import Fp8Weight
from meshlm.kernels.packed_few import kernel as packed_few
from meshlm.kernels.packed_gemm import gemv, pairs
from meshlm.kernels.quantise_int8.reference import Int8Weight
from meshlm.kernels.self_test import same_numbers
from meshlm.workers.formats import self_test

pytestmark = MARKS
KINDS: list[self_test.Kind] = [
    (4, 128, 8, True, True, torch.float16),
    (4, 128, 0, False, True, torch.float16),
    (4, 32, 0, True, False, torch.float16),
    (6, 16, 32, True, True, torch.float16),
    (8, 4096, 128, True, True, torch.bfloat16),
]

EIGHT_BITS = [(0, 0, False), (0, 0, True), (128, 128, False), (0, None, False)]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for test in (
        self_test._one_row,
        self_test._few_rows,
        self_test._some_rows,
        self_test._fp8,
        self_test._fp8_row,
        self_test._int8,
    ):
        test.cache_clear()
    if DEVICE.type != "cuda":
        monkeypatch.setattr(self_test, "COUNTS", (1, 70))
        monkeypatch.setattr(self_test, "ROWS", 72)
        monkeypatch.setattr(packed_few, "packed_few", on_torch(packed_few).packed_few)


@pytest.mark.parametrize("kind", KINDS if DEVICE.type == "cuda" else KINDS[2:3])
def test_packed_kernels(kind: self_test.Kind) -> None:
    found = self_test.tested_packed(self_test.random_packed(kind, 512, DEVICE), WIDE)
    assert found.one_row == (kind[1] >= 32)
    assert found.some_rows
    assert found.few_rows == (kind[0] == 4)


@needs_fp8
@pytest.mark.parametrize(("group", "rounded", "known"), EIGHT_BITS if DEVICE.type == "cuda" else EIGHT_BITS[1:3])
def test_products_of_8_bit_floats(group: int, rounded: int | None, known: bool) -> None:
    codes = torch.empty(64, 256, dtype=torch.float8_e4m3fn, device=DEVICE)
    scale = torch.tensor(1.0, device=DEVICE) if known else None
    found = self_test.tested_fp8(Fp8Weight(codes, torch.ones(64, 1), group, rounded, scale), WIDE)
    assert found is not None
    assert found.one_row == (WIDE is torch.bfloat16)


@pytest.mark.parametrize("symmetric", [True, False] if DEVICE.type == "cuda" else [False])
def test_products_of_8_bit_integers(symmetric: bool) -> None:
    codes = torch.empty(64, 256, dtype=torch.int8, device=DEVICE)
    assert self_test.is_int8_right(Int8Weight(codes, torch.ones(64, 1), torch.ones(64), symmetric), WIDE)


@pytest.mark.parametrize("which", [1, 2], ids=["a code at a time", "two"])
@pytest.mark.parametrize("how", ["NaN", "raises"])
def test_what_is_wrong_is_not_used(how: str, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS[which]
    kernel = pairs if pairs.takes(self_test.random_packed(kind, 512, DEVICE)) else gemv
    right = kernel.parts

    def parts(*arguments: Any) -> torch.Tensor:
        if how == "raises":
            raise RuntimeError("PassManager::run failed\nand more")
        found: torch.Tensor = right(*arguments)
        found[..., 50] = torch.nan if how == "NaN" else found[..., 50] + 40
        return found

    monkeypatch.setattr(kernel, "parts", parts)
    with capture_logs() as said:
        found = self_test.tested_packed(self_test.random_packed(kind, 512, DEVICE), WIDE)
        again = self_test.tested_packed(self_test.random_packed(kind, 512, DEVICE), WIDE)
    assert (found.one_row, found.some_rows) == (again.one_row, again.some_rows) == (False, True)
    assert [entry["event"] for entry in said] == [
        "the packed kernel of one row is not right on this GPU: tensor cores compute it"
    ]


def test_few_rows_that_are_wrong_are_computed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_few, "packed_few", lambda x, weight, shape: torch.zeros(len(x), weight.outputs))
    with capture_logs() as said:
        found = self_test.tested_packed(self_test.random_packed(KINDS[1], 512, DEVICE), WIDE)
    assert (found.one_row, found.few_rows, found.some_rows) == (True, False, True)
    assert [entry["event"] for entry in said] == [
        "the packed kernel of few rows is not right on this GPU: others compute them"
    ]


def test_the_same_numbers_at_each_start() -> None:
    """Or ranks, and a worker before and after its death, would choose different kernels. The process' own draws go on as they were."""
    drawn: list[torch.Tensor] = []

    def test() -> bool:
        drawn.append(torch.randn(4, device=DEVICE))
        return True

    torch.manual_seed(5)
    expected = torch.randn(3, device=DEVICE)
    torch.manual_seed(5)
    assert same_numbers()(test)()
    assert torch.equal(torch.randn(3, device=DEVICE), expected)
    assert same_numbers()(test)()
    assert torch.equal(*drawn)


def test_a_step_of_a_large_result_is_no_error() -> None:
    exact = torch.cat([torch.randn(500), torch.tensor([40.0])])
    assert not self_test._result(exact.bfloat16(), exact).wrong()
    assert "off by" in self_test._result(exact + 0.2, exact).wrong()
    assert self_test._result(torch.full_like(exact, torch.nan), exact).wrong()
