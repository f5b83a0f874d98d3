"""The tuner of a start: its bound, what may win, what it keeps on disk; times are made up, kernels run in Triton's interpreter."""

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from meshlm.kernels import tables
from meshlm.kernels.gate_up_silu import kernel as gate_up_silu
from meshlm.kernels.gemm import kernel as gemm
from meshlm.kernels.gemv import kernel as gemv
from meshlm.kernels.small_m_gemm import kernel as small_m_gemm
from meshlm.kernels.tuning import commit, core
from meshlm.kernels.tuning.core import PLAIN, Case, Config, Work
from meshlm.kernels.tuning.store import Store

MADE_BY = {
    "gpu": {"name": "NVIDIA New 7", "capability": [9, 0], "multiprocessors": 114},
    "torch": "2.11",
    "triton": "3.6",
    "kernels": "abc",
}
A, B = (66, 20, 1, 0, 0, 0, 35, 0, 3, 0), (66, 201, 1, 0, 0, 3, 35, 0, 5, 0)  # algorithms of cuBLAS
QKV, DOWN = ("gemm", (6144, 4096)), ("gemm", (4096, 14336))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    tables.forget(all_of_it=True)
    yield
    tables.forget(all_of_it=True)


class Clock:
    """A clock that moves when somebody works."""

    def __init__(self, bound_s: float) -> None:
        self.now, self.bound_s = 0.0, bound_s

    def left(self) -> float:
        return self.bound_s - self.now


class FakeBench:
    """Each case has some pieces of work, which take as long as they say or longer."""

    def __init__(self, clock: Clock, pieces: list[float], late: float = 0.0, sizes: tuple[int, ...] = (16, 32)) -> None:
        self.clock, self.pieces, self.late, self._sizes = clock, pieces, late, list(sizes)
        self.measured: list[Case] = []

    def sizes(self, op: str, key: tuple[Any, ...]) -> list[int]:
        return self._sizes

    def measure(self, case: Case) -> Work:
        for piece in self.pieces:
            yield piece
            self.clock.now += piece + self.late
        self.measured.append(case)
        return {PLAIN: 10.0, A: 5.0}


def run(bench: FakeBench, asked: list[tuple[str, tuple[Any, ...]]]) -> dict[Any, tables.Table]:
    kept: dict[Any, tables.Table] = {}

    def keep(op: str, entry: tables.Table) -> None:
        kept[op, tables.key_of(entry)] = entry

    run.outcome = core.tune(asked, bench, lambda op, key: kept.get((op, key)), keep, bench.clock.left)  # type: ignore[attr-defined]
    return kept


@given(st.floats(0, 12), st.lists(st.floats(0.001, 3), min_size=1, max_size=6), st.floats(0, 0.5), st.integers(1, 12))
def test_the_time_is_bounded(bound_s: float, pieces: list[float], late: float, shapes: int) -> None:
    """Nothing is begun that would end behind the bound; a piece that takes longer than it said costs that much more, once."""
    clock = Clock(bound_s)
    bench = FakeBench(clock, pieces, late)
    asked = [("gemm", (64 * nth, 64)) for nth in range(1, shapes + 1)]
    kept = run(bench, asked)
    assert clock.now <= bound_s + late + 1e-9
    measured = sum(len(entry["measured"]) for entry in kept.values())
    assert measured == len(bench.measured)
    outcome: core.Outcome = run.outcome  # type: ignore[attr-defined]
    assert sum(outcome) == shapes
    assert outcome.done == sum(len(entry["measured"]) == 2 for entry in kept.values())


def test_what_there_was_no_time_for_is_measured_at_the_next_start() -> None:
    kept: dict[Any, tables.Table] = {}
    found = []
    for _ in range(9):
        bench = FakeBench(Clock(3.5), [0.5, 0.5])

        def keep(op: str, entry: tables.Table) -> None:
            kept[op, tables.key_of(entry)] = entry

        outcome = core.tune([DOWN, QKV], bench, lambda op, key: kept.get((op, key)), keep, bench.clock.left)
        found += bench.measured
        if not outcome.left:
            break
    assert outcome == (2, 0)
    assert len(found) == len(set(found)) == 4  # none twice
    assert kept[QKV]["rows"] == [[13, 16, list(A)], [27, 32, list(A)]]


def test_a_size_whose_plain_way_could_not_be_timed_is_not_known() -> None:
    """It is no win of the plain way: the kernels stay as they are, and the next start asks again."""

    class Failing(FakeBench):
        def measure(self, case: Case) -> Work:
            yield from super().measure(case)
            return {} if case.rows == 16 else {PLAIN: 10.0, A: 5.0}

    kept = run(Failing(Clock(9), [0.1]), [QKV])
    assert core.choices_of(kept[QKV]) == {32: A}
    outcome: core.Outcome = run.outcome  # type: ignore[attr-defined]
    assert outcome == (0, 1)
    assert run(Failing(Clock(9), [0.1], sizes=(16,)), [QKV]) == {}


def test_the_plain_way_wins_ties() -> None:
    assert core.fastest({PLAIN: 10.0, A: 10.0, B: 11.0}) == PLAIN
    assert core.fastest({PLAIN: 10.0, A: 9.9}) == PLAIN  # no clear gain
    assert core.fastest({PLAIN: 10.0, A: 9.5, B: 9.0}) == B


@given(st.dictionaries(st.sampled_from([8, 16, 32, 64, 96, 1024]), st.sampled_from([PLAIN, A, B]), min_size=1))
def test_a_choice_is_for_the_rows_that_it_was_measured_with(choices: dict[int, Config]) -> None:
    """And for those between two sizes that have both won, where they are near; nothing is said of rows near a loss."""
    entry = core.entry_of("small_m_gemm", (64, 64, "product"), choices)
    rows = [(over, to, tuple(config)) for over, to, config in entry["rows"]]
    assert all(over < to for over, to, _ in rows)
    assert all(before[1] <= after[0] for before, after in pairwise(rows))
    assert {size: tables.for_rows(rows, size) or PLAIN for size in choices} == choices
    for over, to, _ in rows:
        assert to <= core.NEAR * over or over >= int(core.OPERATIONS["small_m_gemm"].down_to * to)
    assert core.choices_of(entry) == choices
    assert core.choices_of(json.loads(json.dumps(entry))) == choices


def test_an_algorithm_of_the_library_is_for_nearly_its_own_rows_alone() -> None:
    entry = core.entry_of("gemm", (64, 64), {32: A, 64: A})
    assert entry["rows"] == [[27, 32, list(A)], [54, 64, list(A)]]


def test_requests_of_one_come_first_then_the_largest_weights() -> None:
    asked = [("gemm", (64, 64)), ("attention", (8,)), ("gemm", (128, 64)), ("gemv", (8, 8, False))]
    assert core.in_order(asked) == [("gemv", (8, 8, False)), ("gemm", (128, 64)), ("gemm", (64, 64))]


# --- what was asked for, and what was added ---


def test_what_was_added_is_used_at_once() -> None:
    assert small_m_gemm.shape_for(16, 256, 128, "product") is None
    assert gate_up_silu.shape_for(1024, 512, 128) is None
    assert tables.unmeasured() == [("small_m_gemm", (256, 128, "product")), ("gate_up_silu", (512, 128))]
    shape, many = (16, 64, 64, 1, 4, 3), (128, 128, 64, 8, 4, True, 1)
    tables.add(
        [
            ("small_m_gemm", core.entry_of("small_m_gemm", (256, 128, "product"), {16: shape})),
            ("gate_up_silu", core.entry_of("gate_up_silu", (512, 128), {1024: many})),
        ]
    )
    assert small_m_gemm.shape_for(16, 256, 128, "product") == shape
    assert gate_up_silu.shape_for(1024, 512, 128) == many
    assert small_m_gemm.warm_rows() >= {16}
    assert gate_up_silu.warm_rows() >= {1024}
    assert tables.unmeasured()  # a part of the sizes may be known only: who measures asks for what is missing


def test_a_weight_with_which_cublas_is_faster_is_its() -> None:
    w, usual = torch.zeros(96, 64), gemv.shape_of(48, 64, True)
    assert gemv.pays(w, 1)
    tables.add([("gemv", core.entry_of("gemv", (48, 64, True), {1: PLAIN}))])
    assert not gemv.pays(w, 1)
    assert gemv.pays(torch.zeros(96, 128), 1)
    tables.add([("gemv", core.entry_of("gemv", (48, 64, True), {1: (2, 4, 2, 1)}))])
    assert gemv.pays(w, 1)
    assert gemv.shape_of(48, 64, True) == (2, 4, 2, 1) != usual


def test_a_table_of_the_tree_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own choices win over what was added, and only sizes that it lacks are measured."""
    tree = {"gpu": MADE_BY["gpu"], "products": [{"outputs": 256, "inputs": 128, "use": "gate", "rows": []}]}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tables, "alike", lambda op: tree if op == "small_m_gemm" else None)
    tables.add([("small_m_gemm", core.entry_of("small_m_gemm", (256, 128, "gate"), {16: (16, 64, 64, 1, 4, 3)}))])
    assert small_m_gemm.shape_for(16, 256, 128, "gate") is None
    assert small_m_gemm.shape_for(16, 512, 128, "gate") is None
    assert tables.unmeasured() == [("small_m_gemm", (512, 128, "gate"))]


# --- on disk ---


def store_in(folder: Path, said: list[str], **changed: Any) -> Store:
    return Store(folder, {**MADE_BY, **changed}, said.append)


def test_a_table_is_read_back(tmp_path: Path) -> None:
    said: list[str] = []
    entry = core.entry_of("gemm", (64, 64), {32: A, 64: PLAIN})
    other = core.entry_of("gemv", (64, 64, True), {1: (1, 4, 2, 1)})
    store = store_in(tmp_path, said)
    store.keep("gemm", core.entry_of("gemm", (64, 64), {32: B}))
    store.keep("gemm", entry)  # in the place of the first
    store.keep("gemv", other)
    assert store_in(tmp_path, said).load() == [("gemv", other), ("gemm", entry)]
    assert not said
    assert store.path("gemm") == tmp_path / "gemm" / "tables" / "nvidia_new_7.json"  # as in the tree


@pytest.mark.parametrize("op", core.OPERATIONS)
def test_choices_of_every_operation_are_read_back(op: str, tmp_path: Path) -> None:
    said: list[str] = []
    key = tuple("gate" if name == "use" else 64 for name in core.OPERATIONS[op].key)
    entry = core.entry_of(op, key, {1: tuple(range(core.OPERATIONS[op].num_config)), 64: PLAIN})
    store_in(tmp_path, said).keep(op, entry)
    assert store_in(tmp_path, said).load() == [(op, entry)]
    assert tables.key_of(entry) == key
    assert not said


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"torch": "2.12"}, "torch 2.11, not 2.12"),
        ({"kernels": "def"}, "kernels abc, not def"),
        ({"gpu": {**MADE_BY["gpu"], "multiprocessors": 132}}, "NVIDIA New 7"),  # type: ignore[dict-item]
    ],
)
def test_a_table_of_another_version_is_named_and_not_used(changed: dict[str, Any], named: str, tmp_path: Path) -> None:
    said: list[str] = []
    entry = core.entry_of("gemm", (64, 64), {32: A})
    store_in(tmp_path, said).keep("gemm", entry)
    newer = store_in(tmp_path, said, **changed)
    assert newer.load() == []
    (line,) = said
    assert named in line
    assert str(newer.path("gemm")) in line
    newer.keep("gemm", entry)
    said.clear()
    assert newer.load() == [("gemm", entry)]
    assert not said


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "\0\0\0",
        '{"products": 3}',
        '{"products": [{"outputs": 1}]}',
        '{"products": [{"outputs": 1, "inputs": 2, "measured": [], "rows": [[1, 2]]}]}',
        '{"products": [{"outputs": 1, "inputs": 2, "rows": [], "measured": [[1, ["x"]]]}]}',
        '{"products": [{"outputs": 1, "inputs": 2, "measured": [], "rows": [[1, 2, "abc"]]}]}',
        '{"products": [{"outputs": 1, "inputs": 2, "measured": [], "rows": [[1, 2, [3, 4]]]}]}',  # of another operation
        '{"products": [{"outputs": 1, "inputs": 2, "rows": [], "measured": [[1]]}]}',
    ],
)
def test_a_broken_table_is_refused_in_one_line_and_made_anew(text: str, tmp_path: Path) -> None:
    said: list[str] = []
    store = store_in(tmp_path, said)
    store.path("gemm").parent.mkdir(parents=True)
    store.path("gemm").write_text(text)
    assert store.load() == []
    (line,) = said
    assert "is not used, and made anew" in line
    assert "\n" not in line
    entry = core.entry_of("gemm", (64, 64), {32: A})
    store.keep("gemm", entry)
    assert store.load() == [("gemm", entry)]


def test_writers_at_once_do_not_tear_it(tmp_path: Path) -> None:
    """Each replaces the file as a whole: whoever reads meanwhile finds the one or the other."""
    said: list[str] = []
    store, other = store_in(tmp_path, said), store_in(tmp_path, said)
    pids = []
    for nth in range(4):
        pid = os.fork()
        if pid == 0:
            for turn in range(30):
                other.keep("gemm", core.entry_of("gemm", (64 * nth + 1, 64), {32: (turn, *A[1:])}))
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            store.load()
    assert not said
    assert store.load()
    assert [path.name for path in store.path("gemm").parent.iterdir()] == ["nvidia_new_7.json"]


def ends_within(store: Store) -> None:
    """A process that does not come back from a shape."""
    pid = os.fork()
    if pid == 0:
        with store.attempt("gemv", (64, 64, True)):
            os._exit(0)  # nothing is tidied up
    os.waitpid(pid, 0)


def test_a_shape_in_the_midst_of_which_two_processes_ended_is_not_tried_again(tmp_path: Path) -> None:
    """One may have been ended by its user."""
    said: list[str] = []
    store = store_in(tmp_path, said)
    with store.attempt("gemm", (64, 64)):
        assert list(tmp_path.glob("attempt-*"))
        ends_within(store)
    assert store.ended() == []
    assert not said
    ends_within(store)
    assert store.ended() == [("gemv", (64, 64, True))]
    assert "not tried again" in said[0]


def test_a_shape_that_a_process_comes_back_from_is_forgiven(tmp_path: Path) -> None:
    store = store_in(tmp_path, [])
    ends_within(store)
    with store.attempt("gemv", (64, 64, True)):
        pass
    ends_within(store)
    assert store.ended() == []


@pytest.mark.parametrize(
    ("error", "left"),
    [(RuntimeError("CUDA error: an illegal memory access was encountered"), 1), (RuntimeError("not supported"), 0)],
)
def test_a_shape_that_broke_the_gpu_is_not_tried_again(error: Exception, left: int, tmp_path: Path) -> None:
    """The worker ends, since nothing works any more; the one that follows leaves the shape alone."""
    store = store_in(tmp_path, [])
    with pytest.raises(RuntimeError), store.attempt("gemm", (64, 64)):
        raise error
    assert len(store.ended()) == left


# --- products, in the interpreter ---


def test_gemm_reads_what_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "library", lambda: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tables, "alike", lambda op: None)
    tables.add([("gemm", core.entry_of("gemm", (64, 64), {32: A}))])
    assert gemm._table() == {(64, 64): [gemm.Entry(27, 32, A)]}


def test_what_was_found_goes_into_the_trees_tables(tmp_path: Path) -> None:
    """For sizes that they lack; what they know stays as it is, and they are read as ever."""
    found, tree = store_in(tmp_path / "found", []), tmp_path / "tree"
    found.keep("gemm", core.entry_of("gemm", (64, 64), {32: A}))
    found.keep("gemm", core.entry_of("gemm", (128, 64), {32: A}))
    found.keep("gemv", core.entry_of("gemv", (64, 64, True), {1: (1, 4, 2, 1)}))
    found.keep("gemv", core.entry_of("gemv", (96, 64, True), {1: PLAIN}))
    name = "nvidia_new_7.json"
    for op, values in (
        ("gemm", {"products": [{"outputs": 64, "inputs": 64, "rows": [[1, 2, [9]]]}]}),
        ("gemv", {"most_bytes": 1, "tiles": [], "in_steps": [{"outputs": 1, "inputs": 2, "gate": False, "tile": [1]}]}),
    ):
        path = tree / op / "tables" / name
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({**MADE_BY, **values}))
    assert commit.commit(found.folder, tree) == [tree / op / "tables" / name for op in ("gemv", "gemm")]
    gemm_table = json.loads((tree / "gemm" / "tables" / name).read_text())
    assert tables.by_key(gemm_table["products"]) == {(64, 64): [[1, 2, [9]]], (128, 64): [[27, 32, list(A)]]}
    assert all(entry.keys() == {"outputs", "inputs", "rows"} for entry in gemm_table["products"])
    gemv_table = json.loads((tree / "gemv" / "tables" / name).read_text())
    new = {"outputs": 64, "inputs": 64, "gate": True, "tile": [1, 4, 2, 1]}
    lost = {"outputs": 96, "inputs": 64, "gate": True, "tile": []}
    assert gemv_table["in_steps"] == [{"outputs": 1, "inputs": 2, "gate": False, "tile": [1]}, new, lost]
    assert gemv_table["most_bytes"] == 1
