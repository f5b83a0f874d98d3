"""Gate and up projection with the gate in one kernel, against the unfused operations."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from device import DEVICE, DTYPES, MARKS, ON_GPU, near
from torch import Tensor

from meshlm.kernels import tables
from meshlm.kernels.gate_up_silu import kernel, reference, tune
from meshlm.kernels.gate_up_silu.kernel import Shape, gate_up_silu
from meshlm.kernels.gate_up_silu.tune import CANDIDATES

pytestmark = MARKS
SMALL = [Shape(16, 32, 16, 4, 3), Shape(32, 16, 32, 4, 3, True), Shape(16, 32, 16, 4, 3, False, 2)]
SHAPES = CANDIDATES if ON_GPU else SMALL
A, B = SMALL[:2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 32, 16), (33, 72, 56), (70, 256, 128), (300, 40, 64)])
def test_gated(rows: int, outputs: int, inputs: int, shape: Shape, dtype: torch.dtype) -> None:
    """300 rows: more tiles than there are programs in the interpreter. 72 columns: tiles end in the middle."""
    if ON_GPU and dtype == torch.float32:
        pytest.skip("these tiles are for 16 bits: twice as many bytes do not fit")
    x = torch.randn(rows, inputs, device=DEVICE, dtype=dtype)
    w = torch.randn(2 * outputs, inputs, device=DEVICE, dtype=dtype) / inputs**0.5
    near(gate_up_silu(x, w, shape), reference.gate_up_silu(x, w), dtype, 4.0)


@pytest.mark.skipif(not ON_GPU, reason="as many rows and inputs as these tiles are for")
@pytest.mark.parametrize("shape", CANDIDATES)
def test_gated_as_models_have_it(shape: Shape) -> None:
    x = torch.randn(1000, 2048, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(2 * 5632, 2048, device=DEVICE, dtype=torch.bfloat16) / 2048**0.5
    near(gate_up_silu(x, w, shape), reference.gate_up_silu(x, w), torch.bfloat16, 4.0)


def test_every_tile_is_taken_once() -> None:
    """No more programs than there are tiles, or than run at once."""
    assert A.grid(17, 64, torch.device("cpu")) == (4,)
    assert A.grid(1000, 64, torch.device("cpu")) == (8,)
    assert A._replace(programs=2).grid(1000, 64, torch.device("cpu")) == (16,)


def test_shapes_go_by_the_table_of_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"products": [{"outputs": 128, "inputs": 64, "rows": [[700, 1024, [128, 64, 64, 8, 3]]]}]}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for table, shape in ((found, Shape(128, 64, 64, 8, 3)), (None, None)):
        monkeypatch.setattr(tables, "alike", lambda op, table=table: table)
        kernel._table.cache_clear()
        kernel.shape_for.cache_clear()
        assert kernel.shape_for(701, 128, 64) == kernel.shape_for(1024, 128, 64) == shape
        assert kernel.shape_for(700, 128, 64) is kernel.shape_for(1025, 128, 64) is None
        assert kernel.shape_for(800, 64, 128) is None
        assert kernel.warm_rows() == ({1024} if table else set())
    kernel._table.cache_clear()
    kernel.shape_for.cache_clear()


def test_entries_of_a_table() -> None:
    """A first entry, and one after a size that is better unfused, begin at 0.85 of the rows; equal neighbours are one entry."""
    won: dict[Shape | None, float] = {None: 10.0, A: 9.0, B: 9.5}
    lost: dict[Shape | None, float] = {None: 10.0, A: 9.95, B: 11.0}
    other: dict[Shape | None, float] = {None: 10.0, A: 9.0, B: 8.5}
    times = {4096: won, 512: lost, 1024: won, 1536: won, 2048: other, 3072: lost}
    assert tune.entries(times) == [[870, 1536, list(A)], [1536, 2048, list(B)], [3481, 4096, list(A)]]
    assert tune.entries({512: lost}) == []


def test_candidates_that_compute_something_else_or_cannot_run_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd: dict[object, Callable[[Tensor, Tensor], object]] = {
        B: lambda x, w: reference.gate_up_silu(x, w) * 1.1,
        SMALL[2]: lambda x, w: 1 / 0,
    }
    monkeypatch.setattr(tune, "usual", reference.gate_up_silu)
    monkeypatch.setattr(tune, "gate_up_silu", lambda x, w, shape: odd.get(shape, reference.gate_up_silu)(x, w))
    assert tune.right(torch.randn(20, 32), torch.randn(96, 32) / 6, [A, B, SMALL[2]]) == [A]
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == ["wrong", "cannot run"]


def test_what_the_report_says() -> None:
    (line,) = tune.lines({512: {None: 10.0, A: 9.0}})
    assert json.loads(json.dumps(line)) == {
        "rows": 512, "usual_us": 10.0, "fused_us": 9.0, "shape": list(A), "all": [[list(A), 9.0]]
    }  # fmt: skip
    assert tune.lines({512: {None: 10.0}})[0]["shape"] is None


def test_a_gpus_first_table_makes_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables, "this_gpu", lambda: {"name": "A GPU"})
    path = tables.write("gate_up_silu", {"products": []}, tmp_path / "tables")
    assert SimpleNamespace(**json.loads(path.read_text())).products == []
