"""llama.cpp's samplers: what its source says, written out again in plain Python, the reference, the kernels and the whole samplers."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from device import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshlm.kernels.llama_samplers.reference import XTC_SALT, Chain, repeat_less, truncate
from meshlm.protocol.sampling import SamplingParams
from meshlm.workers.output.sampler import SampleRows, sample, uniforms
from meshlm.workers.rows.columns import COLUMNS, RowColumns

pytest.importorskip("triton")

from meshlm.kernels.llama_samplers import kernel
from meshlm.kernels.penalties.kernel import workspace

VOCAB, LENGTH = 301, 60
INF = torch.inf
BREAKER = 5


def chained(logits: list[float], params: SamplingParams, u: float) -> dict[int, float]:
    """What is left of the tokens, by the loops of llama.cpp."""
    left = [(x, token) for token, x in enumerate(logits) if x > -INF]
    if params.top_n_sigma > 0 and len(left) > 1:
        mean = sum(x for x, _ in left) / len(left)
        std = math.sqrt(sum((x - mean) ** 2 for x, _ in left) / len(left))
        most = max(left)[0]
        left = [one for one in left if one[0] >= most - params.top_n_sigma * std]
    if params.top_k > 0:
        left = sorted(left, reverse=True)[: params.top_k]

    def probabilities() -> list[float]:
        most = max(left)[0]
        weights = [math.exp(x - most) for x, _ in left]
        return [weight / sum(weights) for weight in weights]

    if params.typical_p < 1:
        p = probabilities()
        entropy = -sum(each * math.log(each) for each in p)
        order = sorted(range(len(left)), key=lambda n: abs(-math.log(p[n]) - entropy))
        mass, kept = 0.0, []
        for n in order:
            kept.append(left[n])
            mass += p[n]
            if mass > params.typical_p:
                break
        left = kept
    left.sort(reverse=True)
    if params.top_p < 1:
        mass = 0.0
        for n, each in enumerate(probabilities()):
            mass += each
            if mass >= params.top_p:
                left = left[: n + 1]
                break
    if params.min_p > 0:
        left = [one for one in left if one[0] >= left[0][0] + math.log(params.min_p)]
    if params.xtc_probability > 0 and params.xtc_threshold <= 0.5 and len(left) >= 2 and u <= params.xtc_probability:
        last = 0
        for n, each in enumerate(probabilities()):
            if each < params.xtc_threshold:
                break
            last = n
        left = left[last:]
    return {token: x for x, token in left}


def penalties(text: list[int], params: SamplingParams, breakers: set[int]) -> dict[int, float]:
    """What DRY takes from the logits, by token: the loops of llama.cpp, without its Z-algorithm."""
    last_n = len(text) if params.dry_penalty_last_n == -1 else min(len(text), params.dry_penalty_last_n)
    backwards = text[::-1][:last_n]
    if params.dry_multiplier == 0 or params.dry_base < 1 or last_n <= params.dry_allowed_length:
        return {}
    limit = next((n for n, token in enumerate(backwards) if token in breakers), last_n)
    if limit < params.dry_allowed_length:
        return {}
    longest: dict[int, int] = {}
    for back in range(1, last_n):
        repeat = 0
        while repeat + back < last_n and backwards[repeat] == backwards[repeat + back]:
            repeat += 1
        repeat = min(repeat, limit)
        if repeat >= params.dry_allowed_length:
            token = backwards[back - 1]
            longest[token] = max(longest.get(token, 0), repeat)
    most = int(88.7228391 / math.log(params.dry_base)) if params.dry_base > 1.000001 else 0
    found = {}
    for token, repeat in longest.items():
        power = repeat - params.dry_allowed_length
        power = min(power, most) if most else power
        found[token] = params.dry_multiplier * params.dry_base**power
    return found


CHAINS = [
    SamplingParams(),
    SamplingParams(top_n_sigma=1.0),
    SamplingParams(typical_p=0.5),
    SamplingParams(typical_p=0.9, top_k=40),
    SamplingParams(typical_p=0.0),
    SamplingParams(xtc_probability=1.0, xtc_threshold=0.02),
    SamplingParams(xtc_probability=1.0, xtc_threshold=0.6),
    SamplingParams(xtc_probability=0.5, xtc_threshold=0.01, min_p=0.05),
    SamplingParams(typical_p=0.99, top_p=0.3),
    SamplingParams(
        top_n_sigma=1.5, top_k=30, typical_p=0.8, top_p=0.7, min_p=0.1, xtc_probability=1.0, xtc_threshold=0.02
    ),
]
DRY = SamplingParams(dry_multiplier=0.8)
REPEATS = [
    SamplingParams(),
    DRY,
    msgspec.structs.replace(DRY, dry_allowed_length=0),
    msgspec.structs.replace(DRY, dry_allowed_length=4, dry_base=3.0),
    msgspec.structs.replace(DRY, dry_penalty_last_n=33),
    msgspec.structs.replace(DRY, dry_penalty_last_n=0),
    msgspec.structs.replace(DRY, dry_base=0.5),
    msgspec.structs.replace(DRY, dry_base=1.0, dry_multiplier=2.0),
    msgspec.structs.replace(DRY, dry_base=1e20),
]


class Case:
    """A row for each of the parameters, with a text of so many tokens of a few."""

    def __init__(self, params: Sequence[SamplingParams], dtype: torch.dtype = torch.float32) -> None:
        count = len(params)
        self.params, self.columns = list(params), RowColumns(count)
        dice = np.random.default_rng(0)
        self.tokens = np.zeros((count, LENGTH + 4), np.int32)
        self.tokens[:, :LENGTH] = dice.integers(0, 3, (count, LENGTH))
        self.tokens[:, 2:LENGTH:11] = BREAKER
        for row, one in enumerate(params):
            self.columns.set(row, msgspec.structs.replace(one, seed=row), num_prompt_tokens=3)
        self.breakers = torch.zeros(count, -(-VOCAB // 32), dtype=torch.int32, device=DEVICE)
        self.logits = (torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(1)) * 3).to(dtype).to(DEVICE)
        seeds = self.columns["seed"] ^ np.uint64(XTC_SALT)
        self.draws = uniforms(seeds, np.full(count, LENGTH - 3)).astype(np.float32)

    def on_device(self, name: str) -> Tensor:
        values = np.ascontiguousarray(self.columns[name])
        if values.dtype.itemsize == 8:
            values = values.view(np.int32).reshape(len(values), 2)
        return torch.from_numpy(values).to(DEVICE)

    def by_kernel(self, rows: list[int] | None = None, block: int = 64) -> Tensor:
        """rows: the lines are of these requests; None: one each."""
        state = {column.name: self.on_device(column.name) for column in COLUMNS if column.on_device}
        own = torch.arange(len(self.params), dtype=torch.int32, device=DEVICE)
        columns = own, torch.full_like(own, LENGTH - 1), own + 1
        places = None if rows is None else torch.tensor(rows, dtype=torch.int32, device=DEVICE)
        found = self.logits.clone() if rows is None else self.logits[rows].clone()
        counts = workspace(len(found), VOCAB, DEVICE)
        tokens = torch.from_numpy(self.tokens).to(DEVICE)
        kernel.llama_samplers(found, columns, places, state, self.breakers, tokens, counts, block=block)
        assert not counts.any()
        return found


def left(line: Tensor) -> set[int]:
    return set(torch.nonzero(line > -INF).flatten().tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chain(dtype: torch.dtype) -> None:
    case = Case(CHAINS, dtype)
    case.logits[2, 5:60] = -INF
    for row in range(len(CHAINS)):  # no two are equal, as llama.cpp keeps one of those that are
        line = case.logits[row]
        seen = torch.unique(line[line > -INF])
        case.logits[row, len(seen) :] = -INF
        case.logits[row, : len(seen)] = seen[torch.randperm(len(seen), generator=torch.Generator().manual_seed(row))]
    found = case.by_kernel()
    for row, params in enumerate(CHAINS):
        expected = chained(case.logits[row].double().tolist(), params, float(case.draws[row]))
        if not params.truncates_as_llama:
            assert torch.equal(found[row], case.logits[row]), "what top_k_top_p does"
            continue
        assert left(found[row]) == expected.keys(), params
        by_torch = case.logits[row].clone()
        truncate(by_torch, chain_of(params), float(case.draws[row]))
        assert torch.equal(found[row], by_torch)


def chain_of(params: SamplingParams) -> Chain:
    return Chain(*(getattr(params, name) for name in Chain._fields))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 1 << 30), st.floats(0, 1), st.floats(0, 3), st.integers(0, 40), st.floats(0.05, 1), st.floats(0, 0.5)
)
def test_the_chain_of_any_parameters(
    seed: int, typical: float, sigma: float, top_k: int, top_p: float, share: float
) -> None:
    line = torch.randn(90, generator=torch.Generator().manual_seed(seed)).double() * 3
    params = SamplingParams(
        typical_p=typical,
        top_n_sigma=sigma,
        top_k=top_k,
        top_p=top_p,
        min_p=share / 4,
        xtc_probability=0.5,
        xtc_threshold=share,
    )
    expected = chained(line.tolist(), params, 0.25)
    truncate(line, chain_of(params), 0.25)
    assert left(line) == expected.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("breaks", [False, True])
def test_repetitions(dtype: torch.dtype, breaks: bool) -> None:
    case = Case(REPEATS, dtype)
    if breaks:
        case.breakers[:, 0] = 1 << BREAKER
    found = case.by_kernel()
    penalised = 0
    for row, params in enumerate(REPEATS):
        text = case.tokens[row, :LENGTH]
        expected = case.logits[row].clone()
        for token, penalty in penalties(text.tolist(), params, {BREAKER} if breaks else set()).items():
            expected[token] = (expected[token].double() - penalty).to(dtype)
            penalised += 1
        near: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
        torch.testing.assert_close(found[row], expected, **near)
        if params.repeats_less:
            last_n, longest = int(case.columns["dry_last_n"][row]), int(case.columns["dry_longest"][row])
            some = torch.from_numpy(text[-last_n:] if last_n < LENGTH else text).to(DEVICE)
            by_torch = case.logits[row].clone()
            dry = params.dry_multiplier, params.dry_base, params.dry_allowed_length, longest
            repeat_less(by_torch, some, (some == BREAKER) & breaks, dry)
            torch.testing.assert_close(by_torch, expected, **near)
    assert penalised > (3 if breaks else 10)


def test_lines_of_chosen_places_and_neighbours_change_nothing() -> None:
    case = Case([*CHAINS, *REPEATS])
    alone = case.by_kernel()
    rows = [12, 3, 0, 9, 17, 5, 11]
    assert torch.equal(case.by_kernel(rows, block=128), alone[rows])


def test_places_of_vectors_repeat_nothing() -> None:
    case = Case([DRY])
    case.tokens[0, :LENGTH] = -1
    assert torch.equal(case.by_kernel(), case.logits)


@pytest.mark.parametrize("spoilt", [torch.nan, INF])
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN slice")  # the interpreter's numpy
def test_lines_that_nothing_can_be_drawn_of_stay_as_they_are(spoilt: float) -> None:
    case = Case(CHAINS)
    case.logits[:, 7] = spoilt
    assert torch.equal(case.by_kernel().nan_to_num(), case.logits.nan_to_num())
    case.logits[:] = -INF
    assert torch.equal(case.by_kernel(), case.logits)


def test_the_general_sampler_draws_of_what_is_left() -> None:
    """Greedy and drawn; its neighbours are as they would be alone."""
    params = [
        SamplingParams(temperature=0.0, xtc_probability=1.0, xtc_threshold=0.01),
        SamplingParams(temperature=0.7, seed=1, typical_p=0.4),
        SamplingParams(temperature=1.0, seed=2, top_n_sigma=0.5, top_k=3),
        SamplingParams(temperature=0.0),
        msgspec.structs.replace(DRY, temperature=0.0, dry_multiplier=100.0, dry_allowed_length=1),
    ]
    case = Case(params)
    case.tokens[4, LENGTH - 3 : LENGTH] = case.tokens[4, LENGTH - 6 : LENGTH - 3]
    case.logits[4, case.tokens[4, LENGTH - 3]] = 30.0
    rows, lens = np.arange(5, dtype=np.int32), np.full(5, LENGTH)
    at = SampleRows(rows, lens - 3, lens, np.full(5, 3))
    tokens = torch.from_numpy(case.tokens).to(DEVICE)
    found = sample(case.logits.clone(), at, case.columns, tokens).tolist()
    kept = [chained(line, one, float(u)) for line, one, u in zip(case.logits.tolist(), params, case.draws, strict=True)]
    assert found[0] == max(kept[0], key=lambda token: kept[0][token]) != int(case.logits[0].argmax())
    assert found[1] in kept[1]
    assert found[2] in kept[2]
    assert len(kept[2]) <= 3
    assert found[3] == int(case.logits[3].argmax())
    assert found[4] != int(case.logits[4].argmax()), "it would have said the same again"
