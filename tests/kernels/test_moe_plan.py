"""Which kernels and tiles experts get: plans without a measurement, candidates of the tuner, entries of its table."""

import json
from typing import NamedTuple, cast

import pytest
import torch
import triton
from device import MARKS

from meshlm.kernels import tables
from meshlm.kernels.grouped_gemm import plan
from meshlm.kernels.grouped_gemm.kernel import Shape as Many
from meshlm.kernels.grouped_gemm.kernel import has_apart
from meshlm.kernels.grouped_gemm.plan import Layer, Plan
from meshlm.kernels.moe_few.kernel import MOST_ROWS
from meshlm.kernels.moe_few.kernel import Shape as Few
from meshlm.kernels.moe_gemv.kernel import Shape as One

pytestmark = MARKS
QWEN3, MIXTRAL = Layer(128, 8, 2048, 768), Layer(8, 2, 4096, 14336)


def test_a_layer_is_a_key_of_a_table() -> None:
    """Before a format, which packed weights have."""
    assert tables.KEYS[-1 - len(Layer._fields) : -1] == Layer._fields


@pytest.mark.parametrize("layer", [QWEN3, MIXTRAL, Layer(4, 2, 64, 32)])
def test_a_plan_for_any_number_of_rows(layer: Layer) -> None:
    for rows in (1, 2, 16, 17, 64, 65, 100, 1000, 16384):
        found = plan.usual_plan(rows, layer)
        assert rows <= MOST_ROWS or found.kind == "many"
        assert isinstance(found.gate, plan.SHAPES[found.kind])
        assert isinstance(found.down, plan.SHAPES[found.kind])
        if isinstance(found.gate, Many) and isinstance(found.down, Many):
            assert found.gate.block_m == found.down.block_m, "rows are sorted once for both"
    assert plan.usual_plan(1, MIXTRAL).kind == "few", "a row of 14,336 is too long for one program"
    assert [plan.usual_plan(rows, QWEN3).kind for rows in (16, 17, 64)] == ["few", "many", "many"], "as it was measured"
    assert plan.usual_plan(64, MIXTRAL).kind == "few", "each expert is read once"


@pytest.mark.parametrize(
    ("hidden", "gate"), [(1536, One(1, 1, 2, 8)), (2048, One(1, 1, 2, 8)), (4096, One(2, 4, 3, 2))]
)
def test_a_row_s_lines_have_room(hidden: int, gate: One) -> None:
    assert plan.usual_plan(1, Layer(64, 6, hidden, 512)).gate == gate


def test_entries_of_a_table_are_read_as_they_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {
        1: Plan("one", One(2, 4), One(4, 4)),
        8: Plan("few", Few(32, 128, 4, 3), Few(64, 64, 4, 5)),
        64: Plan("many", Many(16, 64, 128, 4, 3), Many(16, 128, 128, 4, 3, True, 2)),
    }
    choices = [[before, to, *plans[to]] for before, to in zip([0, *plans], plans, strict=False)]
    table = {"layers": [{**QWEN3._asdict(), "rows": json.loads(json.dumps(choices))}]}
    monkeypatch.setattr(tables, "alike", lambda op: table)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plan._table.cache_clear()
    plan.plan_for.cache_clear()
    try:
        for rows, wanted in ((1, plans[1]), (2, plans[8]), (8, plans[8]), (9, plans[64]), (64, plans[64])):
            assert plan.plan_for(rows, QWEN3) == wanted
        assert plan.plan_for(65, QWEN3) == plan.usual_plan(65, QWEN3)
        assert plan.plan_for(8, MIXTRAL) == plan.usual_plan(8, MIXTRAL)
    finally:
        plan._table.cache_clear()
        plan.plan_for.cache_clear()


def test_warm_rows_meet_every_variant() -> None:
    """Of few rows a kernel differs by the height of its tile and by whether a program belongs to an entry."""
    found = plan.warm_rows(QWEN3, 8192)
    assert {1, 2, 17, 33, 65} <= found
    assert max(found) <= 8192
    assert plan.warm_rows(QWEN3, 1) == {1}


def test_tiles_of_warps_apart_are_for_what_they_were_checked_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights get the tiles that are taken without a measurement, and warm those up."""
    apart = Many(128, 128, 64, 4, 4, apart=True)
    table = {"layers": [{**QWEN3._asdict(), "rows": [[0, 4096, "many", list(apart), list(apart)]]}]}
    monkeypatch.setattr(tables, "alike", lambda op: table)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plan._table.cache_clear()
    plan.plan_for.cache_clear()
    try:
        assert plan.plan_for(1000, QWEN3) == Plan("many", apart, apart)
        assert plan.plan_for(1000, QWEN3, apart=False) == plan.usual_plan(1000, QWEN3)
        warm = {plan.plan_for(rows, QWEN3, apart=False) for rows in plan.warm_rows(QWEN3, 4096, apart=False)}
        assert warm == {plan.usual_plan(rows, QWEN3) for rows in range(1, 4097)}
    finally:
        plan._table.cache_clear()
        plan.plan_for.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "version", "capability", "has"),
    [
        (torch.bfloat16, "3.6.0", 9, True),
        (torch.bfloat16, "3.9.0", 9, False),
        (torch.float16, "3.6.0", 9, False),
        (torch.bfloat16, "3.6.0", 10, False),
    ],
)
def test_warps_apart_are_used_where_they_were_checked(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, version: str, capability: int, has: bool
) -> None:
    class Weight(NamedTuple):
        dtype: torch.dtype
        device: str = "cuda"
        is_cuda: bool = True

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setattr(triton, "__version__", version)
    assert has_apart(cast(torch.Tensor, Weight(dtype))) is has
