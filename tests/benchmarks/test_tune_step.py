"""What benchmarks/tune_step.py tries next and what it writes into the tables (no GPU: nothing is timed)."""

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from meshlm.kernels import tables
from meshlm.kernels.attention import tiles
from meshlm.kernels.gemv import kernel as gemv
from meshlm.kernels.grouped_gemm.plan import Layer

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tune_step.py"
GPU = {"name": "NVIDIA New 7", "capability": [9, 0], "multiprocessors": 114}
MADE_BY = {"gpu": GPU, "torch": "1", "triton": "1"}
ALONE = {"splits_from": 32, "longest_to": 8192, "block_n": 16, "warps": 1, "stages": 2}
USUAL = {"block_n": 64, "warps": 2, "stages": 2}
QKV, GATE = (4096, 1024, False, ""), (3072, 1024, True, "")
OUT = (4096, 1024, False, "sends")  # of one of several ranks


@pytest.fixture(scope="module")
def tune_step() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tune_step", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module, path = importlib.util.module_from_spec(spec), list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


class Kept:
    """The tables of a GPU, in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, decode: list[dict[str, Any]], in_steps: list[Any]) -> None:
        gemv = {"most_bytes": 9, "tiles": [{"tile": [1, 4, 2, 1]}], "in_steps": in_steps}
        attention = {"programs_per_multiprocessor": 4.0, "decode": decode, "prefill": [{"rows": 64}]}
        self.of: dict[str, dict[str, Any]] = {"gemv": {**MADE_BY, **gemv}, "attention": {**MADE_BY, **attention}}
        monkeypatch.setattr(tables, "own", self.of.get)
        monkeypatch.setattr(tables, "write", self.write)

    def write(self, op: str, values: dict[str, Any]) -> None:
        assert not MADE_BY.keys() & values.keys()
        self.of[op] = {**MADE_BY, **values}


def test_it_is_asked_as_the_tables_are(tune_step: ModuleType) -> None:
    """Its choice stands in the place of kernels/gemv's own."""
    asked, usual = (inspect.signature(one).parameters for one in (tune_step.Step._shape_of, gemv.shape_of))
    assert [*asked.values()][1:] == [*usual.values()]


class Sizes:
    """Stands for a step whose time is the sum of its tiles' rows; each look takes a minute."""

    def __init__(self) -> None:
        self.start = {QKV: (8, 4, 3, 2), GATE: (8, 4, 3, 2)}
        self.now = 0.0

    def timed(self, choices: list[dict[Any, tuple[int, ...]]]) -> list[float]:
        self.now += 60
        return [float(sum(tile[0] for tile in one.values())) for one in choices]


def test_it_ends_in_time_with_what_it_has(tune_step: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Sizes()
    monkeypatch.setattr(tune_step.time, "monotonic", lambda: step.now)
    chosen, report = tune_step.descend(step, 9, 180)
    assert [chosen[name][0] for name in (QKV, GATE)] == [2, 4]
    assert len(report) == 3
    chosen, report = tune_step.descend(Sizes(), 9)
    assert [chosen[name][0] for name in (QKV, GATE)] == [1, 1]
    assert len(report) == 8  # the last pass found nothing


def test_neighbours_of_a_tile_of_attention(tune_step: ModuleType) -> None:
    """The parts of a context are the table's; the smallest tile has no smaller one."""
    assert tune_step.near_decode((32, 16, 1, 2)) == [
        (16, 16, 1, 2), (32, 16, 1, 3), (32, 16, 2, 2), (32, 32, 1, 2), (32, 32, 2, 2),
    ]  # fmt: skip
    near = tune_step.near_decode((16, 64, 4, 3))
    assert {parts for parts, *_ in near} == {8, 16, 32}
    assert (16, 64, 4, 3) not in near
    assert {(16, 128, 4, 3), (16, 32, 4, 3), (16, 64, 8, 3), (16, 64, 4, 2), (16, 64, 4, 4)} <= {*near}


def test_what_is_chosen_is_added_to_the_tables(tune_step: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sizes and groups stay; the same ones are replaced; the smallest group that fits comes first."""
    other = {"outputs": 8192, "inputs": 1024, "gate": False, "tile": [1, 1, 2, 1]}
    same = {"outputs": 4096, "inputs": 1024, "gate": False, "tile": [1, 1, 2, 1]}
    groups = [{**ALONE, "group_to": 2}, {**ALONE, "group_to": 8, "warps": 4}]
    kept = Kept(monkeypatch, [*groups, ALONE, USUAL], [same, other])
    tune_step.write({tune_step.DECODE: (32, 32, 2, 3), QKV: (4, 1, 4, 16), GATE: (1, 1, 3, 8)}, 4)
    assert kept.of["gemv"]["in_steps"] == [
        {"outputs": 3072, "inputs": 1024, "gate": True, "tile": [1, 1, 3, 8]},
        {"outputs": 4096, "inputs": 1024, "gate": False, "tile": [4, 1, 4, 16]},
        other,
    ]
    assert kept.of["gemv"]["tiles"] == [{"tile": [1, 4, 2, 1]}]
    mine = {**ALONE, "block_n": 32, "warps": 2, "stages": 3, "group_to": 4}
    assert kept.of["attention"]["decode"] == [groups[0], mine, groups[1], ALONE, USUAL]
    tune_step.write({tune_step.DECODE: (32, 16, 1, 2)}, 4)
    assert kept.of["attention"]["decode"] == [groups[0], {**ALONE, "group_to": 4}, groups[1], ALONE, USUAL]
    tune_step.write({tune_step.DECODE: (32, 64, 4, 2)}, 2, dim=256)
    large = {**ALONE, "block_n": 64, "warps": 4, "group_to": 2, "dim_from": 256}
    assert kept.of["attention"]["decode"] == [large, groups[0], {**ALONE, "group_to": 4}, groups[1], ALONE, USUAL]
    assert kept.of["attention"]["prefill"] == [{"rows": 64}]


def test_what_one_of_several_ranks_chose(tune_step: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products of the same sizes are others: they send or receive. Attention keeps what a lone GPU chose."""
    alone = {"outputs": 4096, "inputs": 1024, "gate": False, "tile": [1, 1, 2, 1]}
    kept = Kept(monkeypatch, [ALONE, USUAL], [alone])
    tune_step.write({OUT: (2, 4, 4, 2)}, 4)
    tune_step.write({OUT: (2, 4, 3, 2)}, 4)
    sends = {"outputs": 4096, "inputs": 1024, "gate": False, "way": "sends", "tile": [2, 4, 3, 2]}
    assert kept.of["gemv"]["in_steps"] == [alone, sends]
    assert kept.of["attention"]["decode"] == [ALONE, USUAL]


def test_it_is_of_use_to_the_step_that_was_timed(tune_step: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with many kv heads has few parts: an entry from 32 on would never be met."""
    kept = Kept(monkeypatch, [ALONE, USUAL], [])
    tune_step.write({tune_step.DECODE: (16, 32, 2, 2)}, 1)
    found = kept.of["attention"]["decode"][0]
    assert (found["splits_from"], found["longest_to"], found["group_to"], found["block_n"]) == (16, 8192, 1, 32)
    assert kept.of["attention"]["decode"][1:] == [ALONE, USUAL]


def test_fewer_parts_than_usual(tune_step: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry is met by the splits that there would be, and says how many there are."""
    kept = Kept(monkeypatch, [ALONE, USUAL], [])
    tune_step.write({tune_step.DECODE: (8, 32, 4, 2)}, 8, None, 32)
    mine = {**ALONE, "splits_to": 8, "block_n": 32, "warps": 4, "group_to": 8}
    assert kept.of["attention"]["decode"] == [mine, ALONE, USUAL]
    monkeypatch.setattr(tiles, "_table", lambda: (4.0, kept.of["attention"]["decode"], []))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert tiles.decode_tiles(4, 4096, torch.device("cuda"), 8) == (8, 32, 4, 2)
    assert tiles.decode_tiles(4, 4096, torch.device("cuda"), 16) == (32, 16, 1, 2)


def test_experts_of_one_row(tune_step: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the table has for more rows stays."""
    layer = Layer(128, 8, 2048, 768)
    kept = Kept(monkeypatch, [ALONE, USUAL], [])
    few = [1, 2, "few", [32, 128, 4, 5], [32, 64, 4, 3]]
    old = {**layer._asdict(), "rows": [[0, 1, "one", [1, 4, 3, 4], [4, 4, 3, 4]], few]}
    kept.of["grouped_gemm"] = {**MADE_BY, "layers": [old]}
    monkeypatch.setattr(tables, "write", lambda op, values, folder=None: kept.write(op, values))
    tune_step.write({"expert gate": (1, 1, 3, 8), "expert down": (2, 8, 3, 4)}, 8, layer)
    rows = kept.of["grouped_gemm"]["layers"][0]["rows"]
    assert rows == [[0, 1, "one", [1, 1, 3, 8], [2, 8, 3, 4]], few]
    near = tune_step.near_down((4, 4, 3, 4))
    assert {(2, 4, 3, 4), (8, 4, 3, 4), (4, 2, 3, 4), (4, 8, 3, 4)} <= {*near}
    assert (4, 4, 3, 4) not in near
    assert {tile[2:] for tile in near} == {(3, 4)}


def test_a_table_without_an_entry_for_lone_requests(tune_step: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of few multiprocessors."""
    kept = Kept(monkeypatch, [USUAL], [])
    tune_step.write({tune_step.DECODE: (8, 32, 2, 2)}, 4)
    mine = {"splits_from": 8, "longest_to": 8192, "block_n": 32, "warps": 2, "stages": 2, "group_to": 4}
    assert kept.of["attention"]["decode"] == [mine, USUAL]


def test_contexts_in_one_part_say_nothing_of_lone_requests(
    tune_step: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(monkeypatch, [ALONE, USUAL], [])
    tune_step.write({tune_step.DECODE: (1, 32, 2, 2), QKV: (4, 1, 4, 16)}, 1)
    assert kept.of["attention"]["decode"] == [ALONE, USUAL]
    assert len(kept.of["gemv"]["in_steps"]) == 1


def test_a_gpu_without_tables_is_told_what_to_run_first(
    tune_step: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table with nothing but these entries would keep every later start from finding the rest."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU["name"])
    monkeypatch.setattr(sys, "argv", ["tune_step.py", "model"])
    with pytest.raises(SystemExit) as ended:
        tune_step.main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "no table of this GPU for gemv, attention: run python -P -m meshlm.kernels.gemv.tune" in told
