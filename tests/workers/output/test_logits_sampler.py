"""Logits to tokens in chunks: every line as if it were alone, whatever the others ask for (kernels in the interpreter, no GPU)."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.penalties import kernel as penalties
from meshlm.kernels.prepare_inputs.reference import scatter
from meshlm.kernels.sample.outcomes import NONE_LEFT, NOT_NUMBERS
from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row, StepId
from meshlm.workers.graphs import keys as graphs
from meshlm.workers.output import logits_sampler, logprobs
from meshlm.workers.output.grammars import TokenMask
from meshlm.workers.output.logits_sampler import LogitsSampler
from meshlm.workers.output.logprobs import Details, in_chunks, unpack
from meshlm.workers.output.sampler import SampleRows, apply_mask, process, sample
from meshlm.workers.rows.columns import ALWAYS, EDITS, RowColumns, edits
from meshlm.workers.rows.device_rows import DeviceRows

if torch.cuda.is_available():
    pytest.skip("these tensors are on the CPU, where kernels run in the interpreter", allow_module_level=True)

CPU = torch.device("cpu")
ROWS, VOCAB, HIDDEN, LENGTH, CHUNK = 7, 101, 16, 40, 3
KINDS = [
    SamplingParams(temperature=0.0, seed=1),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
    SamplingParams(
        temperature=0.0, logit_bias={17: 0.5, 18: 50.0}, frequency_penalty=60.0, bad_words_token_ids=((19,),)
    ),
    SamplingParams(temperature=0.9, top_k=5, seed=4, logprobs=2),
    SamplingParams(temperature=0.0, min_tokens=30, stop_token_ids=(3,), repetition_penalty=1.2, logprobs=0),
    SamplingParams(temperature=1.1, top_p=0.8, presence_penalty=1.0, seed=6),
    SamplingParams(temperature=0.0, allowed_token_ids=(8, 9), logprobs=4),
]


def test_a_mixed_step_of_256_streams_is_one_chunk() -> None:
    assert max(graphs.MIXED_REQUESTS) <= logits_sampler.LINES <= penalties.PROGRAMS * penalties.EACH


class Model:
    """A head and nothing else."""

    spec = SimpleNamespace(vocab_size=VOCAB, hidden_size=HIDDEN)

    def __init__(self) -> None:
        self.weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
        self.most_lines = 0

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        self.most_lines = max(self.most_lines, len(hidden))
        found = torch.stack([self.weight @ line for line in hidden])  # the same for a line, whatever the chunk
        return found if out is None else out.copy_(found)


class Case:
    """Each row has a request of one of the KINDS, with a prompt of 3 tokens and an output of 7."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chunk: int, kinds: list[SamplingParams] = KINDS) -> None:
        monkeypatch.setattr(logits_sampler, "LINES_BY_TORCH", 2)
        monkeypatch.setattr(logprobs, "LINES", 2)
        self.model = Model()
        self.rows, self.table = DeviceRows(ROWS, LENGTH, 16, CPU), RowColumns(ROWS)
        self.head = LogitsSampler(cast(Any, self.model), self.rows, torch.float32, CPU, chunk)
        dice = np.random.default_rng(0)
        self.tokens = dice.integers(0, VOCAB, (ROWS, 10)).astype(np.int32)
        self.tokens[:, 5:] = self.tokens[:, 4:5]
        new = [
            NewRow(Row(row), self.tokens[row].tobytes(), 3, np.zeros(1, np.int32).tobytes(), params)
            for row, params in enumerate(kinds)
        ]
        changes, segments = self.rows.changes(StepPlan(1, StepId(1), b"", b"", b"", b"", 0, new_rows=new))
        scatter(torch.from_numpy(changes.copy()), segments, self.rows.state)
        for row, params in enumerate(kinds):
            self.table.set(row, params)
        self.hidden = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))

    def at(self, rows: list[int]) -> SampleRows:
        n = len(rows)
        return SampleRows(np.array(rows, np.int32), np.full(n, 7), np.full(n, 10), np.full(n, 3))

    def step(self, rows: list[int], places: list[int] | None) -> tuple[list[int], list[Details]]:
        """Decodes of these rows; the lines at `places` sample (None: all)."""
        lines = list(range(len(rows))) if places is None else places
        columns = (
            torch.tensor(rows, dtype=torch.int32),
            torch.full((len(rows),), 9, dtype=torch.int32),
            torch.arange(1, len(rows) + 1, dtype=torch.int32),
        )
        mine = [rows[place] for place in lines]
        on_device = None if places is None else torch.tensor(places, dtype=torch.int32)
        batch: Any = SimpleNamespace(columns=Columns(*columns, len(rows), self.rows.block_tables[0]), places=on_device)
        self.head.choose(self.hidden[mine], batch)
        self.head.by_torch(self.at(mine), self.table)
        processed = None if self.table.logprobs_mode.startswith("raw") else self.at(mine)
        details = self.head.details(np.array(mine, np.int32), np.array(lines), self.table, processed)
        return self.head.sampled[: len(mine)].tolist(), details

    def expected(self, rows: list[int]) -> list[int]:
        tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
        tokens[:, :10] = torch.from_numpy(self.tokens)
        found: list[int] = sample(self.model.logits(self.hidden[rows]), self.at(rows), self.table, tokens).tolist()
        return found


@pytest.mark.parametrize("chunk", [CHUNK, 256])
def test_chunks_and_neighbours_change_nothing(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Uniform decodes and a choice of places: what the general sampler says of each row."""
    case = Case(monkeypatch, chunk)
    assert len(case.head.logits) == min(chunk, ROWS)
    rows = [3, 0, 6, 1, 5, 2, 4]
    found, _ = case.step(rows, None)
    assert found == case.expected(rows)
    assert case.rows.tokens[rows, 10].tolist() == found
    assert case.model.most_lines <= max(chunk, ROWS)
    case = Case(monkeypatch, chunk)
    found, _ = case.step(rows, [6, 1, 4, 5, 0])
    assert found == case.expected([4, 0, 5, 2, 3])


def test_rows_with_llama_cpps_samplers_are_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others, drawn and greedy; what the general sampler says of each row. Nothing is sampled again by torch."""
    kinds = [
        SamplingParams(temperature=0.0, xtc_probability=1.0, xtc_threshold=0.05, top_k=3),
        SamplingParams(temperature=0.9, seed=4, typical_p=0.3, top_p=0.9),
        KINDS[3],
        SamplingParams(temperature=0.0, dry_multiplier=30.0, dry_allowed_length=1),
        SamplingParams(temperature=1.1, seed=6, top_n_sigma=0.7, min_p=0.2, presence_penalty=1.0),
        KINDS[0],
        SamplingParams(
            temperature=0.7, seed=9, dry_multiplier=2.0, dry_allowed_length=1, xtc_probability=0.5, xtc_threshold=0.01
        ),
    ]
    case = Case(monkeypatch, CHUNK, kinds)
    case.hidden[3] = case.model.weight[case.tokens[3, 9]] * 9  # it would say the same again
    rows = [3, 0, 6, 1, 5, 2, 4]
    expected = case.expected(rows)
    monkeypatch.setattr(logits_sampler, "sample", None)
    found, _ = case.step(rows, None)
    assert found == expected
    assert found[0] != case.tokens[3, 9]
    plain = Case(monkeypatch, CHUNK, [SamplingParams(temperature=0.0)] * ROWS)
    plain.hidden[3] = case.hidden[3]
    assert plain.step([3], None)[0] == [case.tokens[3, 9]]


def test_only_rows_that_need_it_are_sampled_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those with penalties, bias, truncation, min_tokens or log-probabilities."""
    case = Case(monkeypatch, CHUNK)
    seen: list[int] = []

    def spy(logits: Tensor, at: SampleRows, table: RowColumns, tokens: Tensor) -> Tensor:
        seen.extend(at.rows.tolist())
        return sample(logits, at, table, tokens)

    monkeypatch.setattr(logits_sampler, "sample", spy)
    case.step(list(range(ROWS)), None)
    assert seen == [6]


def test_what_the_kernels_edit() -> None:
    stops = tuple(range(EDITS))
    assert edits(SamplingParams(min_tokens=3, stop_token_ids=(4, 5), eos_token_ids=(5,), logit_bias={9: 1.5})) == [
        (4, -np.inf, 3),
        (5, -np.inf, 3),
        (9, 1.5, ALWAYS),
    ]
    assert edits(SamplingParams(stop_token_ids=(4,))) == []
    assert edits(SamplingParams(min_tokens=3, stop_token_ids=(*stops, 99))) is None
    assert edits(SamplingParams(min_tokens=3, stop_token_ids=(4,), logit_bias={4: 1.0})) is None
    table = RowColumns(3)
    table.set(0, SamplingParams(min_tokens=3, stop_token_ids=(*stops, 99)))
    table.set(1, SamplingParams(logit_bias=dict.fromkeys(range(EDITS + 1), 1.0)))
    table.set(2, SamplingParams(logit_bias=dict.fromkeys(stops, 1.0)))
    rows = np.arange(3, dtype=np.int32)
    assert table.need_torch(rows, np.full(3, 2)).tolist() == [0, 1]
    assert table.need_torch(rows, np.full(3, 3)).tolist() == [1]


def test_logprobs_are_of_raw_logits_and_of_the_final_token(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, CHUNK)
    rows = [6, 3, 0, 4]
    found, details = case.step(rows, None)
    (one,) = details
    columns = one.columns()
    assert sorted(columns) == [0, 1, 3]
    for place, width in ((0, 4), (1, 2), (3, 0)):
        logits = case.model.logits(case.hidden[rows[place] : rows[place] + 1])
        assert columns[place] == logprobs.columns(logits, torch.tensor([found[place]]), width)
    assert case.step([0, 1], None)[1] == []


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits", "raw_logits"])
def test_logprobs_of_other_modes(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Of every kind of row, in chunks: what the general sampler chooses by."""
    kinds = [msgspec.structs.replace(one, logprobs=3) for one in KINDS]
    case = Case(monkeypatch, CHUNK, kinds)
    case.table.logprobs_mode = mode
    rows = list(range(len(kinds)))
    found, details = case.step(rows, None)
    columns = {place: column for one in details for place, column in one.columns().items()}
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
    tokens[:, :10] = torch.from_numpy(case.tokens)
    logits = case.model.logits(case.hidden[rows])
    if mode.startswith("processed"):
        logits = process(logits, case.at(rows), case.table, tokens).final()
    values = (logits.log_softmax(-1) if mode.endswith("logprobs") else logits).clamp(min=-9999.0)
    for place in rows:
        top = values[place].topk(3)
        np.testing.assert_allclose(np.frombuffer(columns[place].top_logprobs, np.float32), top.values, rtol=1e-5)
        own = np.frombuffer(columns[place].logprobs, np.float32)
        np.testing.assert_allclose(own, values[place][[found[place]]], rtol=1e-5)


def test_logprobs_of_certain_tokens_beside_those_of_the_likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, CHUNK)
    wanted = {0: (9, 4, 50), 6: (7,)}
    for row, ids in wanted.items():
        case.table.set(row, SamplingParams(temperature=0.0, logprobs=len(ids), logprob_token_ids=ids))
    rows = [6, 3, 0]
    found, details = case.step(rows, None)
    columns = {place: column for one in details for place, column in one.columns().items()}
    assert columns.keys() == {0, 1, 2}
    for place, row in enumerate(rows):
        logprob = case.model.logits(case.hidden[[row]]).log_softmax(-1)[0]
        ids = np.frombuffer(columns[place].top_ids, np.int32).tolist()
        assert ids == list(wanted.get(row, logprob.topk(2).indices.tolist()))
        np.testing.assert_allclose(np.frombuffer(columns[place].top_logprobs, np.float32), logprob[ids], rtol=1e-6)
        np.testing.assert_allclose(
            np.frombuffer(columns[place].logprobs, np.float32), logprob[[found[place]]], rtol=1e-6
        )


def test_prompt_logprobs_in_chunks_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, CHUNK)
    states = torch.randn(7, HIDDEN)
    case.model.most_lines = 0
    found = unpack(in_chunks(states, case.rows.tokens[5, 2:9].long(), 3, case.model.logits).numpy(), 3)
    assert case.model.most_lines == 2
    following = torch.from_numpy(case.tokens[5, 2:9]).long()
    assert found == logprobs.columns(case.model.logits(states), following, 3)


def of_lines(allowed: dict[int, list[int]]) -> TokenMask:
    """By line: the tokens that may come."""
    bits = np.zeros((len(allowed), -(-VOCAB // 32) * 32), np.uint8)
    for nth, tokens in enumerate(allowed.values()):
        bits[nth, tokens] = 1
    return TokenMask(np.array(list(allowed), np.intp), np.packbits(bits, axis=1, bitorder="little").view(np.int32))


@pytest.mark.parametrize(("chunk", "apart"), [(CHUNK, False), (256, True)])
def test_masked_lines_beside_others(monkeypatch: pytest.MonkeyPatch, chunk: int, apart: bool) -> None:
    """Every kind of row, so lines that torch samples again too; two steps, so that no mask outlives its own."""
    case = Case(monkeypatch, chunk)
    rows = [3, 0, 6, 1, 5, 2, 4]
    count = len(rows)
    columns = (
        torch.tensor(rows, dtype=torch.int32),
        torch.full((count,), 9, dtype=torch.int32),
        torch.arange(1, count + 1, dtype=torch.int32),
    )
    batch: Any = SimpleNamespace(columns=Columns(*columns, count, case.rows.block_tables[0]), places=None)
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
    tokens[:, :10] = torch.from_numpy(case.tokens)
    for allowed in ({0: [5, 100], 2: [8], 4: [17], 6: [0, 31, 32]}, {2: [9, 7]}):
        if allowed:
            mask = of_lines(allowed)
            words = case.head.take_mask(len(allowed))
            words[:] = mask.words
            case.head.mask(mask._replace(words=words))
        if apart and allowed:
            case.head.keep(case.hidden[rows])
            case.head.choose_kept(count, columns, None)
        else:
            case.head.sample(case.hidden[rows], batch, SimpleNamespace())  # type: ignore[arg-type]
        case.head.by_torch(case.at(rows), case.table)
        found = case.head.sampled[:count].tolist()
        logits = case.model.logits(case.hidden[rows])
        if allowed:
            apply_mask(logits, of_lines(allowed))
        assert found == sample(logits, case.at(rows), case.table, tokens).tolist()
        assert all(found[line] in some for line, some in allowed.items())


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN slice")  # the interpreter's numpy
def test_rows_that_no_token_can_be_chosen_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels and by torch; what stands behind the row's tokens is a token all the same, since the next step looks it up."""
    every = tuple(range(VOCAB))
    nothing = [
        SamplingParams(temperature=0.0, min_tokens=30, stop_token_ids=every, logprobs=1),
        SamplingParams(temperature=1.0, allowed_token_ids=(8,), bad_words_token_ids=((8,),), logprobs=1),
    ]
    case = Case(monkeypatch, CHUNK, [*nothing, *KINDS[2:]])
    case.hidden[3] = torch.nan  # top-k, drawn
    case.hidden[5] = torch.nan  # top-p and a penalty
    rows = list(range(ROWS))
    found, details = case.step(rows, None)
    assert found[:2] == [NONE_LEFT, NONE_LEFT]
    assert (found[3], found[5]) == (NOT_NUMBERS, NOT_NUMBERS)
    assert min(found[2], found[4], found[6]) >= 0
    assert case.rows.tokens[[0, 1, 3, 5], 10].tolist() == [0] * 4
    assert sorted(place for one in details for place in one.columns()) == [0, 1, 3, 4, 6]


def test_lines_that_are_packed_as_if_each_were_alone() -> None:
    """What each gets does not depend on what others ask for: of equal logits, too, of which there are many."""
    hidden = torch.randn(70, 8, generator=torch.Generator().manual_seed(0))
    head = torch.randn(8, 1000, generator=torch.Generator().manual_seed(1))
    ids, widths = torch.arange(70), [nth % 7 for nth in range(70)]

    def logits_of(states: Tensor) -> Tensor:
        return (states @ head).round()

    plain, alone = (in_chunks(hidden, ids, 6, logits_of, alone=each) for each in ((), widths))
    for nth, width in enumerate(widths):
        mine, theirs = (unpack(packed[nth : nth + 1].numpy(), width) for packed in (alone, plain))
        assert mine.ranks == theirs.ranks
        for ours, others in ((mine.logprobs, theirs.logprobs), (mine.top_logprobs, theirs.top_logprobs)):
            assert np.allclose(np.frombuffer(ours, np.float32), np.frombuffer(others, np.float32))
        by_itself = in_chunks(hidden[nth : nth + 1], ids[nth : nth + 1], width, logits_of, alone=[width])
        assert mine.top_ids == unpack(by_itself.numpy(), width).top_ids
