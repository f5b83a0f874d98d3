"""What the tuner of a start tries for products, in Triton's interpreter: what computes the same is timed, and nothing else can win."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from gluon_on_torch import on_torch
from measured import measured
from triton.runtime.errors import OutOfResources

from meshlm.kernels import pdl, tables
from meshlm.kernels.gemv import kernel as gemv
from meshlm.kernels.gemv import op as gemv_op
from meshlm.kernels.packed_few import kernel as packed_few
from meshlm.kernels.small_m_gemm import kernel as small_m_gemm
from meshlm.kernels.small_m_gemm import op as small_m_op
from meshlm.kernels.tuning import core, products
from meshlm.kernels.tuning.core import PLAIN, Case, Run, Setting
from meshlm.kernels.tuning.products import ProductBench


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    tables.forget(all_of_it=True)
    yield
    tables.forget(all_of_it=True)


def made_up(times: list[float]) -> Callable[[Run, list[Tensor]], products.Timer]:
    """Timers with one of these times each, in the order in which they are begun."""
    left = iter(times)

    def begin(run: Run, weights: list[Tensor]) -> products.Timer:
        assert len(weights) > 1
        time = next(left)
        return lambda: time

    return begin


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many programs as an interpreter can run."""
    monkeypatch.setattr(pdl, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(products, "FEW", 2)
    monkeypatch.setattr(products, "WEIGHT_BYTES", 1)


SETTING = Setting(torch.device("cpu"), torch.float16, 8192)


@pytest.mark.parametrize(
    "case",
    [Case("gemv", (16, 64, True), 1), Case("gemv", (32, 64, False), 1), Case("gemv", (96, 64, False), 1)],
    ids=["gate", "product", "product behind a norm"],
)
@pytest.mark.usefixtures("small")
def test_candidates_that_compute_the_same_are_timed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = [(2, 1, 2, 1), (4, 1, 2, 1)]
    monkeypatch.setattr(gemv_op, "tiles", lambda *_: tiles)
    times = measured(ProductBench(SETTING, made_up([9.0, 7.2, 7.0])), case)
    assert times == {PLAIN: 9.0, tiles[0]: 7.2, tiles[1]: 7.0}
    assert core.fastest(times) == tiles[1]


@pytest.mark.parametrize(("key", "normed"), [((16, 64, True), True), ((64, 64, False), False), ((96, 64, False), True)])
@pytest.mark.usefixtures("small")
def test_one_row_is_measured_with_the_norm_that_is_in_front(
    key: tuple[int, int, bool], normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up, query, key and value: not what has no more outputs than inputs."""
    given, usual = list[bool](), gemv.gemv

    def noted(*arguments: Any, **options: Any) -> Any:
        given.append(options.get("norm") is not None)
        return usual(*arguments, **options)

    monkeypatch.setattr(gemv, "gemv", noted)
    monkeypatch.setattr(gemv_op, "tiles", lambda *_: [(2, 1, 2, 1)])
    measured(ProductBench(SETTING, made_up([9.0, 7.2])), Case("gemv", key, 1))
    assert set(given) == {normed}


@pytest.mark.parametrize("use", ["product", "parts", "gate"])
@pytest.mark.usefixtures("small")
def test_small_products_are_verified_with_the_kernel_behind_them(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = small_m_gemm.Shape(16, 32, 64, 2 if use == "parts" else 1, 4, 3)
    monkeypatch.setattr(small_m_op, "shapes", lambda *_: [shape])
    key = (64, 128, use)
    assert measured(ProductBench(SETTING, made_up([9.0, 5.0])), Case("small_m_gemm", key, 8)) == {
        PLAIN: 9.0,
        shape: 5.0,
    }


@pytest.mark.parametrize(
    "kind", ["zeros, groups of 128", "symmetric, groups of 32", "minima, groups of 32", "zeros, groups of 256"]
)
@pytest.mark.usefixtures("small")
def test_few_rows_of_packed_weights_beside_the_usual_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_few, "packed_few", on_torch(packed_few).packed_few)
    times = measured(ProductBench(SETTING, made_up([9.0, 7.2, 7.0])), Case("packed_few", (48, 512, kind), 3))
    assert times == {PLAIN: 9.0, (1, 1, 4): 7.2, (1, 1, 1): 7.0}


@pytest.mark.usefixtures("small")
def test_what_computes_something_else_cannot_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast: it is not even timed. The same for what cannot be launched, and for NaN."""
    shapes = [small_m_gemm.Shape(16, 32, 64, 1, warps, 3) for warps in (1, 2, 4, 8)]
    monkeypatch.setattr(small_m_op, "shapes", lambda *_: shapes)

    def broken(x: Tensor, w: Tensor, shape: small_m_gemm.Shape, use: str) -> Tensor:
        right = x @ w.t()
        if shape.warps == 1:
            return right * 1.1
        if shape.warps == 2:
            return torch.full_like(right, torch.nan)
        if shape.warps == 4:
            raise ValueError("out of resource: shared memory")
        return right

    monkeypatch.setattr(small_m_gemm, "small_m_gemm", broken)
    monkeypatch.setattr(products, "_compile", lambda *_: None)
    times = measured(ProductBench(SETTING, made_up([9.0, 5.0])), Case("small_m_gemm", (64, 128, "product"), 8))
    assert times == {PLAIN: 9.0, shapes[3]: 5.0}


@pytest.mark.usefixtures("small")
def test_those_far_behind_leave_after_the_first_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [small_m_gemm.Shape(16, 32, 64, 1, warps, 3) for warps in (1, 2)]
    monkeypatch.setattr(small_m_op, "shapes", lambda *_: shapes)
    monkeypatch.setattr(small_m_gemm, "small_m_gemm", lambda x, w, shape, use: x @ w.t())
    monkeypatch.setattr(products, "_compile", lambda *_: None)
    times = measured(ProductBench(SETTING, made_up([9.0, 5.0, 8.0])), Case("small_m_gemm", (64, 128, "product"), 8))
    assert times == {PLAIN: 9.0, shapes[0]: 5.0}


@pytest.mark.usefixtures("small")
def test_a_candidate_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is compiled, launched or captured; without the plain way nothing is said of the size."""
    shapes = [small_m_gemm.Shape(16, 32, 64, 1, warps, 3) for warps in (1, 2)]
    monkeypatch.setattr(small_m_op, "shapes", lambda *_: shapes)

    def some(x: Tensor, w: Tensor, shape: small_m_gemm.Shape, use: str) -> Tensor:
        if shape.warps == 1:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return x @ w.t()

    monkeypatch.setattr(small_m_gemm, "small_m_gemm", some)
    case = Case("small_m_gemm", (64, 128, "product"), 8)
    assert measured(ProductBench(SETTING, made_up([9.0, 5.0])), case) == {PLAIN: 9.0, shapes[1]: 5.0}

    def begin(run: Run, weights: list[Tensor]) -> products.Timer:
        raise OutOfResources(300_000, 232_448, "shared memory")

    assert measured(ProductBench(SETTING, begin), case) == {}
    assert core.fastest({}) == PLAIN


def test_nothing_is_tried_that_there_is_no_kernel_for() -> None:
    assert ProductBench(SETTING._replace(dtype=torch.float32)).sizes("gemv", (64, 64, False)) == []
    bench = ProductBench(SETTING._replace(max_rows=100))
    assert bench.sizes("gemm", (64, 64)) == []  # no library here
    assert bench.sizes("small_m_gemm", (64, 64, "gate")) == [8, 16, 32, 64]
    assert bench.sizes("gate_up_silu", (64, 64)) == []


@pytest.mark.parametrize("full", [False, True])
def test_candidates_of_real_sizes(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Mistral Nemo, whose sizes no table has: a few where time is short, all of them else, and all of them fit."""
    monkeypatch.setattr(pdl, "multiprocessors", lambda device: 132)
    most = None if full else products.FEW
    tiles = gemv_op.tiles(14336, 5120, True, most)
    assert tiles[0] == gemv.shape_of(14336, 5120, True)
    assert len(tiles) <= products.FEW + 1 or full
    for use, outputs, inputs in (("parts", 5120, 4096), ("parts", 5120, 14336), ("product", 6144, 5120)):
        for rows in products.ALL_SIZES["small_m_gemm"]:
            shapes = small_m_op.shapes(Case("small_m_gemm", (outputs, inputs, use), rows), SETTING.device, most)
            assert shapes
            assert len(shapes) <= products.FEW or full
            assert all(shape.fits(outputs, inputs) for shape in shapes)
