"""Products by other algorithms than cuBLAS's first choice: which are taken, and that they compute the same."""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshlm.kernels import tables
from meshlm.kernels.gemm import kernel
from meshlm.kernels.gemm.cublaslt import TYPES, Algorithm, Products
from meshlm.kernels.tuning import core

A = (66, 20, 1)


@given(st.lists(st.integers(1, 500), min_size=2, max_size=20, unique=True), st.integers(1, 600))
def test_at_most_one_entry_is_for_so_many_rows(borders: list[int], rows: int) -> None:
    entry = core.entry_of("gemm", (8, 4), dict.fromkeys(borders, A))
    found = kernel.entries({(8, 4): entry["rows"]})[8, 4]
    fitting = [entry for entry in found if entry.over < rows <= entry.to]
    assert len(fitting) <= 1
    assert kernel.entry_for(found, rows) == (fitting[0] if fitting else None)
    assert all(kernel.entry_for(found, border) is not None for border in borders)


def test_tables_in_the_tree_can_be_read() -> None:
    for path in (tables.FOLDER / "gemm" / "tables").glob("*.json"):
        for known in kernel.entries(tables.by_key(json.loads(path.read_text())["products"])).values():
            assert all(entry.over < entry.to for entry in known)
            assert all(before.to <= after.over for before, after in pairwise(known))


def test_without_a_gpu_it_is_torchs_product() -> None:
    x, w, to = torch.randn(3, 8), torch.randn(5, 8), torch.randn(3, 5)
    assert torch.equal(kernel.gemm(x, w), F.linear(x, w))
    expected = to + F.linear(x, w)
    assert kernel.add_gemm(x, w, to) is to
    torch.testing.assert_close(to, expected)


def test_what_the_library_refuses_is_torchs_product(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once; nothing ends for it."""
    calls = []

    def run(*_: object, add: bool) -> None:
        calls.append(1)
        raise RuntimeError("cublasLtMatmul failed with status 15")

    monkeypatch.setattr(kernel, "ALIGNED", 1)
    monkeypatch.setattr(kernel, "_refused", set())
    monkeypatch.setattr(kernel, "_table", lambda: {(5, 8): [kernel.Entry(2, 4, A)]})
    monkeypatch.setattr(kernel, "_algorithm", lambda *_: Algorithm(A, None))
    monkeypatch.setattr(kernel, "_products", lambda *_: SimpleNamespace(run=run))
    x, w = torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(5, 8, dtype=torch.bfloat16)
    to = torch.zeros(3, 5, dtype=torch.bfloat16)
    for _ in range(2):
        assert torch.equal(kernel.gemm(x, w), F.linear(x, w))
        torch.testing.assert_close(kernel.add_gemm(x, w, to.zero_()), F.linear(x, w))
    assert len(calls) == 1
    assert "product of 3 rows with [5, 8]: cublasLtMatmul failed with status 15" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("cublasLtCreate failed with status 1"), torch.OutOfMemoryError("full")])
def test_a_library_that_does_not_start_ends_nothing(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    """Nor one of another version, which does not know what it is asked; only for want of memory others must know."""

    def products(*_: object) -> Products:
        raise error

    monkeypatch.setattr(kernel, "ALIGNED", 1)
    monkeypatch.setattr(kernel, "_refused", set())
    monkeypatch.setattr(kernel, "_table", lambda: {(5, 8): [kernel.Entry(2, 4, A)]})
    monkeypatch.setattr(kernel, "_products", products)
    kernel._algorithm.cache_clear()
    x, w = torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(5, 8, dtype=torch.bfloat16)
    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError):
            kernel.gemm(x, w)
    else:
        assert torch.equal(kernel.gemm(x, w), F.linear(x, w))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(16, 256, 128), (64, 6144, 1024), (1000, 1024, 3072)])
def test_all_algorithms_compute_the_same(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    products = Products(torch.device("cuda", 0), dtype)
    x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
    w = torch.randn(outputs, inputs, device="cuda", dtype=dtype) / inputs**0.5
    expected = (x.float() @ w.float().t()).to(dtype)
    found = products.algorithms(rows, outputs, inputs)
    assert len(found) > 1
    assert len({algorithm.config for algorithm in found}) == len(found)
    assert {algorithm.config[-1] for algorithm in found} <= {0, 1}
    assert any(algorithm.config[-1] == 0 for algorithm in found)  # without a workspace
    for algorithm in found:
        out = torch.full((rows, outputs), float("nan"), device="cuda", dtype=dtype)
        products.run(x, w, out, algorithm)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
        products.run(x, w, out, algorithm, add=True)
        torch.testing.assert_close(out, 2 * expected, atol=4e-2, rtol=2e-2)


@pytest.mark.gpu
def test_the_table_is_followed_also_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    products = Products(torch.device("cuda", 0), torch.bfloat16)
    config = products.algorithms(64, 6144, 1024)[-1].config
    gone = (1, 2, 3)
    table = {(6144, 1024): [kernel.Entry(32, 64, config), kernel.Entry(64, 128, gone)]}
    monkeypatch.setattr(kernel, "_table", lambda: table)
    taken: list[tuple[int, ...]] = []
    run = Products.run

    def seen(self: Products, x: Tensor, w: Tensor, out: Tensor, algorithm: Algorithm, *, add: bool = False) -> None:
        taken.append(algorithm.config)
        run(self, x, w, out, algorithm, add=add)

    monkeypatch.setattr(Products, "run", seen)
    w = torch.randn(6144, 1024, device="cuda", dtype=torch.bfloat16) / 32
    for rows in (16, 33, 64, 65):
        x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(kernel.gemm(x, w), F.linear(x, w), atol=2e-2, rtol=2e-2)
    assert taken == [config, config]
    to = torch.randn(64, 6144, device="cuda", dtype=torch.bfloat16)
    sum_ = to + F.linear(x[:64], w)
    torch.testing.assert_close(kernel.add_gemm(x[:64], w, to), sum_, atol=4e-2, rtol=2e-2)
    assert taken == [config] * 3
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.gemm(x, w)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(out, F.linear(x, w), atol=2e-2, rtol=2e-2)
