"""Logits processors beside the sampler: which rows they get, what they are told, and that others are as without them."""

import numpy as np
import pytest
import torch
from torch import Tensor

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row
from meshlm.runtime import logits_processors
from meshlm.runtime.errors import RequestError
from meshlm.runtime.logits_processors import ProcessorError
from meshlm.workers.output.logits_processor import BatchUpdate, LogitsBatch, LogitsProcessor
from meshlm.workers.output.processors import Processors
from meshlm.workers.output.sampler import SampleRows, sample
from meshlm.workers.rows.columns import ALWAYS
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.rows.extras.extra import RowExtras

VOCAB, ROWS, CPU = 20, 6, torch.device("cpu")


class Follow(LogitsProcessor):
    """The token after the last one, by `step` more."""

    def __init__(self, config: MeshConfig, device: torch.device, max_rows: int) -> None:
        self.steps = [0] * max_rows
        self.told: list[BatchUpdate | None] = []

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if not isinstance(params.extra_args.get("step", 0), int):
            raise ValueError("step must be a number")

    @classmethod
    def wants(cls, params: SamplingParams) -> bool:
        return "step" in params.extra_args

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.told.append(batch_update)
        for added in batch_update.added if batch_update else ():
            self.steps[added.row] = added.params.extra_args["step"]

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        last = batch.token_ids()[torch.arange(len(logits)), torch.from_numpy(batch.num_tokens - 1)].long()
        steps = torch.tensor([self.steps[row] for row in batch.rows.tolist()])
        return torch.full_like(logits, -torch.inf).scatter_(1, ((last + steps) % VOCAB)[:, None], 0.0)


class Sharper(Follow):
    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        return logits * 1000


class Wrong(Follow):
    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        return logits[:1]


def rows_of(*kinds: type[LogitsProcessor]) -> DeviceRows:
    rows = DeviceRows(ROWS, 40, 16, CPU)
    processors = Processors(kinds, MeshConfig(), CPU, ROWS)
    rows.table.columns.processors = processors.apply
    rows.table.extras = RowExtras((processors,), rows.table.num_rows)
    return rows


def plan(rows: DeviceRows, new: dict[int, tuple[list[int], SamplingParams]], removed: tuple[int, ...] = ()) -> None:
    """Rows come, with a prompt of two tokens, and go."""
    entries = [
        NewRow(Row(row), np.array(ids, np.int32).tobytes(), 2, np.zeros(1, np.int32).tobytes(), params)
        for row, (ids, params) in new.items()
    ]
    gone = np.array(removed, np.int32).tobytes()
    rows.changes(StepPlan(1, 1, b"", b"", b"", b"", 0, removed_rows=gone, new_rows=entries))  # type: ignore[arg-type]
    for row, (ids, _) in new.items():
        rows.tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)


def drawn(rows: DeviceRows, lens: dict[int, int]) -> list[int]:
    count = np.array(list(lens.values()), np.int64)
    at = SampleRows(np.array(list(lens), np.int32), count - 2, count, np.full(len(lens), 2))
    logits = torch.zeros(len(lens), VOCAB)
    logits[:, 3] = 1.0
    found: list[int] = sample(logits, at, rows.table.columns, rows.tokens).tolist()
    return found


def greedy(**extra: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, extra_args=extra)


def used(rows: DeviceRows) -> Follow:
    processor = rows.table.extras.kind(Processors)._used[0].processor
    assert isinstance(processor, Follow)
    return processor


def test_it_gets_the_rows_that_it_wants_and_their_tokens() -> None:
    rows = rows_of(Follow)
    plan(rows, {0: ([5, 6], greedy(step=2)), 1: ([5, 6], greedy()), 4: ([5, 6, 9], greedy(step=-1))})
    assert drawn(rows, {1: 2, 4: 3, 0: 2, ROWS: 2})[:3] == [3, 8, 8]  # and the row of padding
    assert rows.table.columns["by_torch_until"][[0, 1, 4]].tolist() == [ALWAYS, 0, ALWAYS]


def test_it_is_told_of_each_change_once_and_state_is_made_anew_from_tokens() -> None:
    rows = rows_of(Follow)
    plan(rows, {0: ([5, 6], greedy(step=1)), 2: ([1, 1], greedy(step=1))})
    drawn(rows, {0: 2})
    drawn(rows, {0: 2})
    plan(rows, {0: ([5, 6, 7], greedy(step=4))}, removed=(0, 2))  # preempted, and back with its token
    assert drawn(rows, {0: 3}) == [11]
    first, none, last = used(rows).told
    assert none is None
    assert first is not None
    assert last is not None
    assert [added.row for added in first.added] == [0, 2]
    assert last.removed == [0, 2]
    (again,) = last.added
    assert (again.row, again.prompt_token_ids.tolist(), again.output_token_ids.tolist()) == (0, [5, 6], [7])
    plan(rows, {3: ([1, 1], greedy(step=1))})
    plan(rows, {}, removed=(3,))  # it never heard of that one
    rows.reset()
    plan(rows, {0: ([1, 2], greedy(step=1))})
    drawn(rows, {0: 2})
    update = used(rows).told[-1]
    assert update is not None
    assert (update.removed, [added.row for added in update.added]) == ([0], [0])


def test_one_that_keeps_the_likeliest_comes_after_the_temperature_and_not_for_greedy_rows() -> None:
    rows = rows_of(Sharper)
    plan(rows, {0: ([5, 6], greedy(step=1))})
    assert drawn(rows, {0: 2}) == [3]
    assert used(rows).told == []
    many = [SamplingParams(temperature=3.0, seed=seed, extra_args={"step": 1}) for seed in range(ROWS)]
    plan(rows, {row: ([5, 6], params) for row, params in enumerate(many)})
    assert drawn(rows, dict.fromkeys(range(ROWS), 2)) == [3] * ROWS


def test_several_go_one_after_the_other() -> None:
    rows = rows_of(Follow, Follow)
    plan(rows, {0: ([5, 6], greedy(step=2))})
    assert drawn(rows, {0: 2}) == [8]


def test_logits_of_another_shape_are_an_error_that_names_it() -> None:
    rows = rows_of(Wrong)
    plan(rows, {0: ([5, 6], greedy(step=2)), 1: ([5, 6], greedy(step=2))})
    with pytest.raises(ValueError, match="logits processor Wrong"):
        drawn(rows, {0: 2, 1: 2})


def test_parameters_that_a_class_refuses() -> None:
    logits_processors.check([Follow], greedy(step=1))
    with pytest.raises(RequestError, match="step must be a number") as caught:
        logits_processors.check([Follow], greedy(step="x"))
    assert caught.value.param == "vllm_xargs"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere:Class", "No module named 'nowhere'"),
        ("json:Nothing", "has no attribute 'Nothing'"),
        ("json.JSONDecoder", "must be a class with apply and update_state"),
        ("json", "logits processor json"),
    ],
)
def test_what_cannot_be_loaded_is_named(name: str, text: str) -> None:
    with pytest.raises(ProcessorError, match=text):
        logits_processors.loaded([name])


def test_both_spellings_of_a_name() -> None:
    base = "meshlm.workers.output.logits_processor"
    assert logits_processors.loaded([f"{base}:LogitsProcessor", f"{base}.LogitsProcessor"]) == [LogitsProcessor] * 2
