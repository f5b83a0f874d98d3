"""How experts with packed weights are computed for so many rows: by rules, and by what the tuner found."""

from collections.abc import Iterator

import pytest

from meshlm.kernels import tables
from meshlm.kernels.grouped_gemm.plan import Layer
from meshlm.kernels.packed_experts import layer as layers
from meshlm.kernels.packed_experts import plan
from meshlm.kernels.packed_experts.kernel import Shape as Tile
from meshlm.kernels.packed_experts.plan import DIRECT_ROWS, DirectShape
from meshlm.kernels.tuning import core

GPT_OSS = Layer(32, 4, 2880, 2880)
KEY = (*GPT_OSS, "mxfp4")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    tables.forget(all_of_it=True)
    yield
    tables.forget(all_of_it=True)


def test_the_rules_hold_until_something_faster_was_measured() -> None:
    for rows in (1, 16, 17, 100, 1000, 8192):
        assert plan.plan_for(rows, GPT_OSS, "mxfp4", direct=True) == plan.usual_plan(rows, GPT_OSS, "mxfp4")
    assert tables.unmeasured() == [("packed_experts", KEY), ("packed_experts_many", KEY)]
    choices: dict[int, core.Config] = {
        1: (0, 2, 4, 1, 1, 4, 3), 4: (), 16: (16, 2, 8, 1, 1, 8, 1), 64: (16, 4, 4, 1, 0, 0, 0), 256: (),
    }  # fmt: skip
    tables.add([("packed_experts", core.entry_of("packed_experts", KEY, choices))])
    found = {rows: plan.plan_for(rows, GPT_OSS, "mxfp4", direct=True) for rows in (1, 3, 16, 40, 200)}
    assert found[1].direct == plan.Direct(DirectShape(2, 4), DirectShape(1, 4, 3))
    assert found[1].kind == "few"
    assert found[3] == plan.usual_plan(3, GPT_OSS, "mxfp4")
    assert (found[16].kind, found[16].block_m) == ("many", 16)
    assert found[40].direct == plan.Direct(DirectShape(4, 4), None)
    assert found[40].down == plan.usual_plan(40, GPT_OSS, "mxfp4").down, "sorted in tiles of as many rows"
    assert found[200] == plan.usual_plan(200, GPT_OSS, "mxfp4")
    assert plan.plan_for(1, GPT_OSS, "mxfp4", direct=False) == plan.usual_plan(1, GPT_OSS, "mxfp4")
    assert plan.plan_for(1, GPT_OSS._replace(topk=2), "mxfp4", direct=True).direct is None


def test_many_rows_have_the_tiles_that_were_measured() -> None:
    """Down to half of the least number that was measured, and up to any."""
    tall = plan.candidates_of_many()[0]
    choices: dict[int, core.Config] = {2048: (), 8192: tall}
    tables.add([("packed_experts_many", core.entry_of("packed_experts_many", KEY, choices))])
    found = {
        rows: plan.plan_for(rows, GPT_OSS, "mxfp4", direct=True)
        for rows in (700, 2048, 4096, 4097, 8192, 16384, 50_000)
    }
    for rows in (700, 2048, 4096):
        assert found[rows] == plan.usual_plan(rows, GPT_OSS, "mxfp4")
    for rows in (4097, 8192, 16384, 50_000):
        assert found[rows] == plan.Plan("many", Tile(256, 64, 8, 3), Tile(256, 128, 8, 3))
        assert layers.num_rows(found[rows], rows, 4, 32) >= rows * 4
    tables.add([("packed_experts_many", core.entry_of("packed_experts_many", KEY, {2048: (), 8192: ()}))])
    assert plan.plan_for(50_000, GPT_OSS, "mxfp4", direct=True) == plan.usual_plan(50_000, GPT_OSS, "mxfp4")


@pytest.mark.parametrize("kind", ["mxfp4", "4 bits, groups of 128"])
@pytest.mark.parametrize("rows", [1, 4, 16, 64, 256, 512])
def test_candidates_take_the_rows(rows: int, kind: str) -> None:
    found = plan.candidates(rows, GPT_OSS, kind)
    assert len(found) == len(set(found)) >= 5
    for numbers in found:
        chosen = plan.decoded(numbers)
        assert chosen.kind == "many" or rows <= DIRECT_ROWS
        assert chosen.direct is not None
        assert layers.num_rows(chosen, rows, 4, 32) >= rows * 4


@pytest.mark.parametrize("direct", [False, True])
def test_rows_of_the_warm_up_meet_every_variant(direct: bool) -> None:
    if direct:
        choices: dict[int, core.Config] = {
            1: (0, 2, 4, 1, 1, 4, 1), 4: (0, 2, 8, 1, 1, 8, 1), 16: (16, 2, 8, 1, 1, 8, 1),
        }  # fmt: skip
        tables.add([("packed_experts", core.entry_of("packed_experts", KEY, choices))])
    warm = plan.warm_rows(GPT_OSS, 600, "mxfp4", direct=direct)
    plans = {plan.plan_for(rows, GPT_OSS, "mxfp4", direct=direct) for rows in range(1, 601)}
    assert {plan.plan_for(rows, GPT_OSS, "mxfp4", direct=direct) for rows in warm} == plans
    assert len(warm) < 30
    assert {1, 2} <= warm or not direct
