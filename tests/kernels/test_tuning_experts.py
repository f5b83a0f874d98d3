"""What the tuner of a start tries for a layer of experts: plans that others were measured to want, which must give what the usual one
gives; in Triton's interpreter, with made-up times."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from device import MARKS
from gluon_on_torch import on_torch
from measured import measured

from meshlm.kernels import tables
from meshlm.kernels.grouped_gemm import op as experts
from meshlm.kernels.grouped_gemm import plan
from meshlm.kernels.grouped_gemm.kernel import Shape as Many
from meshlm.kernels.grouped_gemm.plan import Layer, Plan
from meshlm.kernels.moe_few.kernel import MOST_ROWS
from meshlm.kernels.moe_few.kernel import Shape as Few
from meshlm.kernels.moe_gemv.kernel import Shape as One
from meshlm.kernels.packed_experts import direct, runs
from meshlm.kernels.packed_experts import kernel as packed_experts
from meshlm.kernels.packed_experts import plan as packed_plan
from meshlm.kernels.packed_experts.layout import ExpertWeight, unpack
from meshlm.kernels.tuning import core, products
from meshlm.kernels.tuning.core import PLAIN, Case, Run, Setting
from meshlm.kernels.tuning.products import ProductBench

pytestmark = MARKS
if torch.cuda.is_available():
    pytest.skip("by the interpreter", allow_module_level=True)

CPU, TINY, GRANITE = torch.device("cpu"), Layer(5, 2, 32, 16), Layer(64, 6, 1536, 512)
PLANS = [
    Plan("one", One(1, 1, 2, 8), One(4, 4)),
    Plan("few", Few(32, 128, 4, 5), Few(64, 128, 4, 3)),
    Plan("many", Many(64, 128, 64, 8, 3, True, 1, 2), Many(64, 256, 64, 8, 4, False, 2, 3)),
    Plan("many", Many(128, 128, 64, 4, 3, apart=True), Many(128, 128, 64, 4, 4, apart=True)),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    tables.forget(all_of_it=True)
    yield
    tables.forget(all_of_it=True)


@pytest.mark.parametrize("one", PLANS)
def test_a_plan_is_numbers_in_a_table(one: Plan) -> None:
    numbers = plan.encoded(one)
    assert plan.decoded(list(numbers)) == one
    assert len(numbers) == 19
    assert all(type(number) is int for number in numbers)


@pytest.mark.parametrize("rows", experts.ALL_SIZES)
@pytest.mark.parametrize("layer", [TINY, GRANITE, Layer(8, 2, 4096, 14336)])
def test_candidates_are_few_and_take_the_rows(layer: Layer, rows: int) -> None:
    usual, *others = experts.candidates(layer, rows, most=6)
    assert usual == plan.usual_plan(rows, layer)
    assert 0 < len(others) <= 6
    assert len({usual, *others}) == 1 + len(others)
    for each in others:
        assert each.kind != "one" or rows == 1
        assert each.kind != "few" or rows <= MOST_ROWS


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not more rows than steps have, not on a rank with fewer experts than a token chooses, not in other types, not without room."""
    bench = ProductBench(Setting(CPU, torch.bfloat16, 256))
    assert bench.sizes("grouped_gemm", tuple(GRANITE)) == [1, 64, 16, 256]
    full = ProductBench(Setting(CPU, torch.bfloat16, 8192, full=True))
    assert full.sizes("grouped_gemm", tuple(GRANITE)) == experts.ALL_SIZES
    assert bench.sizes("grouped_gemm", (4, 6, 1536, 512)) == []
    assert ProductBench(Setting(CPU, torch.float16, 256)).sizes("grouped_gemm", tuple(GRANITE)) == []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (500 << 20, 80 << 30))
    assert experts.sizes(GRANITE, torch.device("cuda", 0), full=False) == []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 << 30, 80 << 30))
    assert experts.sizes(GRANITE, torch.device("cuda", 0), full=False) == experts.SIZES


@pytest.mark.parametrize("rows", [1, 5, 130])
def test_every_kind_computes_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles of small layers: what gives something else would not be timed."""
    few = Plan("few", Few(16, 16, 4, 2), Few(16, 16, 4, 2))
    many = Plan("many", Many(16, 16, 16, 4, 2, programs=2), Many(16, 16, 16, 4, 2, programs=2))
    one = Plan("one", One(2, 4, 2, 2), One(4, 4))
    others = [few, many] if rows > 1 else [one, few, many]
    tried = [each for each in others if each.kind != "few" or rows <= MOST_ROWS]
    monkeypatch.setattr(experts, "candidates", lambda layer, rows, most: [tried[-1], *tried])
    monkeypatch.setattr(experts, "BYTES_AT_ONCE", 1)

    def begin(run: Run, weights: list[Tensor]) -> products.Timer:
        return lambda: 10.0

    times = measured(ProductBench(Setting(CPU, torch.float32, 8192), begin), Case("grouped_gemm", tuple(TINY), rows))
    assert set(times) == {PLAIN, *map(plan.encoded, tried)}


@pytest.mark.parametrize("rows", [5, 130])
def test_a_plan_that_computes_something_else_is_not_timed(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all plans write their results to the same place."""
    usual, other = (
        Plan("many", Many(16, block_n, 16, 4, 2, programs=2), Many(16, 16, 16, 4, 2, programs=2))
        for block_n in (16, 32)
    )
    monkeypatch.setattr(experts, "candidates", lambda layer, rows, most: [usual, other])
    monkeypatch.setattr(experts, "BYTES_AT_ONCE", 1)
    right = experts.Experts.run
    monkeypatch.setattr(experts.Experts, "run", lambda self, one: right(self, one).mul_(1.1 if one == other else 1.0))
    bench = ProductBench(Setting(CPU, torch.float32, 8192), lambda run, weights: lambda: 10.0)
    assert measured(bench, Case("grouped_gemm", tuple(TINY), rows)) == {PLAIN: 10.0}


def test_what_was_found_is_used_and_a_table_of_the_tree_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    qwen3 = Layer(128, 8, 2048, 768)
    assert plan.plan_for(64, GRANITE) == plan.usual_plan(64, GRANITE)
    assert tables.unmeasured() == [("grouped_gemm", tuple(GRANITE))]
    plan.plan_for(64, qwen3, one_row=False)
    assert len(tables.unmeasured()) == 1, "experts with an epilogue are not measured"
    found = {1: plan.encoded(PLANS[0]), 64: plan.encoded(PLANS[1]), 1024: PLAIN}
    tables.add([("grouped_gemm", core.entry_of("grouped_gemm", tuple(GRANITE), found))])
    assert [plan.plan_for(rows, GRANITE) for rows in (1, 33, 64)] == [PLANS[0], PLANS[1], PLANS[1]]
    assert plan.plan_for(32, GRANITE) == plan.usual_plan(32, GRANITE), "measured with twice as many at most"
    assert plan.plan_for(1024, GRANITE) == plan.usual_plan(1024, GRANITE)
    tree = {"layers": [{**GRANITE._asdict(), "rows": [[0, 8192, "many", list(PLANS[2].gate), list(PLANS[2].down)]]}]}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tables, "alike", lambda op: tree)
    tables.forget()
    assert plan.plan_for(64, GRANITE) == PLANS[2]
    assert tables.unmeasured() == []


MXFP4 = Layer(3, 2, 64, 32)


@pytest.mark.parametrize("rows", [1, 9, 40])
def test_mxfp4_experts_beside_the_usual_kernels(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no products of bfloat16, so both are computed alike here."""
    theirs, shape = on_torch(direct), packed_plan.DirectShape(2, 2)
    monkeypatch.setattr(direct, "few", theirs.few)
    monkeypatch.setattr(direct, "sorted_rows", theirs.sorted_rows)

    def few(x: Tensor, w: ExpertWeight, experts: Tensor, weights: Tensor | None, out: Tensor, *given: Any) -> Tensor:
        return theirs.few(x, w, experts, weights, out, shape, given[-1])  # type: ignore[no-any-return]

    def sorted_rows(x: Tensor, w: ExpertWeight, out: Tensor, own: Any, rows: Any, **given: Any) -> Tensor:
        return theirs.sorted_rows(x, w, out, shape, own.block_m, rows, **given)  # type: ignore[no-any-return]

    monkeypatch.setattr(packed_experts, "few", few)
    monkeypatch.setattr(packed_experts, "sorted_rows", sorted_rows)
    monkeypatch.setattr(runs, "BYTES_AT_ONCE", 1)
    monkeypatch.setattr(products, "FEW", 2)
    times = iter([9.0, 7.2, 7.0])

    def begin(run: Run, weights: list[Tensor]) -> products.Timer:
        time = next(times)
        return lambda: time

    case = Case("packed_experts", (*MXFP4, "mxfp4"), rows)
    found = measured(ProductBench(Setting(CPU, torch.bfloat16, 8192), begin), case)
    first, second = packed_plan.candidates(rows, MXFP4, "mxfp4")[:2]
    assert found == {PLAIN: 9.0, first: 7.2, second: 7.0}


def test_sizes_of_mxfp4_experts() -> None:
    bench = ProductBench(Setting(CPU, torch.bfloat16, 100))
    assert bench.sizes("packed_experts", (*MXFP4, "mxfp4")) == [1, 64, 16, 4]
    assert bench.sizes("packed_experts", (2, 4, 64, 32, "mxfp4")) == [], "a rank's experts"
    assert ProductBench(Setting(CPU, torch.float16, 100)).sizes("packed_experts", (*MXFP4, "mxfp4")) == []
    assert (
        max(ProductBench(Setting(CPU, torch.bfloat16, 8192, full=True)).sizes("packed_experts", (*MXFP4, "mxfp4")))
        == 512
    )
    many = ProductBench(Setting(CPU, torch.bfloat16, 8192))
    assert many.sizes("packed_experts_many", (32, 4, 2880, 2880, "mxfp4")) == [8192, 2048]
    assert many.sizes("packed_experts_many", (128, 4, 2880, 2880, "mxfp4")) == [8192], (
        "with fewer an expert has hardly any"
    )
    assert (
        ProductBench(Setting(CPU, torch.float16, 8192)).sizes("packed_experts_many", (32, 4, 2880, 2880, "mxfp4")) == []
    )


def test_random_mxfp4_weights_have_nothing_behind_the_last_input() -> None:
    values = unpack(runs.random_weight(2, 3, 360, CPU)._replace(inputs=384), torch.float32)
    assert not values[..., 360:].any()
    assert (values[..., :360] != 0).float().mean() > 0.8
