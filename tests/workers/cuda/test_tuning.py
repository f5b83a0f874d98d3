"""A worker's tuner: what it uses, what it measures and for how long, and that ranks choose alike. Times are made up."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from triton.runtime.errors import OutOfResources, PTXASError

from meshlm.kernels import tables
from meshlm.kernels.gemv import kernel as gemv
from meshlm.kernels.small_m_gemm import kernel as small_m_gemm
from meshlm.kernels.tuning import core
from meshlm.kernels.tuning.core import PLAIN, Case, Work
from meshlm.kernels.tuning.store import Store
from meshlm.protocol.config import MeshConfig, WorkerConfig
from meshlm.workers.cuda import tuning
from meshlm.workers.cuda.tuning import QUICK_S, STEPS_S, Entries, Ranks, Tuner
from meshlm.workers.distributed.communicator import SINGLE_RANK, Communicator
from meshlm.workers.distributed.shard import WHOLE, Shard

MADE_BY = {"gpu": {"name": "NVIDIA New 7", "capability": [9, 0], "multiprocessors": 114}, "torch": "2.11"}
CPU = torch.device("cpu")
ALONE = Ranks(WHOLE, SINGLE_RANK, CPU, torch.bfloat16, 64)
SHAPE = (16, 64, 64, 1, 4, 3)
ENTRY = ("small_m_gemm", core.entry_of("small_m_gemm", (256, 128, "gate"), {16: SHAPE}))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    tables.forget(all_of_it=True)
    yield
    tables.forget(all_of_it=True)


class FakeBench:
    """One piece of work for each number of rows, which takes a second of its own clock."""

    def __init__(self, error: Exception | None = None) -> None:
        self.now, self.error = 0.0, error
        self.measured: list[Case] = []

    def sizes(self, op: str, key: tuple[Any, ...]) -> list[int]:
        return [8, 16]

    def measure(self, case: Case) -> Work:
        yield 1.0
        self.now += 1.0
        self.measured.append(case)
        if self.error:
            raise self.error
        return {PLAIN: 10.0, SHAPE: 5.0}


def report(*_: object) -> None:
    """Nobody looks."""


def ask(sizes: int) -> None:
    for nth in range(1, sizes + 1):
        small_m_gemm.shape_for(16, 256 * nth, 128, "gate")


def start(mode: str, folder: Path, sizes: int, bench: FakeBench) -> bool:
    """As a worker starts: what is kept, then the first step asks, then what is missing."""
    of_start = Tuner(mode, Store(folder, MADE_BY, print), ALONE, lambda: bench.now)
    of_start.use_kept()
    ask(sizes)
    return of_start.measure(bench, report)


def test_a_second_start_measures_nothing(tmp_path: Path) -> None:
    first, second = FakeBench(), FakeBench()
    assert start("quick", tmp_path, 1, first)
    assert small_m_gemm.shape_for(16, 256, 128, "gate") == SHAPE
    assert not start("quick", tmp_path, 1, second)
    assert (len(first.measured), second.measured) == (2, [])
    assert small_m_gemm.shape_for(16, 256, 128, "gate") == SHAPE


QKV, DOWN, LOST = (96, 64, False), (64, 160, False), (80, 64, False)


class Steps:
    """A step that takes as long as its tiles have programs, half a minute a look."""

    def __init__(self, error: Exception | None = None) -> None:
        self.now, self.error = 0.0, error
        self.used: list[dict[Any, Any]] = []

    def __call__(self, choices: list[Any], use: Any) -> list[float]:
        self.now += 30.0
        for choice in choices:
            use(choice)
            assert all(gemv.shape_of(*key) == tile for key, tile in choice.items()), "it is in use"
        self.used += choices
        if self.error:
            raise self.error
        return [float(sum(tile[3] for tile in choice.values())) for choice in choices]


def in_steps(folder: Path, timed: Steps, mode: str = "full", ranks: Ranks = ALONE) -> bool:
    """As a worker starts, whose first steps ask for the tiles of three sizes, of which cuBLAS had won one."""
    store = Store(folder, MADE_BY, print)
    of_start = Tuner(mode, store, ranks, lambda: timed.now)
    of_start.use_kept()
    tables.add([("gemv", core.entry_of("gemv", LOST, {1: PLAIN}))])
    for key in (QKV, DOWN, LOST):
        gemv.shape_of(*key)
    return of_start.measure_steps(timed)


def test_whole_steps_choose_one_row_s_tiles(tmp_path: Path) -> None:
    """Of those that have one; the choice is used, and kept for later starts."""
    usual = {key: gemv.shape_of(*key) for key in (QKV, DOWN)}
    assert min(tile[3] for tile in usual.values()) > 1
    timed = Steps()
    assert in_steps(tmp_path, timed)
    assert all(choice.keys() == {QKV, DOWN} for choice in timed.used)
    chosen = {key: gemv.shape_of(*key) for key in (QKV, DOWN)}
    assert all(chosen[key][3] < usual[key][3] for key in chosen)
    tables.forget(all_of_it=True)
    Tuner("quick", Store(tmp_path, MADE_BY, print), ALONE).use_kept()
    assert {key: gemv.shape_of(*key) for key in (QKV, DOWN)} == chosen
    assert not in_steps(tmp_path, Steps()), "a second time finds nothing more"
    assert not list(tmp_path.glob("attempt-*"))


def test_whole_steps_have_a_bound(tmp_path: Path) -> None:
    timed = Steps()
    in_steps(tmp_path, timed)
    assert timed.now <= STEPS_S


@pytest.mark.parametrize("mode", ["quick", "kept", "off"])
def test_only_full_tuning_measures_whole_steps(mode: str, tmp_path: Path) -> None:
    timed = Steps()
    assert not in_steps(tmp_path, timed, mode)
    assert not timed.used


def test_ranks_do_not_measure_whole_steps(tmp_path: Path) -> None:
    timed = Steps()
    assert not in_steps(tmp_path, timed, ranks=Ranks(Shard(tp_size=2), SINGLE_RANK, CPU, torch.bfloat16, 64))
    assert not timed.used


@pytest.mark.parametrize("error", [RuntimeError("no"), torch.OutOfMemoryError("none"), PTXASError("no")])
def test_whole_steps_that_fail_leave_the_tiles_as_they_were(error: Exception, tmp_path: Path) -> None:
    usual = {key: gemv.shape_of(*key) for key in (QKV, DOWN)}
    assert not in_steps(tmp_path, Steps(error))
    assert {key: gemv.shape_of(*key) for key in (QKV, DOWN)} == usual
    assert not Store(tmp_path, MADE_BY, print).load()


def test_whole_steps_that_ended_processes_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "ended", lambda store: [(tuning.ONE_ROW, tuning.STEPS)])
    timed = Steps()
    assert not in_steps(tmp_path, timed)
    assert not timed.used


def test_a_start_with_an_empty_cache_takes_no_longer_than_the_bound(tmp_path: Path) -> None:
    """What is left is measured by the starts that follow, each as long at most."""
    starts: list[FakeBench] = []
    while not starts or starts[-1].measured:
        starts.append(FakeBench())
        start("quick", tmp_path, 10, starts[-1])
    assert [bench.now for bench in starts] == [QUICK_S, QUICK_S, 4.0, 0.0]
    assert QUICK_S < 10
    assert all(small_m_gemm.shape_for(16, 256 * nth, 128, "gate") == SHAPE for nth in range(1, 11))


def test_full_measures_again_what_was_quick(tmp_path: Path) -> None:
    benches = [FakeBench() for _ in range(4)]
    for mode, bench in zip(("quick", "full", "full", "quick"), benches, strict=True):
        start(mode, tmp_path, 10, bench)
    assert [len(bench.measured) for bench in benches] == [8, 20, 0, 0]


@pytest.mark.parametrize(("mode", "used"), [("kept", SHAPE), ("off", None)])
def test_a_start_that_measures_nothing(mode: str, used: object, tmp_path: Path) -> None:
    Store(tmp_path, MADE_BY, print).keep(*ENTRY)
    bench = FakeBench()
    assert not start(mode, tmp_path, 2, bench)
    assert not bench.measured
    assert small_m_gemm.shape_for(16, 256, 128, "gate") == used


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("full"),
        RuntimeError("cublasLtCreate failed"),
        OutOfResources(300_000, 232_448, "shared memory"),  # Triton's are no RuntimeErrors
        PTXASError("ptxas died"),
        ValueError("a library of another version"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_cannot_be_measured_ends_no_start(error: Exception, tmp_path: Path) -> None:
    bench = FakeBench(error)
    assert not start("quick", tmp_path, 2, bench)
    assert len(bench.measured) == 1
    assert not list(tmp_path.glob("attempt-*"))
    again = FakeBench()
    assert start("quick", tmp_path, 2, again)


def test_where_nothing_can_be_kept_nothing_is_tuned(tmp_path: Path) -> None:
    """Else each start would take as long as the first, and might choose otherwise."""
    (tmp_path / "file").write_text("")
    bench = FakeBench()
    assert not start("quick", tmp_path / "file", 2, bench)
    assert not bench.measured


def test_a_shape_that_ended_two_processes_is_left_alone(tmp_path: Path) -> None:
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            with Store(tmp_path, MADE_BY, print).attempt("small_m_gemm", (256, 128, "gate")):
                os._exit(0)
        os.waitpid(pid, 0)
    bench = FakeBench()
    assert start("quick", tmp_path, 2, bench)
    assert {case.key for case in bench.measured} == {(512, 128, "gate")}


class TwoRanks(Communicator):
    """The first rank says something; then the second hears what it said."""

    said: list[Tensor]

    def __init__(self, said: list[Tensor]) -> None:
        self.said = said

    def all_reduce(self, x: Tensor) -> Tensor:
        self.said.append(x.clone())
        return x


class Hears(TwoRanks):
    def all_reduce(self, x: Tensor) -> Tensor:
        return x + self.said.pop(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_all_ranks_take_the_first_ones_choices(dtype: torch.dtype, count: int) -> None:
    found: Entries = [
        ("small_m_gemm", core.entry_of("small_m_gemm", (256 * nth, 128, "gate"), {16: SHAPE})) for nth in range(count)
    ]
    said: list[Tensor] = []
    shards = [Shard(tp_rank=rank, tp_size=2) for rank in range(2)]
    first = Ranks(shards[0], TwoRanks(said), CPU, dtype, 64)
    second = Ranks(shards[1], Hears(said), CPU, dtype, 64)
    assert first.shared(found) == found
    assert second.shared([ENTRY]) == found
    assert not said


def test_a_rank_that_is_not_the_first_measures_nothing(tmp_path: Path) -> None:
    said: list[Tensor] = []
    shards = [Shard(tp_rank=rank, tp_size=2) for rank in range(2)]
    bench = FakeBench()
    ask(1)
    with_store = Tuner(
        "quick", Store(tmp_path, MADE_BY, print), Ranks(shards[0], TwoRanks(said), CPU, torch.bfloat16, 64)
    )
    assert with_store.measure(bench, report)
    tables.forget(all_of_it=True)
    ask(1)
    other = FakeBench()
    assert Tuner("quick", None, Ranks(shards[1], Hears(said), CPU, torch.bfloat16, 64)).measure(other, report)
    assert not other.measured
    assert small_m_gemm.shape_for(16, 256, 128, "gate") == SHAPE


@pytest.mark.parametrize("modes", [("quick", "kept"), ("kept", "quick"), ("kept", "kept")])
def test_ranks_meet_also_where_one_was_started_again(modes: tuple[str, str], tmp_path: Path) -> None:
    """That one measures nothing, and yet takes part in what the ranks tell each other: none waits for another for ever."""
    said: list[Tensor] = []
    found = []
    for rank, (mode, comm) in enumerate(zip(modes, (TwoRanks(said), Hears(said)), strict=True)):
        tables.forget(all_of_it=True)
        ask(1)
        ranks = Ranks(Shard(tp_rank=rank, tp_size=2), comm, CPU, torch.bfloat16, 64)
        of_start = Tuner(mode, None if rank else Store(tmp_path, MADE_BY, print), ranks)
        found.append(of_start.measure(FakeBench(), report))
    assert found[0] == found[1] == (modes[0] == "quick")
    assert not said


def test_where_results_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By versions, unless the user names a folder; the header says which they are anyway."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tables, "this_gpu", lambda: MADE_BY["gpu"])
    usual = tuning.store_of(MeshConfig())
    assert usual is not None
    assert usual.folder.parent == tmp_path / "meshlm" / "tuning"
    assert torch.__version__ in usual.folder.name
    named = tuning.store_of(MeshConfig(worker=WorkerConfig(tuning_dir=str(tmp_path / "mine"))))
    assert named is not None
    assert named.path("gemm") == tmp_path / "mine" / "gemm" / "tables" / "nvidia_new_7.json"
