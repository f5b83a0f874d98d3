"""Plain torch prepares the same inputs as the kernels do (in the interpreter, no GPU): so a CPU proves what a GPU runs."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from meshlm.protocol.wire.columns import pack_i32

pytest.importorskip("triton")

from at_once import AtOnce

from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row, StepId
from meshlm.workers.attention.backend import Backend, TorchBackend
from meshlm.workers.attention.triton_backend import TritonBackend
from meshlm.workers.batch import LayerCache
from meshlm.workers.engine.kit import TorchInputs
from meshlm.workers.engine.triton_inputs import TritonInputs
from meshlm.workers.layers.ops import AttentionShape, LayerStep, Ops, TorchOps
from meshlm.workers.layers.triton_ops import TritonOps
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.rows.step_columns import StepColumns

if torch.cuda.is_available():
    pytest.skip("these tensors are on the CPU, where kernels run in the interpreter", allow_module_level=True)

CPU = torch.device("cpu")
ROWS, LENGTH, BLOCK = 6, 90, 8


def plans(groups: int = 1) -> list[StepPlan]:
    """Prompts, a chunk beside decodes, decodes alone, a row that is taken again; blocks come with and after their rows."""
    dice = np.random.default_rng(0)

    def table(blocks: list[int]) -> bytes:
        """In each group other blocks."""
        return (np.array(blocks, np.int32)[:, None] + 100 * np.arange(groups, dtype=np.int32)).tobytes()

    def new(row: int, length: int, blocks: list[int]) -> NewRow:
        tokens = dice.integers(1, 99, length).astype(np.int32).tobytes()
        biased = SamplingParams(temperature=0.7, seed=2**62 + row, logit_bias={5: 1.5, 9: -2.0}, presence_penalty=0.5)
        return NewRow(Row(row), tokens, length, table(blocks), biased)

    def plan(
        rows: list[int], starts: list[int], counts: list[int], samples: list[bool] | None, **rest: Any
    ) -> StepPlan:
        columns = [pack_i32(column) for column in (rows, starts, counts)]
        chosen = b"" if samples is None else bytes(samples)
        return StepPlan(1, StepId(1), columns[0], columns[1], columns[2], chosen, sum(counts), **rest)

    def blocks(*pairs: tuple[int, int]) -> dict[str, bytes]:
        rows, ids = zip(*pairs, strict=True)
        return {"block_rows": np.array(rows, np.int32).tobytes(), "block_ids": table(list(ids))}

    known = np.array([41], np.int32).tobytes()
    return [
        plan([4, 1], [0, 0], [10, 17], None, new_rows=[new(4, 10, [7, 3]), new(1, 17, [5, 9, 2])]),
        plan([1, 4, 0], [17, 10, 0], [1, 1, 6], [True, True, False], new_rows=[new(0, 9, [11])], **blocks((0, 12))),
        plan([4, 1], [11, 18], [1, 1], None, input_ids=known),
        plan(
            [1, 0, 4], [19, 6, 0], [1, 3, 16], None, new_rows=[new(4, 16, [3, 8])], **blocks((1, 20), (1, 21), (4, 30))
        ),
    ]


def send(rows: DeviceRows, inputs: TorchInputs | TritonInputs, plan: StepPlan) -> StepColumns:
    changes, segments = rows.changes(plan)
    step = StepColumns(plan)
    inputs.send(step, step.n, changes, segments, step.places)
    return step


@pytest.mark.parametrize("groups", [1, 3])
def test_torch_and_the_kernels_prepare_the_same(groups: int) -> None:
    ours, theirs = (DeviceRows(ROWS, LENGTH, BLOCK, CPU, groups) for _ in "ab")
    torch_inputs, kernels = TorchInputs(ours), TritonInputs(theirs, AtOnce(), CPU)
    for plan in plans(groups):
        found = torch_inputs.of_step(send(ours, torch_inputs, plan))
        step = send(theirs, kernels, plan)
        expected = kernels.of_step(step)
        assert torch.equal(ours.state, theirs.state)
        assert [slots.tolist() for slots in found.slot_mapping] == [slots.tolist() for slots in expected.slot_mapping]
        assert len(found.slot_mapping) == groups
        for nth, slots in enumerate(found.slot_mapping[1:], 1):
            assert torch.equal(slots, found.slot_mapping[0] + 100 * nth * BLOCK)
        for name in ("input_ids", "positions", "logits_indices"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
        assert found.num_decodes == expected.num_decodes
        lens = (step.starts + step.counts).tolist()
        assert found.lens is not None
        assert found.lens.seq_lens.tolist() == lens
        assert found.lens.query_lens == tuple(step.counts[found.num_decodes :].tolist())
        assert found.lens.context_lens == tuple(lens[found.num_decodes :])
        assert found.lens.max_decode_len == max(lens[: found.num_decodes], default=0)
        width = -(-max(lens) // BLOCK)
        assert [table.tolist() for table in found.block_tables] == theirs.block_tables[
            :, step.rows.tolist(), :width
        ].tolist()


def test_nothing_that_changes_is_nothing_that_is_written() -> None:
    rows = DeviceRows(ROWS, LENGTH, BLOCK, CPU)
    inputs = TorchInputs(rows)
    send(rows, inputs, plans()[0])
    before = rows.state.clone()
    decodes = StepPlan(1, StepId(2), pack_i32([4, 1]), pack_i32([10, 17]), b"", b"", 2)
    found = inputs.of_step(send(rows, inputs, decodes))
    assert torch.equal(rows.state, before)
    assert found.slot_mapping[0].tolist() == [3 * BLOCK + 2, 2 * BLOCK + 1]


def cache_of(group: int) -> LayerCache:
    keys, values = torch.zeros(2, 140, BLOCK, 2, 16)
    return LayerCache(keys, values, group=group)


@pytest.mark.parametrize("window", [0, 5])
def test_each_group_is_attended_to_by_its_own_table(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels and by torch: what layers of either group read and write, in prompts, chunks and decodes."""
    small = SimpleNamespace(multi_processor_count=8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: small)
    torch.manual_seed(0)
    ours, theirs = (DeviceRows(ROWS, LENGTH, BLOCK, CPU, 2) for _ in "ab")
    torch_inputs, kernels = TorchInputs(ours), TritonInputs(theirs, AtOnce(), CPU)
    shape, table = AttentionShape(4, 2, 16, None, 0.0), torch.rand(LENGTH, 16)
    caches = [[cache_of(group) for group in (0, 1)] for _ in "ab"]
    backends: tuple[Backend, Backend] = (TorchBackend(), TritonBackend())
    both: tuple[Ops, Ops] = (TorchOps(), TritonOps())
    for plan in plans(2):
        batches = (torch_inputs.of_step(send(ours, torch_inputs, plan)), kernels.of_step(send(theirs, kernels, plan)))
        steps = [backend.step(batch, BLOCK) for backend, batch in zip(backends, batches, strict=True)]
        for group in (0, 1):
            qkv = torch.randn(plan.num_tokens, 8 * 16)
            by_torch, by_kernels = (
                step.attend(qkv.clone(), LayerStep(ops, batch, table, own[group]), shape, 0.25, window)
                for step, ops, batch, own in zip(steps, both, batches, caches, strict=True)
            )
            torch.testing.assert_close(by_kernels, by_torch, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(caches[1][group].keys, caches[0][group].keys, atol=2e-5, rtol=1e-4)
            assert torch.equal(caches[1][group].values, caches[0][group].values)
    used = [{int(page) for page in cache.values.flatten(1).any(1).nonzero()} for cache in caches[0]]
    assert used[1] == {page + 100 for page in used[0]}


LONG = 700


def long_plans() -> list[StepPlan]:
    """Prompts of which three begin with the same 36 blocks, and two others with the same 17, which the first of them computes; then
    decodes, beside a prompt and alone."""
    first, second = [*range(36)], [*range(40, 57)]
    own = [list(range(begin, begin + 30)) for begin in range(60, 240, 30)]
    tables = [first + own[0], second + own[1], first + own[2], own[3], second + own[4], first + own[5]]
    lengths = [300, 200, 310, 20, 150, 293]

    def plan(rows: list[int], starts: list[int], counts: list[int], new: list[int]) -> StepPlan:
        news = [
            NewRow(Row(row), bytes(4 * lengths[row]), lengths[row], pack_i32(tables[row]), SamplingParams())
            for row in new
        ]
        columns = pack_i32(rows), pack_i32(starts), pack_i32(counts)
        return StepPlan(1, StepId(1), columns[0], columns[1], columns[2], b"", sum(counts), new_rows=news)

    return [
        plan([0, 1, 3], [0, 0, 0], [300, 200, 20], [0, 1, 3]),
        plan([2, 4], [288, 136], [22, 14], [2, 4]),
        plan([2, 3, 0, 4, 1, 5], [310, 20, 300, 150, 200, 288], [1, 1, 1, 1, 1, 5], [5]),
        plan([5, 4, 0, 1, 3, 2], [293, 151, 301, 201, 21, 311], [1] * 6, []),
    ]


@pytest.mark.parametrize("padded", [False, True])
def test_shared_prefixes_change_nothing(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels make of steps whose decodes share prefixes is what plain torch makes of each request; also as a graph has it."""
    from meshlm.kernels.attention.tiles import SharedSizes
    from meshlm.workers.rows import shared_prefixes

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=8))
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED", 1)
    monkeypatch.setattr(shared_prefixes, "LEAST_OF_CLUSTER", 1)
    torch.manual_seed(0)
    ours, theirs = (DeviceRows(ROWS, LONG, BLOCK, CPU, 1) for _ in "ab")
    theirs.prefixes = shared_prefixes.PrefixTables(0, BLOCK, ROWS, SharedSizes(2, 3), 1)
    torch_inputs, kernels = TorchInputs(ours), TritonInputs(theirs, AtOnce(), CPU)
    shape, table = AttentionShape(4, 2, 16, None, 0.0), torch.rand(LONG, 16)
    caches = [LayerCache(*torch.zeros(2, 300, BLOCK, 2, 16)) for _ in "ab"]
    found = []
    for plan in long_plans():
        changes, segments = theirs.changes(plan)
        step = theirs.step(plan)
        size, tokens = (step.n + 1, step.t + 2 + (step.n == step.t)) if padded else (step.n, step.t)
        kernels.send(step, size, changes, segments, step.places)
        ours_batch = torch_inputs.of_step(send(ours, torch_inputs, plan))
        if padded:
            batch = kernels.padded(size, tokens, shared=step.shared is not None)
        else:
            batch = kernels.of_step(step)
        found.append(step.shared and sorted(zip(step.shared.sizes.tolist(), step.shared.tokens.tolist(), strict=True)))
        assert bool(batch.shared) == (step.shared is not None)
        qkv = torch.randn(tokens, 8 * 16)
        before = [cache.keys.clone() for cache in caches]
        by_torch, by_kernels = (
            backend.step(own, BLOCK).attend(
                qkv[: own.input_ids.numel()].clone(), LayerStep(ops, own, table, cache), shape, 0.25
            )
            for backend, ops, own, cache in (
                (TorchBackend(), TorchOps(), ours_batch, caches[0]),
                (TritonBackend(), TritonOps(), batch, caches[1]),
            )
        )
        torch.testing.assert_close(by_kernels[: step.t], by_torch[: step.t], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(caches[1].keys, caches[0].keys, atol=2e-5, rtol=1e-4)
        assert not torch.equal(before[0], caches[0].keys)
    assert found == [None, None, [(2, 128), (2, 256)], [(2, 128), (3, 256)]]
