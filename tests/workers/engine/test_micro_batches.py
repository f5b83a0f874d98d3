"""Two halves of a step take turns: in which order, what ends them, and which steps may be cut."""

from functools import partial

import numpy as np
import pytest
import torch

from meshlm.kernels.attention.kernel import Columns
from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row, StepId
from meshlm.workers.batch import UNKNOWN, StepInputs
from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.engine.together import Turns, cut_of, reads_across
from meshlm.workers.formats.format import plain_experts
from meshlm.workers.moe.dispatch.collective import AllGather, Collective, Members
from meshlm.workers.moe.experts.reference import ReferenceExperts
from meshlm.workers.moe.fused_moe import Dispatched, ExpertWeights, FusedMoE, Routing, WeightAndReduce
from meshlm.workers.partial_sum import Kind, PartialSum
from meshlm.workers.rows.step_columns import columns_of


def group() -> ExpertGroup:
    return ExpertGroup(0, 2, "0", torch.device("cpu"))


def test_halves_overlap_as_the_schedule_says() -> None:
    """The leading half is 1. Each receives when the other has computed something meanwhile."""
    told: list[str] = []
    now = [1]

    class Telling(Collective):
        def prepare_async(self, x, routing, quantise):  # type: ignore[no-untyped-def]
            half = int(x[0, 0])
            told.append(f"D{half} send")
            receive = Collective.prepare_async(self, x, routing, quantise)

            def received() -> Dispatched:
                found = receive()
                told.append(f"D{half} recv")
                return found

            return received

        def combine_async(self, out, given, routing, left):  # type: ignore[no-untyped-def]
            half = now[0]
            told.append(f"C{half} send")
            receive = Collective.combine_async(self, out, given, routing, left)

            def received() -> PartialSum:
                found = receive()
                told.append(f"C{half} recv")
                return found

            return received

    class TellingExperts(ReferenceExperts):
        def apply(self, given: Dispatched, out, spaces, left: WeightAndReduce) -> None:  # type: ignore[no-untyped-def]
            now[0] = int(given.x[0, 0])
            told.append(f"MLP{now[0]}")
            out.zero_()

    experts = group()
    turns = Turns(experts)
    fused = FusedMoE(
        Telling(Members(experts, (0, 1), 1, Kind.WHOLE), AllGather()),
        TellingExperts(ExpertWeights(plain_experts(torch.zeros(1, 4, 2)), plain_experts(torch.zeros(1, 2, 2)))),
    )

    def half(number: int) -> int:
        for layer in range(2):
            told.append(f"A{number} {layer}")
            x, routing = (
                torch.full((1, 2), float(number)),
                Routing(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)),
            )

            def shared() -> PartialSum:
                told.append(f"S{number}")
                return PartialSum(torch.zeros(1, 2))

            fused.forward(x, routing, shared)
        return number

    assert turns.run([partial(half, 1), partial(half, 0)]) == [1, 0]
    first = [
        "A1 0",
        "D1 send",
        "A0 0",
        "D0 send",
        "D1 recv",
        "MLP1",
        "C1 send",
        "S1",
        "D0 recv",
        "MLP0",
        "C0 send",
        "S0",
    ]
    second = [text.replace(" 0", " 1") for text in first]
    over = ["C1 recv", *second[:2], "C0 recv", *second[2:]]
    assert told == [*first, *over, "C1 recv", "C0 recv"]
    assert experts.pause is None, "whole steps wait for nobody"


def test_what_one_half_raises_ends_both() -> None:
    turns, ended = Turns(group()), []

    def waits() -> None:
        try:
            turns.pause()
        finally:
            ended.append("leading")
            turns.pause()

    def fails() -> None:
        raise ValueError("a bug")

    for works in ([waits, fails], [waits, fails]):  # the second time as the first
        with pytest.raises(ValueError, match="a bug"):
            turns.run(works)
    assert ended == ["leading", "leading"]
    assert turns.run([lambda: 1, lambda: 2]) == [1, 2]


def test_one_goes_on_alone_when_the_other_is_done() -> None:
    turns = Turns(group())

    def several() -> int:
        for _ in range(3):
            turns.pause()
        return 3

    assert turns.run([several, lambda: 0]) == [3, 0]
    assert turns.run([lambda: 0, several]) == [0, 3]


@pytest.mark.parametrize("num_tokens", range(3, 50))
def test_both_halves_have_tokens_and_the_first_no_fewer(num_tokens: int) -> None:
    cut = cut_of(num_tokens)
    assert 0 < num_tokens - cut <= cut or num_tokens == 3
    assert cut % 2 == 0


def halved(counts: list[int], starts: list[int], cut: int) -> list[list[tuple[int, int, int]]]:
    rows = np.arange(len(counts), dtype=np.int32) + 10
    parts = columns_of(rows, np.array(starts, np.int32), np.array(counts, np.int32)).halves(cut)
    return [list(zip(p.rows.tolist(), p.starts.tolist(), p.counts.tolist(), strict=True)) for p in parts]


def test_a_request_may_stand_in_both_halves() -> None:
    assert halved([1, 1, 5, 3], [9, 4, 2, 0], 4) == [[(10, 9, 1), (11, 4, 1), (12, 2, 2)], [(12, 4, 3), (13, 0, 3)]]
    assert halved([1, 1], [3, 3], 1) == [[(10, 3, 1)], [(11, 3, 1)]]
    assert halved([4, 4], [0, 0], 4) == [[(10, 0, 4)], [(11, 0, 4)]]


@pytest.mark.parametrize("cut", [2, 4, 6, 8])
def test_the_device_cuts_as_the_host_does(cut: int) -> None:
    """Of a CUDA graph with padding, whose requests the host did not know when it was captured."""
    from meshlm.workers.engine.triton_inputs import halves_of

    counts, starts = [1, 1, 5, 3, 0, 0], [9, 4, 2, 0, 0, 0]
    ends = torch.tensor(counts).cumsum(0).int()
    rows = torch.arange(10, 16).int()
    columns = Columns(rows, torch.tensor(starts).int(), ends, 6, torch.zeros(1))
    tokens = torch.arange(12)
    batch = StepInputs(tokens, tokens, (tokens,), (torch.zeros(1),), None, UNKNOWN, columns=columns)
    found = []
    for half in halves_of(batch, cut):
        assert half.columns is not None
        lens = half.columns.ends.diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()
        lines = zip(half.columns.rows.tolist(), half.columns.starts.tolist(), lens, strict=True)
        found.append([line for line in lines if line[2]])
    assert found == halved(counts[:4], starts[:4], cut)
    assert torch.cat([half.input_ids for half in halves_of(batch, cut)]).tolist() == tokens.tolist()


def test_decodes_are_cut_between_requests() -> None:
    from meshlm.workers.engine.triton_inputs import halves_of

    numbers = torch.arange(8).int()
    columns = Columns(numbers, numbers + 20, numbers + 1, 8, torch.zeros(1))
    batch = StepInputs(numbers, numbers, (numbers,), (numbers,), None, 8, columns=columns)
    first, second = halves_of(batch, 4)
    assert (first.num_decodes, second.num_decodes) == (4, 4)
    assert first.columns is not None
    assert second.columns is not None
    assert first.columns.ends.tolist() == second.columns.ends.tolist() == [1, 2, 3, 4]
    assert second.columns.starts.tolist() == [24, 25, 26, 27]


def test_a_prefix_that_is_computed_in_the_same_step() -> None:
    def plan(blocks: list[int], computed: list[int]) -> StepPlan:
        new = NewRow(Row(0), b"", 4, np.array(blocks, np.int32).tobytes(), SamplingParams())
        return StepPlan(
            1, StepId(1), b"", b"", b"", b"", 0, new_rows=[new], remembered=np.array(computed, np.int32).tobytes()
        )

    assert reads_across(plan([3, 4, 9], [8, 9]))
    assert not reads_across(plan([3, 4], [8, 9]))
    assert not reads_across(plan([3, 4], []))
