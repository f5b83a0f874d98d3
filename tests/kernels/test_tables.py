"""Tables of measured constants: whose are used, and what the tuner makes of its times."""

import json
import logging
from pathlib import Path

import pytest
import torch

from meshlm.kernels import tables
from meshlm.kernels.attention import tiles
from meshlm.kernels.attention import tune as attention_tune
from meshlm.kernels.gemv import kernel as gemv
from meshlm.kernels.gemv import tune as gemv_tune

OPS = ["attention", "gemv"]
H200 = {"name": "NVIDIA H200", "capability": [9, 0], "multiprocessors": 132}
MINE = {"name": "NVIDIA New 7", "capability": [9, 0], "multiprocessors": 114}


@pytest.fixture(autouse=True)
def fresh() -> None:
    for cached in (tables.read, tiles._table, gemv.most_bytes, gemv.shape_of):
        cached.cache_clear()


def test_names() -> None:
    assert tables.name_of("NVIDIA H100 80GB HBM3") == "nvidia_h100_80gb_hbm3"


@pytest.mark.parametrize("op", OPS)
def test_tables_in_the_tree_are_named_after_their_gpu(op: str) -> None:
    paths = list((tables.FOLDER / op / "tables").glob("*.json"))
    assert tables.FALLBACK in {path.stem for path in paths}
    for path in paths:
        assert tables.name_of(json.loads(path.read_text())["gpu"]["name"]) == path.stem


def test_nearest_is_of_the_same_capability_before_the_same_size() -> None:
    ada = {"name": "L40", "capability": [8, 9], "multiprocessors": 114}
    h100 = {"name": "H100", "capability": [9, 0], "multiprocessors": 114}
    assert tables.nearest({"nvidia_h200": H200, "ada": ada}, MINE) == "nvidia_h200"
    assert tables.nearest({"nvidia_h200": H200, "ada": ada, "h100": h100}, MINE) == "h100"
    assert tables.nearest({"a": H200, "nvidia_h200": H200}, MINE) == "nvidia_h200"


def test_a_gpu_without_a_table_runs_with_anothers_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: MINE["name"])
    monkeypatch.setattr(tables, "this_gpu", lambda: MINE)
    with caplog.at_level(logging.WARNING):
        assert tables.read("gemv")["gpu"]["name"]
        tables.read("gemv")
    (record,) = caplog.records
    assert "has no table for NVIDIA New 7" in record.message


@pytest.mark.parametrize(("work", "tile"), [(1, (64, 64, 4, 3)), (10**6, (64, 64, 4, 3))])
def test_prefill_tiles_of_the_fallback(
    monkeypatch: pytest.MonkeyPatch, work: int, tile: tuple[int, int, int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tiles.prefill_tiles(work) == tile


def test_every_gemv_shape_has_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for outputs in (1, 2048, 2049, 10**6):
        for inputs in (16, 1024, 1025, 10**6):
            for gate in (False, True):
                assert len(gemv.shape_of(outputs, inputs, gate)) == 4


def test_what_is_written_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables, "this_gpu", lambda: MINE)
    path = tables.write("gemv", {"most_bytes": 7}, tmp_path)
    assert path.name == "nvidia_new_7.json"
    assert json.loads(path.read_text())["most_bytes"] == 7


def test_the_tuner_weighs_all_cases() -> None:
    """Tile a wins one case narrowly, b another by far."""
    a, b = (16, 1, 2), (64, 2, 2)
    shape = (32, 8, 128)
    times = {
        (64, 1024, shape, 132): {(2.0, a): 10.0, (2.0, b): 10.5, (4.0, a): 9.0, (4.0, b): 9.5},
        (128, 1024, shape, 132): {(2.0, a): 30.0, (2.0, b): 20.0, (4.0, a): 30.0, (4.0, b): 19.0},
        (1, 4096, shape, 132): {(2.0, a): 1.0, (2.0, b): 2.0, (4.0, a): 1.0, (4.0, b): 2.0},
    }
    table = attention_tune.decode_table(times)
    assert table["programs_per_multiprocessor"] == 4.0
    lone, rest = table["decode"]
    assert (lone["block_n"], lone["splits_from"], lone["longest_to"]) == (16, 32, 8192)
    assert rest == {"block_n": 64, "warps": 2, "stages": 2}


def test_the_tuner_of_prompts_finds_the_edge() -> None:
    tile = (64, 4, 2)
    times = {
        (100, "x"): {(64, tile): 1.0, (128, tile): 2.0},
        (200, "x"): {(64, tile): 1.0, (128, tile): 1.5},
        (300, "x"): {(64, tile): 2.0, (128, tile): 1.0},
    }
    few, many = attention_tune.prefill_table(times)
    assert (few["work_to"], few["rows"], many["rows"]) == (200, 64, 128)
    assert "work_to" not in many


def test_the_tuner_of_gemv() -> None:
    a, b = (1, 4, 2, 1), (4, 8, 3, 2)
    gate, plain, large = (64, 512, True, True), (64, 512, False, True), (9000, 14336, False, False)
    entries = gemv_tune.tiles({gate: {a: 1.0, b: 2.0}, plain: {a: 2.0, b: 1.0}, large: {a: 2.0, b: 1.0}})
    assert entries == [
        {"inputs_to": 1024, "gate": True, "tile": list(a)},
        {"inputs_to": 1024, "tile": list(b)},
        {"tile": list(b)},
    ]
    assert gemv_tune.most_bytes({10: True, 20: True, 40: False, 80: False}) == 30
    assert gemv_tune.most_bytes({10: True}) == 15
