"""The rows on the device are what the plans said, applied by the reference of the scatter kernel (no GPU)."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.kernels.prepare_inputs.reference import scatter
from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row, StepId
from meshlm.workers.rows.device_rows import DeviceRows

ROWS, LENGTH, SIZE = 5, 70, 16


def in_group(nth: int, blocks: list[int]) -> list[int]:
    """Each group has blocks of its own."""
    return [block + 100_000 * nth for block in blocks]


def table(blocks: list[int], groups: int) -> bytes:
    return np.array([in_group(nth, blocks) for nth in range(groups)], np.int32).T.tobytes()


def plan(new_rows: list[NewRow], appended: list[tuple[int, int]], groups: int = 1) -> StepPlan:
    rows, ids = np.array([a for a, _ in appended], np.int32).tobytes(), table([b for _, b in appended], groups)
    return StepPlan(1, StepId(1), b"", b"", b"", b"", 0, new_rows=new_rows, block_rows=rows, block_ids=ids)


def new_row(row: int, tokens: list[int], blocks: list[int], sampling: SamplingParams, groups: int = 1) -> NewRow:
    return NewRow(Row(row), np.array(tokens, np.int32).tobytes(), len(tokens), table(blocks, groups), sampling)


def apply(rows: DeviceRows, made: StepPlan) -> None:
    changes, segments = rows.changes(made)
    if segments:
        scatter(torch.from_numpy(changes.copy()), segments, rows.state)


def test_a_new_row_brings_tokens_blocks_and_sampling() -> None:
    rows = DeviceRows(ROWS, LENGTH, SIZE, torch.device("cpu"))
    sampling = SamplingParams(temperature=0.5, seed=2**62 + 3, top_k=7, top_p=0.25, min_p=0.125)
    apply(rows, plan([new_row(3, [5, 6, 7], [11, 12], sampling)], []))
    assert rows.tokens[3, :4].tolist() == [5, 6, 7, 0]
    assert rows.block_tables[0, 3, :3].tolist() == [11, 12, 0]
    assert float(rows.columns["temperature"][3]) == 0.5
    halves = rows.columns["seed"][3].numpy().view(np.uint32)
    assert int(halves[0]) | int(halves[1]) << 32 == 2**62 + 3
    assert int(rows.columns["num_prompt_tokens"][3]) == 3
    limits = rows.columns
    assert (int(limits["top_k"][3]), float(limits["top_p"][3]), float(limits["min_p"][3])) == (7, 0.25, 0.125)
    assert not rows.tokens[ROWS].any(), "the dummy row stays empty"


def test_nothing_changed_is_nothing_sent() -> None:
    assert DeviceRows(ROWS, LENGTH, SIZE, torch.device("cpu")).changes(plan([], []))[1] == 0


def test_pages_of_layers_that_share_a_tensor_are_several() -> None:
    """New rows' blocks and those that are added later."""
    rows = DeviceRows(ROWS, LENGTH, SIZE, torch.device("cpu"), 2, (1, 3))
    apply(rows, plan([new_row(1, [5], [4, 7], SamplingParams(), 2)], [], 2))
    apply(rows, plan([], [(1, 9)], 2))
    assert rows.block_tables[0, 1, :3].tolist() == [4, 7, 9]
    assert rows.block_tables[1, 1, :3].tolist() == [3 * block for block in in_group(1, [4, 7, 9])]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_block_tables_follow_a_list_model(data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, 3))
    rows = DeviceRows(ROWS, LENGTH, SIZE, torch.device("cpu"), groups)
    model: dict[int, list[int]] = {}
    for step in range(data.draw(st.integers(1, 8))):
        fresh = data.draw(st.sets(st.integers(0, ROWS - 1), max_size=2))
        new_rows = []
        for row in sorted(fresh):
            model[row] = [100 * step + row]
            new_rows.append(new_row(row, [1], model[row], SamplingParams(), groups))
        appended: list[tuple[int, int]] = []
        for nth, row in enumerate(data.draw(st.lists(st.sampled_from(sorted(model)), max_size=8)) if model else ()):
            if len(model[row]) < -(-LENGTH // SIZE):  # a step grows a row for its token, and later for its drafts
                block = 1000 * step + nth
                model[row].append(block)
                appended.append((row, block))
        apply(rows, plan(new_rows, appended, groups))
        for row, blocks in model.items():
            for nth in range(groups):
                assert rows.block_tables[nth, row, : len(blocks)].tolist() == in_group(nth, blocks)
