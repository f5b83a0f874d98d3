"""The adapters that a worker holds: as many as it may, those of its rows in any case, and none that was dropped."""

import numpy as np
import pytest
import torch
from cpu_steps import new

from meshlm.protocol.adapters import Adapter
from meshlm.protocol.edges.step import RowFailed
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import ModelFilesError
from meshlm.workers.lora.adapter_rows import AdapterRows
from meshlm.workers.lora.weights import LoadedAdapter
from meshlm.workers.rows.columns import RowColumns
from meshlm.workers.rows.step_columns import StepColumns, columns_of

ROWS = 6


def adapter(name: str) -> Adapter:
    return Adapter(name, f"/{name}", name.encode() * 32)


class Worker:
    """`read` are the adapters that were read, in order; `gone` those whose files are others now."""

    def __init__(self, slots: int, kept: int) -> None:
        self.read: list[str] = []
        self.gone: set[str] = set()
        self.columns = RowColumns(ROWS)
        self.measured: list[str] = []
        device = torch.device("cpu")
        self.rows = AdapterRows(self._load, self.columns, device, slots, kept, self._measure)

    def _load(self, wanted: Adapter) -> LoadedAdapter:
        self.read.append(wanted.name)
        if wanted.name in self.gone:
            raise ModelFilesError(f"{wanted.path}: gone")
        return LoadedAdapter(wanted, {})

    def _measure(self, loaded: LoadedAdapter) -> None:
        self.measured.append(loaded.adapter.name)

    def add(self, row: int, name: str) -> None:
        row_of = new(row, [1], SamplingParams())
        row_of = type(row_of)(row_of.row, row_of.token_ids, 1, row_of.block_ids, row_of.sampling, (adapter(name),))
        self.rows.add_row(row_of)
        self.columns.set(row, row_of.sampling, **self.rows.columns_of(row_of))

    def remove(self, row: int) -> None:
        self.rows.remove_row(row)
        self.columns.set(row, SamplingParams())

    @property
    def held(self) -> set[str]:
        """Those that take memory."""
        in_slots = {one.adapter.name for one in self.rows._slots if one is not None}
        return in_slots | {one.adapter.name for one in self.rows._held.values()}


def step(*counts: int) -> StepColumns:
    return columns_of(
        np.arange(len(counts), dtype=np.int32), np.zeros(len(counts), np.int32), np.array(counts, np.int32)
    )


def test_tokens_of_a_step_by_their_rows_adapters() -> None:
    worker = Worker(slots=2, kept=2)
    worker.add(0, "a")
    worker.add(2, "b")
    worker.add(3, "a")
    found = worker.rows.of_step(step(1, 2, 3, 1))
    assert found is not None
    places = [None if group.tokens is None else group.tokens.tolist() for group in found.groups]
    assert places == [[0, 6], [3, 4, 5]]
    assert worker.read == ["a", "b"]
    alone = worker.rows.of_step(columns_of(*(np.array([at], np.int32) for at in (2, 0, 4))))
    assert alone is not None
    assert alone.groups[0].tokens is None, "all of the step's tokens"
    for row in (0, 2, 3):
        worker.remove(row)
    assert worker.rows.of_step(step(1, 2, 3, 1)) is None


def test_it_keeps_those_that_were_used_last_and_those_of_its_rows() -> None:
    worker = Worker(slots=2, kept=2)
    worker.add(0, "a")
    for name in "bcd":
        assert worker.rows.prepare(adapter(name)) is None
    assert worker.held == {"a", "c", "d"}
    worker.remove(0)
    assert worker.held == {"c", "d"}
    worker.add(0, "d")
    worker.add(1, "c")
    worker.remove(0)
    worker.add(0, "a")
    assert worker.read == ["a", "b", "c", "d", "a"], "what is held is not read again"
    assert worker.held == {"a", "c"}


def test_one_that_is_dropped_is_gone_with_its_last_row() -> None:
    worker = Worker(slots=2, kept=4)
    worker.add(0, "a")
    worker.add(1, "a")
    worker.rows.prepare(adapter("b"))
    for name in "ab":
        worker.rows.drop(adapter(name).digest)
    worker.remove(0)
    assert worker.held == {"a"}
    worker.remove(1)
    assert worker.held == set()


def test_those_that_are_held_are_measured_against_other_weights() -> None:
    worker = Worker(slots=1, kept=1)
    worker.add(0, "a")
    worker.rows.prepare(adapter("b"))
    worker.rows.weights_changed()
    assert sorted(worker.measured) == ["a", "b"], "that of a row, and that which is kept"


def test_what_is_read_while_weights_change_is_read_again() -> None:
    worker = Worker(slots=1, kept=1)
    load = worker.rows._load

    def slow(wanted: Adapter) -> LoadedAdapter:
        if not worker.read:
            worker.rows.weights_changed()
        return load(wanted)

    worker.rows._load = slow
    worker.rows.prepare(adapter("a"))
    assert worker.read == ["a", "a"]


def test_what_cannot_be_read_is_said_of_the_field_that_names_it() -> None:
    worker = Worker(slots=1, kept=1)
    worker.gone = {"a"}
    failed = RowFailed("/a: gone", ErrorKind.INVALID, "model")
    assert worker.rows.prepare(adapter("a")) == failed
    worker.add(1, "a")  # it was read, and forgotten since
    worker.add(0, "b")
    told = worker.rows.for_step(step(1, 2))
    assert told is not None
    assert told.findings().failed == {1: failed}
    found = worker.rows.of_step(step(1, 2))
    assert found is not None
    assert len(found.groups) == 1
    worker.remove(1)
    assert worker.rows.for_step(step(1, 2)) is None


def test_a_row_for_which_there_is_no_slot_is_the_schedulers_mistake() -> None:
    worker = Worker(slots=1, kept=1)
    worker.add(0, "a")
    with pytest.raises(AssertionError, match="more adapters than there are slots"):
        worker.add(1, "b")
