"""Gate and up projection with the gate in one kernel, against the unfused operations."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from device import DEVICE, DTYPES, MARKS, ON_GPU, near

from meshlm.kernels import tables
from meshlm.kernels.gate_up_silu import kernel, reference
from meshlm.kernels.gate_up_silu.kernel import Shape, gate_up_silu
from meshlm.kernels.gate_up_silu.op import CANDIDATES, SMALL

pytestmark = MARKS
A = SMALL[0]


@pytest.mark.skipif(not ON_GPU, reason="small tiles are those of the record")
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("shape", CANDIDATES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 32, 16), (33, 72, 56), (70, 256, 128), (300, 40, 64)])
def test_gated(rows: int, outputs: int, inputs: int, shape: Shape, dtype: torch.dtype) -> None:
    """300 rows: more tiles than there are programs in the interpreter. 72 columns: tiles end in the middle."""
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


@pytest.fixture
def nothing_added() -> Iterator[None]:
    """Workers of other tests in this process may have tuned themselves: what they found is beside every table."""
    tables.forget(all_of_it=True)
    yield
    tables.forget(all_of_it=True)


@pytest.mark.usefixtures("nothing_added")
def test_shapes_go_by_the_table_of_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"products": [{"outputs": 128, "inputs": 64, "rows": [[700, 1024, [128, 64, 64, 8, 3]]]}]}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for table, shape in ((found, Shape(128, 64, 64, 8, 3)), (None, None)):
        monkeypatch.setattr(tables, "alike", lambda op, table=table: table)
        tables.forget()
        assert kernel.shape_for(701, 128, 64) == kernel.shape_for(1024, 128, 64) == shape
        assert kernel.shape_for(700, 128, 64) is kernel.shape_for(1025, 128, 64) is None
        assert kernel.shape_for(800, 64, 128) is None
        assert kernel.warm_rows() == ({1024} if table else set())


def test_a_gpus_first_table_makes_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables, "this_gpu", lambda: {"name": "A GPU"})
    path = tables.write("gate_up_silu", {"products": []}, tmp_path / "tables")
    assert SimpleNamespace(**json.loads(path.read_text())).products == []
