"""The sampler against sort-based references, and the draws' distribution."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.kernels.sample.outcomes import NONE_LEFT, NOT_NUMBERS
from meshlm.protocol.sampling import SamplingParams
from meshlm.workers.output.logprobs import LEAST, columns
from meshlm.workers.output.sampler import SampleRows, process, sample, uniforms
from meshlm.workers.rows.columns import ALWAYS, RowColumns, edits

VOCAB = 50


def draw(
    logits: torch.Tensor, params: list[SamplingParams], index: int = 0, history: list[list[int]] | None = None
) -> list[int]:
    n = len(params)
    table = RowColumns(n)
    tokens = torch.zeros(n, 64, dtype=torch.int32)
    lens = np.ones(n, np.int64)
    for row, one in enumerate(params):
        table.set(row, one)
        if history:
            tokens[row, : len(history[row])] = torch.tensor(history[row], dtype=torch.int32)
            lens[row] = len(history[row])
    prompt = np.minimum(lens, 2)
    at = SampleRows(np.arange(n, dtype=np.int32), np.full(n, index), lens, prompt)
    found: list[int] = sample(logits.clone(), at, table, tokens).tolist()
    return found


def test_what_tokens_are_chosen_by() -> None:
    """Greedy rows by logits with penalties, the others by those with temperature and truncation, too."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    table = RowColumns(2)
    for row, temperature in enumerate((0.0, 0.5)):
        table.set(row, SamplingParams(temperature=temperature, top_k=4, logit_bias={7: 30.0}))
    at = SampleRows(np.arange(2, dtype=np.int32), np.zeros(2, np.int64), np.ones(2, np.int64), np.ones(2, np.int64))
    found = process(logits.clone(), at, table, torch.zeros(2, 64, dtype=torch.int32)).final()
    logits[:, 7] += 30
    assert torch.equal(found[0], logits[0])
    scaled = logits[1] / 0.5
    assert torch.equal(found[1], scaled.masked_fill(scaled < scaled.topk(4).values[-1], -torch.inf))
    told = columns(found, torch.tensor([7, 3]), 6)
    assert np.frombuffer(told.logprobs, np.float32)[1] == LEAST, "JSON has no infinity"


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, 7] = logits[1, 9] = 3.0
    assert draw(logits, [SamplingParams(temperature=0)] * 2) == [0, 7]


def test_frequencies_follow_the_softmax() -> None:
    torch.manual_seed(0)
    logits = torch.randn(VOCAB)
    n = 20_000
    params = [SamplingParams(seed=seed) for seed in range(n)]
    counts = np.bincount(draw(logits.expand(n, -1), params), minlength=VOCAB)
    expected = logits.softmax(0).numpy() * n
    assert ((counts - expected) ** 2 / expected).sum() < 100  # chi-squared with 49 degrees: p < 1e-4 above


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 60), st.floats(0.05, 1.0), st.floats(0.0, 0.5), st.integers(0, 1000))
def test_only_allowed_tokens_are_drawn(top_k: int, top_p: float, min_p: float, seed: int) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    n = 200
    many = [SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, seed=s) for s in range(n)]
    allowed = reference_set(logits, params)
    assert set(draw(logits.expand(n, -1), many)) <= allowed


def reference_set(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """min-p, then the k likeliest, then the smallest set of mass top_p."""
    probabilities = logits.softmax(0)
    keep = probabilities >= params.min_p * probabilities.max() * (1 - 1e-5)
    values = torch.where(keep, logits, -torch.inf)
    order = values.argsort(descending=True).tolist()
    if 0 < params.top_k < VOCAB:
        order = order[: params.top_k]
    order = [token for token in order if keep[token]]
    mass = values[order].softmax(0)
    before = mass.cumsum(0) - mass
    return {token for token, b in zip(order, before.tolist(), strict=True) if b < params.top_p + 1e-5}


def test_draws_depend_on_seed_and_index_only() -> None:
    logits = torch.randn(3, VOCAB)
    alone = [draw(logits[i : i + 1], [SamplingParams(seed=i)], index=5)[0] for i in range(3)]
    assert draw(logits, [SamplingParams(seed=i) for i in range(3)], index=5) == alone


def test_uniforms_are_in_range_and_differ() -> None:
    values = uniforms(np.arange(1000, dtype=np.uint64), np.zeros(1000, np.int64))
    assert values.min() >= 0
    assert values.max() < 1
    assert len(set(values.tolist())) == 1000
    assert abs(values.mean() - 0.5) < 0.05


def test_penalties() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [3, 4, 5]] = torch.tensor([2.0, 1.9, 1.8])
    history = [[3, 9, 4, 4]]  # two of the prompt, two of the output
    assert draw(logits, [SamplingParams(temperature=0)], history=history) == [3]
    assert draw(logits, [SamplingParams(temperature=0, repetition_penalty=2.0)], history=history) == [5]
    assert draw(logits, [SamplingParams(temperature=0, presence_penalty=1.0)], history=history) == [3]
    logits[0, 4] = 3.0
    assert draw(logits, [SamplingParams(temperature=0, frequency_penalty=0.6)], history=history) == [3]


def test_bias_allowed_and_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 5.0
    assert draw(logits, [SamplingParams(temperature=0, logit_bias={8: 50.0})]) == [8]
    assert draw(logits, [SamplingParams(temperature=0, allowed_token_ids=(11, 12))]) == [11]
    blocked = SamplingParams(temperature=0, min_tokens=2, eos_token_ids=(3,))
    assert draw(logits, [blocked], index=1) == [0]
    assert draw(logits, [blocked], index=2) == [3]
    later = SamplingParams(temperature=0, begin_suppress_token_ids=(3,))
    assert draw(logits, [later], index=0) == [0]
    assert draw(logits, [later], index=1) == [3]


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(allowed_token_ids=(5, 6), bad_words_token_ids=((5,), (6,))),
        SamplingParams(allowed_token_ids=(9,), min_tokens=3, eos_token_ids=(9,)),
        SamplingParams(min_tokens=1, stop_token_ids=tuple(range(VOCAB))),
        SamplingParams(allowed_token_ids=(4,), begin_suppress_token_ids=(4,), top_k=3, top_p=0.5, min_p=0.2),
    ],
)
def test_a_row_that_nothing_is_left_for_gets_no_token(params: SamplingParams, heat: float) -> None:
    """Not token 0 or the last one; its neighbours get theirs."""
    params = msgspec.structs.replace(params, temperature=heat)
    plain = SamplingParams(temperature=0.0, allowed_token_ids=(7,))
    drawn = SamplingParams(temperature=1.0, seed=3)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    first, none, last = draw(logits, [plain, params, drawn])
    assert (first, none) == (7, NONE_LEFT)
    assert last == draw(logits[2:], [drawn])[0]


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", [slice(None), slice(3, 4), slice(VOCAB - 1, None)])
def test_logits_that_are_not_numbers_give_no_token(spoilt: float, where: slice) -> None:
    """Also beside an allowlist, which is not at fault. The largest of logits may be infinite where nothing is drawn."""
    logits = torch.zeros(5, VOCAB)
    logits[:, where] = spoilt
    params = [SamplingParams(temperature=heat) for heat in (0.0, 1.0)]
    params += [
        SamplingParams(top_k=4, top_p=0.9),
        SamplingParams(min_p=0.1),
        SamplingParams(allowed_token_ids=(3, VOCAB - 1)),
    ]
    greedy, *drawn = draw(logits, params)
    assert drawn == [NOT_NUMBERS] * 4
    assert greedy == (NOT_NUMBERS if spoilt is torch.nan else where.start or 0)


def test_logprob_columns() -> None:
    logits = torch.randn(2, VOCAB)
    found = columns(logits, torch.tensor([4, 5]), 3)
    logprobs = logits.log_softmax(-1)
    np.testing.assert_allclose(np.frombuffer(found.logprobs, np.float32), [logprobs[0, 4], logprobs[1, 5]], rtol=1e-5)
    rank = int((logprobs[0] > logprobs[0, 4]).sum()) + 1
    assert np.frombuffer(found.ranks, np.int32)[0] == rank
    assert np.frombuffer(found.top_ids, np.int32).tolist() == logits.topk(3).indices.flatten().tolist()


def test_prompt_logprobs_are_wanted_as_long_as_prompt_tokens_follow() -> None:
    """Not of the decodes behind them, which stay in their CUDA graph."""
    table = RowColumns(3)
    for row, width in enumerate((0, -1, 5)):
        table.set(row, SamplingParams(prompt_logprobs=width), num_prompt_tokens=10)
    rows = np.array([0, 1, 2, 2, 2], np.int32)
    starts = np.array([0, 0, 8, 9, 10], np.int32)  # the last token of a prompt is followed by none of it
    assert table.prompts_with_logprobs(rows, starts).tolist() == [0, 2]


def test_a_bad_word_is_banned_where_its_begin_stands_in_the_output() -> None:
    """Rows with the same output and other words; a word's begin in the prompt, or across its end, does not count."""
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 8]] = torch.tensor([5.0, 4.0])
    history = [1, 2, 3, 4]  # two of the prompt, two of the output
    banned = [((7,),), ((4, 7),), ((3, 4, 7),), ((5, 7), (3, 4, 7)), ((9,), (4, 7), (4, 8))]
    free = [((4, 8),), ((3, 7),), ((2, 3, 4, 7),), ((1, 2, 3, 4, 7),), ((7, 4),), ((3, 4, 3, 4, 5, 7),)]

    def drawn(words: Sequence[tuple[tuple[int, ...], ...]]) -> list[int]:
        params = [SamplingParams(temperature=0, bad_words_token_ids=each) for each in words]
        return draw(logits.expand(len(words), -1), params, history=[history] * len(words))

    assert drawn(banned) == [8, 8, 8, 8, 0]
    assert drawn(free) == [7] * len(free)


def test_bad_words_of_one_token_are_the_kernels_and_others_torchs() -> None:
    one, two = SamplingParams(bad_words_token_ids=((7,), (8,))), SamplingParams(bad_words_token_ids=((7, 8),))
    assert edits(one) == [(7, -np.inf, ALWAYS), (8, -np.inf, ALWAYS)]
    assert edits(two) is None
    both = SamplingParams(bad_words_token_ids=((7,),), logit_bias={7: 3.0})
    assert edits(both) is None  # an id stands once in what the kernels take


def test_tokens_that_come_not_first_are_the_kernels() -> None:
    """A stop token that min_tokens holds back longer stands there once."""
    params = SamplingParams(begin_suppress_token_ids=(4, 5), min_tokens=3, eos_token_ids=(5,))
    assert edits(params) == [(5, -np.inf, 3), (4, -np.inf, 1)]
    table, rows = RowColumns(2), np.array([0, 1], np.int32)
    table.set(0, SamplingParams(begin_suppress_token_ids=(4,), logit_bias={4: 1.0}))
    table.set(1, SamplingParams(begin_suppress_token_ids=tuple(range(20))))
    assert table.need_torch(rows, np.array([0, 0])).tolist() == [0, 1]
    assert table.need_torch(rows, np.array([1, 1])).tolist() == [0], "a bias counts always"
