"""Tables of measured constants: whose are used, and what the tuner makes of its times."""

import json
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshlm.kernels import tables
from meshlm.kernels.attention import table as attention_table
from meshlm.kernels.attention import tiles
from meshlm.kernels.gemv import kernel as gemv
from meshlm.kernels.gemv import table as gemv_table
from meshlm.kernels.tuning import measure_tables

OPS = ["attention", "gemv"]
H200 = {"name": "NVIDIA H200", "capability": [9, 0], "multiprocessors": 132}
INPUTS = (64, 1024, 3072, 4096, 5120, 8192, 12288, 14336, 16384, 18944)
MINE = {"name": "NVIDIA New 7", "capability": [9, 0], "multiprocessors": 114}


def _clear() -> None:
    for cached in (
        tables.read,
        tiles._table,
        tiles.hopper_from,
        gemv.most_bytes,
        gemv.shape_of,
        gemv.shared_bytes,
        gemv._lost,
    ):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    _clear()
    yield
    _clear()


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


def test_a_gpu_with_the_same_processor_has_its_table(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An H100 SXM is an H200 with other memory: what was measured of products and tiles counts for both, and nothing is said."""
    another_gpu(monkeypatch, {**H200, "name": "NVIDIA H100 80GB HBM3"}, 227 << 10)
    with caplog.at_level(logging.WARNING):
        assert tables.read("gemv") == tables._load(tables.FOLDER / "gemv" / "tables" / "nvidia_h200.json")
    assert not caplog.records
    assert tables.products("gemm")
    assert tables.alike("grouped_gemm")
    assert tables.own("grouped_gemm") is None
    assert tiles.hopper_from(128) < float("inf")


def test_hopper_s_attention_is_for_windows_that_are_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    another_gpu(monkeypatch, H200, 227 << 10)
    assert tiles.hopper_from(64) == float("inf"), "measured, and slower"
    assert tiles.hopper_from(128, 1024) == float("inf")
    assert tiles.hopper_from(256, 512) == float("inf")
    assert tiles.hopper_from(256, 1024) == tiles.hopper_from(256) < tiles.hopper_from(128)


def test_a_smaller_processor_has_hopper_s_attention_and_no_other_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    another_gpu(monkeypatch, MINE, 227 << 10)
    assert tables.products("gemm") == {}
    assert tables.alike("grouped_gemm") is None
    assert tiles.hopper_from(128) < float("inf")
    ada = {"name": "L40", "capability": [8, 9], "multiprocessors": 114}
    another_gpu(monkeypatch, ada, 99 << 10)
    for cached in (tables.read, tiles.hopper_from):
        cached.cache_clear()
    assert tiles.hopper_from(128) == float("inf")


def another_gpu(monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], shared: int) -> None:
    properties = SimpleNamespace(
        multi_processor_count=facts["multiprocessors"],
        shared_memory_per_block_optin=shared,
        shared_memory_per_block=48 << 10,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: facts["name"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(tables, "this_gpu", lambda: facts)


def test_what_whole_steps_have_chosen_is_for_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There kernels overlap as nowhere else; elsewhere the tiles that are the best alone."""
    in_steps = {"outputs": 64, "inputs": 32, "gate": False, "tile": [8, 1, 4, 16]}
    sends = {**in_steps, "way": "sends", "tile": [4, 1, 3, 8]}
    of_gemv = {"gpu": H200, "tiles": [{"tile": [1, 4, 2, 1]}], "in_steps": [sends, in_steps]}
    usual = {"block_n": 64, "warps": 2, "stages": 2}
    of_attention = {"gpu": H200, "programs_per_multiprocessor": 4.0, "prefill": [], "decode": []}
    of_attention["decode"] = [
        {**usual, "block_n": 32, "group_to": 4, "dim_from": 256},
        {**usual, "block_n": 16, "group_to": 4},
        usual,
    ]
    monkeypatch.setattr(tables, "read", {"gemv": of_gemv, "attention": of_attention}.__getitem__)
    for facts, tile, block_n in ((H200, (8, 1, 4, 16), 16), (MINE, (1, 4, 2, 1), 64)):
        another_gpu(monkeypatch, facts, 227 << 10)
        gemv.shape_of.cache_clear()
        tiles._table.cache_clear()
        assert gemv.shape_of(64, 32, False) == tile
        assert gemv.shape_of(64, 32, False, "sends")[1:] == ((1, 3, 8) if facts is H200 else (4, 2, 1))
        assert tiles.decode_tiles(8, 512, torch.device("cuda", 0), 4)[1] == block_n
        assert tiles.decode_tiles(8, 512, torch.device("cuda", 0), 4, 256)[1] == (32 if facts is H200 else 64)


def test_what_a_table_has_no_tile_for_cublas_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {"outputs": 64, "inputs": 32, "gate": True, "tile": []}
    of_gemv = {"gpu": H200, "most_bytes": 1 << 20, "tiles": [{"tile": [1, 4, 2, 1]}], "in_steps": [lost]}
    monkeypatch.setattr(tables, "read", {"gemv": of_gemv}.__getitem__)
    for facts, pays in ((H200, False), (MINE, True)):
        another_gpu(monkeypatch, facts, 227 << 10)
        for cached in (gemv.most_bytes, gemv._lost, gemv.shape_of):
            cached.cache_clear()
        assert gemv.pays(torch.empty(128, 32), 1) == pays
        assert gemv.pays(torch.empty(64, 32), 1)
        assert gemv.shape_of(64, 32, True) == (1, 4, 2, 1)


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
def test_tiles_of_a_large_gpu_fit_a_small_one(monkeypatch: pytest.MonkeyPatch, shared: int) -> None:
    """One that is compiled but has no room ends a start. On an H200 nothing is cut but for streams that no tuner has seen."""
    table = tables._load(tables.FOLDER / "gemv" / "tables" / "nvidia_h200.json")
    known = [entry["tile"] for entry in table["tiles"] + table["in_steps"]]
    another_gpu(monkeypatch, MINE if shared < 227 << 10 else H200, shared)
    shapes = [
        (way, outputs, inputs) for way in ("", "sends", "receives") for outputs in (1024, 10**5) for inputs in INPUTS
    ]
    for way, outputs, inputs in shapes:
        for gate in (False, True) if way != "sends" else (False,):
            if inputs > 16384 and (gate or way):
                continue  # no model is so wide, and no rank has so much of a layer
            block_n, warps, stages, programs = gemv.shape_of(outputs, inputs, gate, way)
            lines = block_n * (2 if gate or way == "sends" else 1)
            held = sum(gemv.parts_of(inputs, gemv.fold_of(warps, 2), way))
            assert held >= inputs
            assert lines * held * 2 * (stages - 1) < shared
            if shared == 227 << 10 and (inputs <= 8192 or not (gate or way)):
                assert [block_n, warps, stages, programs] in known


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
    table = attention_table.decode_table(times)
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
    few, many = attention_table.prefill_table(times)
    assert (few["work_to"], few["rows"], many["rows"]) == (200, 64, 128)
    assert "work_to" not in many


def test_the_tuner_of_gemv() -> None:
    a, b = (1, 4, 2, 1), (4, 8, 3, 2)
    gate, plain, large = (64, 512, True, True), (64, 512, False, True), (9000, 14336, False, False)
    entries = gemv_table.tiles({gate: {a: 1.0, b: 2.0}, plain: {a: 2.0, b: 1.0}, large: {a: 2.0, b: 1.0}})
    assert entries == [
        {"inputs_to": 1024, "gate": True, "tile": list(a)},
        {"inputs_to": 1024, "tile": list(b)},
        {"tile": list(b)},
    ]
    assert gemv_table.most_bytes({10: True, 20: True, 40: False, 80: False}) == 30
    assert gemv_table.most_bytes({10: True}) == 15


def run_tuner(
    monkeypatch: pytest.MonkeyPatch, op: str, times: dict[str, Any], known: dict[str, Any] | None, folder: Path
) -> dict[str, Any]:
    """The table that is written for these times of each record."""
    monkeypatch.setattr(tables, "own", lambda op: known)
    monkeypatch.setattr(tables, "this_gpu", lambda: MINE)
    monkeypatch.setattr(measure_tables, "times", lambda record: times[record.name])
    monkeypatch.setattr(sys, "argv", ["measure_tables", op, "--folder", str(folder)])
    measure_tables.main()
    (path,) = folder.iterdir()
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize(
    "known", [None, {}, {"in_steps": [{"outputs": 8, "inputs": 4, "gate": True, "tile": [1, 1, 2, 1]}]}]
)
def test_the_tuner_of_gemv_keeps_what_steps_have_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, known: dict[str, Any] | None
) -> None:
    a = (1, 4, 2, 1)
    monkeypatch.setattr(gemv_table, "by_cublas", lambda case: 2.0)
    times: dict[str, Any] = {"gemv": {(64, 512, False, True): {a: 1.0}}, "gemv_of_a_part": {}}
    found = run_tuner(monkeypatch, "gemv", times, known, tmp_path)
    assert found["in_steps"] == (known or {}).get("in_steps", [])
    assert found["tiles"][-1]["tile"] == list(a)


def test_hopper_s_kernel_is_for_the_work_from_which_on_it_always_wins() -> None:
    def case(n: int, tokens: int) -> tuple[int, int, int, tuple[int, int, int]]:
        return n * tokens * 32, n, tokens, (32, 8, 128)

    tile = (64, (64, 4, 3))
    times = {case(1, 1024): {tile: 31.0}, case(8, 1024): {tile: 220.0}, case(1, 8192): {tile: 1061.0}}
    on_hopper = {case(1, 1024): 33.0, case(8, 1024): 189.0, case(1, 8192): 884.0}
    assert attention_table.hopper_table(times, on_hopper) == {"hopper_from": {"128": 32 * 8 * 1024 * 1024 // 2}}
    on_hopper[case(1, 8192)] = 1100.0
    assert attention_table.hopper_table(times, on_hopper) == {"hopper_from": {}}
    assert attention_table.hopper_table(times, {}) == {"hopper_from": {}}


@pytest.mark.parametrize("groups", [[], [2, 4]])
def test_the_tuner_of_attention_keeps_what_steps_have_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, groups: list[int]
) -> None:
    """In front: the first entry that fits is used."""
    tile = (64, 2, 2)
    of_groups = [{"splits_from": 32, "block_n": 16, "warps": 1, "stages": 2, "group_to": group} for group in groups]
    known = {"decode": [*of_groups, {"block_n": 128, "warps": 8, "stages": 2}]} if groups else None
    heads = (32, 8, 128)
    times = {
        "decode": {(64, 1024, heads): {(2.0, tile): 1.0}},
        "prefill": {(1, 512, heads): {(64, (64, 4, 3)): 1.0, (128, (64, 4, 3)): 2.0}},
        "prefill_by_hopper": {(1, 512, heads): {(): math.inf}},
    }
    found = run_tuner(monkeypatch, "attention", times, known, tmp_path)
    assert found["decode"] == [*of_groups, {"block_n": 64, "warps": 2, "stages": 2}]
    assert {"96", "128", "256"} <= found["hopper_from"].keys(), "heads that were not measured now are as before"
    assert found["hopper_windows"] == {"256": 1024}
