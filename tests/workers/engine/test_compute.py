"""A step's inputs, and the same step padded to a graph's shape and by hand (kernels in the interpreter, no GPU)."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row, StepId
from meshlm.workers.batch import StepInputs
from meshlm.workers.distributed.shard import WHOLE
from meshlm.workers.engine import triton_inputs
from meshlm.workers.engine.compute import Compute
from meshlm.workers.engine.graph_steps import PaddedStep
from meshlm.workers.engine.triton_inputs import TritonInputs
from meshlm.workers.graphs.keys import HEAD, MODEL, Key
from meshlm.workers.output.grammars import TokenMask
from meshlm.workers.output.logits_sampler import LogitsSampler
from meshlm.workers.rows.changes import I32
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.rows.step_columns import StepColumns

if torch.cuda.is_available():
    pytest.skip("these tensors are on the CPU, where kernels run in the interpreter", allow_module_level=True)

CPU = torch.device("cpu")
VOCAB, HIDDEN, LENGTH, BLOCK, CHUNK = 53, 16, 64, 16, 4
PROMPT = 9


class Staging:
    """Copies at once."""

    def __init__(self) -> None:
        self.num_copies = 0

    def send(self, values: I32, to: Tensor) -> None:
        self.num_copies += 1
        to[: len(values)] = torch.from_numpy(values)


class Model:
    """Hidden states say which token stands where, and the head reads them."""

    spec = SimpleNamespace(vocab_size=VOCAB, hidden_size=HIDDEN)
    local = SimpleNamespace(layers=())

    def __init__(self) -> None:
        dice = torch.Generator().manual_seed(0)
        self.ids, self.positions = (
            torch.randn(VOCAB, HIDDEN, generator=dice),
            torch.randn(LENGTH, HIDDEN, generator=dice),
        )

    def __call__(self, batch: StepInputs, caches: object, attention: object, stream: object) -> Tensor:
        return self.ids[batch.input_ids] + self.positions[batch.positions]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        found = hidden @ self.ids.T
        return found if out is None else out.copy_(found)


class Case:
    """As many requests as may run: decodes, then a whole prompt, then a chunk of one, which samples nothing."""

    def __init__(self, max_rows: int) -> None:
        self.rows, self.staging = DeviceRows(max_rows, LENGTH, BLOCK, CPU), Staging()
        model: Any = Model()
        attention: Any = SimpleNamespace(step=lambda batch, block_size: None)
        staging: Any = self.staging
        self.inbox = TritonInputs(self.rows, staging, CPU)
        self.head = LogitsSampler(model, self.rows, torch.float32, CPU, CHUNK)
        self.compute = Compute(model, attention, BLOCK, WHOLE, self.inbox, self.head, torch.empty(0))
        self.padded = PaddedStep(self.compute, WHOLE, self.inbox, self.head)
        kinds = (["decode"] * max_rows + ["prompt", "chunk"])[-max_rows:]
        order = np.random.default_rng(0).permutation(max_rows).astype(np.int32)
        counts = np.array([{"decode": 1, "prompt": PROMPT, "chunk": 5}[kind] for kind in kinds], np.int32)
        starts = np.array([PROMPT - 1 if kind == "decode" else 0 for kind in kinds], np.int32)
        self.samples = [kind != "chunk" for kind in kinds]
        prompts = np.random.default_rng(1).integers(0, VOCAB, (max_rows, PROMPT)).astype(np.int32)
        self.plan = StepPlan(
            1,
            StepId(1),
            order.tobytes(),
            starts.tobytes(),
            counts.tobytes(),
            bytes(self.samples),
            int(counts.sum()),
            new_rows=[
                NewRow(
                    Row(row),
                    prompts[row].tobytes(),
                    PROMPT,
                    np.zeros(1, np.int32).tobytes(),
                    SamplingParams(temperature=0.0),
                )
                for row in range(max_rows)
            ],
        )
        self.step = StepColumns(self.plan)

    def send(self, size: int) -> int:
        """Copies that it took."""
        changes, segments = self.rows.changes(self.plan)
        self.inbox.send(self.step, size, changes, segments, self.step.places)
        return self.staging.num_copies

    def tokens(self) -> tuple[list[int], list[list[int]]]:
        """Those that were sampled, and all rows, the dummy too."""
        return self.head.sampled[: sum(self.samples)].tolist(), self.rows.tokens.tolist()


@pytest.mark.parametrize("max_rows", [1, 2, 3, 16])
def test_a_mixed_graph_holds_as_many_requests_as_may_run(max_rows: int) -> None:
    """With padding tokens and without: what is sampled, where it is written, and what is not."""
    eager = Case(max_rows)
    assert eager.send(max_rows) == 1
    eager.compute.eager(eager.step)
    expected = eager.tokens()
    for tokens in (eager.step.t, eager.step.t + 7):
        padded = Case(max_rows)
        assert padded.send(max_rows + 1) == 1
        padded.padded(Key(tokens, max_rows + 1))
        assert padded.tokens() == expected
    assert not any(expected[1][max_rows]), "the dummy row stays empty"


@pytest.mark.parametrize("num_decodes", [1, 2, 5])
def test_decodes_in_a_larger_graph(num_decodes: int) -> None:
    case = Case(num_decodes)
    case.send(num_decodes)
    decodes = np.arange(num_decodes, dtype=np.int32).tobytes()
    at = np.full(num_decodes, PROMPT - 1, np.int32).tobytes()
    step = StepColumns(StepPlan(1, StepId(2), decodes, at, b"", b"", num_decodes))
    found = []
    for size in (num_decodes, 5):
        wide = Case(5)
        wide.rows.tokens[:num_decodes] = case.rows.tokens[:num_decodes]
        wide.inbox.send(step, size, np.empty(0, np.int32), 0, step.places)
        wide.padded(Key(size, size))
        found.append(wide.head.sampled[:num_decodes].tolist())
        wide.head.sampled.zero_()
        for part in (MODEL, HEAD):  # without masks: the same
            wide.padded(Key(size, size, part=part))
        assert wide.head.sampled[:num_decodes].tolist() == found[-1]
        assert wide.rows.tokens[:num_decodes, PROMPT].tolist() == found[-1]
        assert not wide.rows.tokens[num_decodes:].any()
    assert found[0] == found[1]


def test_more_changes_than_the_buffer_holds_come_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns are what they would be, and so are the rows."""
    beside = Case(5)
    assert beside.send(6) == 1
    monkeypatch.setattr(triton_inputs, "INTS", 4 * 16 + 10)
    apart = Case(5)
    assert apart.send(6) == 2
    assert torch.equal(apart.rows.state, beside.rows.state)
    for ours, theirs in zip(apart.inbox.columns(6), beside.inbox.columns(6), strict=True):
        assert torch.equal(ours, theirs)


def test_a_cleared_inbox_computes_nothing() -> None:
    """As graphs are captured: of any shape."""
    case = Case(5)
    case.send(6)
    before = case.rows.state.clone()
    case.inbox.clear()
    for key in (Key(1, 1), Key(5, 5), Key(128, 6)):
        case.padded(key)
        assert torch.equal(case.rows.state, before)


@pytest.mark.parametrize("max_rows", [1, 5])
def test_a_masked_step_in_two_parts(max_rows: int) -> None:
    """The model, then the head with masks: as the step is launched one by one, and for decodes in a larger graph."""

    def masks(take: Any) -> TokenMask:
        """Of every other line: it may be one of two tokens."""
        lines = np.arange(0, sum(eager.samples), 2)
        bits = np.zeros((len(lines), -(-VOCAB // 32) * 32), np.uint8)
        for nth, line in enumerate(lines):
            bits[nth, [line % VOCAB, (7 * line + 3) % VOCAB]] = 1
        words = take(len(lines))
        words[:] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        return TokenMask(lines, words)

    eager = Case(max_rows)
    eager.send(max_rows)
    plain = Case(max_rows)
    plain.send(max_rows)
    plain.compute.eager(plain.step)
    extra: Any = SimpleNamespace(before_head=lambda head: head.mask(masks(head.take_mask)))
    eager.compute.eager(eager.step, 0, [extra])
    expected = eager.tokens()
    for line in range(sum(eager.samples)):
        if line % 2:
            assert expected[0][line] == plain.tokens()[0][line]
        else:
            assert expected[0][line] in (line % VOCAB, (7 * line + 3) % VOCAB)
    key = Key(eager.step.t + 7, max_rows + 1)
    padded = Case(max_rows)
    padded.send(max_rows + 1)
    padded.padded(key._replace(part=MODEL))
    padded.head.mask(masks(padded.head.take_mask))
    padded.padded(key._replace(part=HEAD))
    assert padded.tokens() == expected
