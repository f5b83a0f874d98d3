"""What a GPU computes of steps with drafts, by the interpreter: the text of plain steps, token by token, with its log-probabilities."""

import json
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

pytest.importorskip("triton")

from cpu_steps import LENGTH, MODEL, PROMPTS, VOCAB, tokens_of
from drafted_steps import Text, add, begun, decode, plain, row_of, verify
from host_drafter import HostDrafter
from interpreted_engine import interpreted

from meshlm.protocol.edges.step import StepPlan
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import StepId
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.speculative.device_verification import DeviceVerification

if torch.cuda.is_available():
    pytest.skip("these tensors are on the CPU, where kernels run in the interpreter", allow_module_level=True)

TOKENS, MOST = 9, 3
NGRAM = {"method": "ngram", "num_speculative_tokens": MOST, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=1.0, seed=7, top_k=40, top_p=0.9),
    "penalties": SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.3, presence_penalty=0.5),
    "bias": SamplingParams(temperature=0.0, logit_bias={5: 2.0}, min_tokens=6, eos_token_ids=tuple(range(40, 48))),
    "allowed": SamplingParams(temperature=1.2, seed=11, allowed_token_ids=tuple(range(30, 36))),
    "logprobs": SamplingParams(temperature=0.9, seed=2, logprobs=3),
    "ids": SamplingParams(temperature=0.0, logprobs=2, logprob_token_ids=(4, 9)),
}


class Scripted(HostDrafter):
    """Guesses what a test says: each row's own future, wrong in places."""

    def __init__(self, rows: DeviceRows) -> None:
        super().__init__(rows, self.guesses)
        self.texts: dict[int, list[int]] = {}  # by row
        self.script: Iterator[int] = cycle([MOST])  # which of the drafts is wrong

    def guesses(self, row: int, known: list[int], count: int) -> list[int]:
        wrong, text = next(self.script), self.texts[row]
        assert known == text[: len(known)], "what is known is what really stands there"
        return [abs(token - (at == wrong)) for at, token in enumerate(text[len(known) : len(known) + count])]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelEngine]:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    values: dict[str, object] = {"model": str(folder), "device": "cpu", "load_format": "dummy", "dtype": "float32"}
    values |= {"max_model_len": LENGTH, "max_num_seqs": 4, "cpu_threads": 1, "speculative_config": json.dumps(NGRAM)}
    with interpreted(values) as engine:
        yield engine


@pytest.fixture
def scripted(made: ModelEngine) -> Iterator[Scripted]:
    verification = made.verification
    assert isinstance(verification, DeviceVerification)
    usual, found = verification.drafter, Scripted(made.rows)
    verification.drafter = found
    yield found
    verification.drafter = usual


def told(scripted: Scripted, made: ModelEngine, kinds: tuple[str, ...]) -> tuple[list[SamplingParams], list[Text]]:
    """Parameters of all rows, and their texts by plain steps, which the drafter is told."""
    params = [KINDS[kind] for kind in kinds]
    texts = plain(made, params, TOKENS + MOST + 1)
    scripted.texts = {row: prompt + text.tokens for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True))}
    return params, texts


@pytest.mark.parametrize("kinds", [("greedy", "seeded", "penalties"), ("bias", "ids", "logprobs")])
def test_any_drafts_give_the_text_of_plain_steps(
    made: ModelEngine, scripted: Scripted, kinds: tuple[str, str, str]
) -> None:
    """Rows in any order, with any numbers of drafts, some of them wrong: twice, by chance."""
    params, expected = told(scripted, made, kinds)
    dice = np.random.default_rng(len(kinds[0]))
    scripted.script = iter(dice.integers(0, MOST + 1, 1000).tolist())
    for _ in range(2):
        texts = begun(made, params)
        while min(len(text.tokens) for text in texts) < TOKENS:
            rows = [row for row in dice.permutation(3).tolist() if len(texts[row].tokens) < TOKENS]
            most = [min(int(dice.integers(0, MOST + 1)), TOKENS - 1 - len(texts[row].tokens)) for row in rows]
            result = decode(made, rows, most)
            drafted = np.frombuffer(result.drafted, np.int32) if result.drafted else np.zeros(len(rows), np.int32)
            assert (drafted <= most).all()
            add(texts, result, rows)
        for text, wanted in zip(texts, expected, strict=True):
            assert text.tokens == wanted.tokens[: len(text.tokens)]
            assert len(text.logprobs) in (0, len(text.tokens))
            for ours, theirs in zip(text.logprobs, wanted.logprobs, strict=False):
                assert ours.top_ids == theirs.top_ids
                near = [np.frombuffer(each.top_logprobs, np.float32) for each in (ours, theirs)]
                np.testing.assert_allclose(near[0], near[1], atol=1e-4)


def test_right_drafts_are_kept_whole(made: ModelEngine, scripted: Scripted) -> None:
    params, _ = told(scripted, made, ("seeded",) * 3)
    scripted.script = iter([9, 0, 2])
    begun(made, params)
    result = decode(made, [0, 1, 2], [MOST] * 3)
    assert np.frombuffer(result.counts, np.int32).tolist() == [4, 1, 3]
    assert np.frombuffer(result.drafted, np.int32).tolist() == [MOST] * 3


def test_steps_are_planned_before_the_last_is_known(made: ModelEngine, scripted: Scripted) -> None:
    """Plans say the most that rows may have; results are read later."""
    params, expected = told(scripted, made, ("greedy", "seeded", "penalties"))
    texts, starts = begun(made, params), [len(prompt) for prompt in PROMPTS]
    scripted.script = cycle([1, 9, 0, 2])
    order, most, pending = np.arange(3, dtype=np.int32).tobytes(), np.full(3, MOST, np.int32).tobytes(), []
    for nth in range(3):
        planned = np.array([start + nth * (1 + MOST) for start in starts], np.int32).tobytes()
        plan = StepPlan(1, StepId(nth + 2), order, planned, b"", b"", 3 * (1 + MOST), num_drafts=most)
        pending.append(made.step(plan, 0))
        add(texts, pending[-1].wait(), [0, 1, 2])
    for text, wanted in zip(texts, expected, strict=True):
        assert text.tokens == wanted.tokens[: len(text.tokens)]
    known = made.rows.columns["num_known"][:3].tolist()
    assert known == [len(prompt) + len(text.tokens) for prompt, text in zip(PROMPTS, texts, strict=True)]


def test_a_row_begins_anew_beside_others_that_draft(made: ModelEngine, scripted: Scripted) -> None:
    """A mixed step, after a preemption in the middle of what was drafted; chunks of its prompt beside drafts."""
    params, expected = told(scripted, made, ("penalties", "greedy", "seeded"))
    scripted.script = cycle([2])
    texts = begun(made, params)
    add(texts, decode(made, [0, 1, 2], [MOST] * 3), [0, 1, 2])
    tokens = PROMPTS[1] + texts[1].tokens
    again = row_of(made, 1, tokens, len(PROMPTS[1]), params[1])
    add(texts, verify(made, [(0, LENGTH - 20, 1), (1, 0, len(tokens))], [MOST, 0], (again,)), [0, 1])
    add(texts, decode(made, [2, 0, 1], [MOST] * 3), [2, 0, 1])
    for text, wanted in zip(texts, expected, strict=True):
        assert text.tokens == wanted.tokens[: len(text.tokens)]
    assert [len(text.tokens) for text in texts] == [10, 8, 7]


def test_prompt_lookup(made: ModelEngine) -> None:
    """Of a text that repeats itself; no match drafts nothing."""
    params = [KINDS["greedy"]] * 3
    expected, texts, drafted = plain(made, params, TOKENS), begun(made, params), 0
    while min(len(text.tokens) for text in texts) < TOKENS:
        result = decode(made, [0, 1, 2], [MOST] * 3)
        drafted += int(np.frombuffer(result.drafted, np.int32).sum())
        assert len(tokens_of(result)) == np.frombuffer(result.counts, np.int32).sum()
        add(texts, result, [0, 1, 2])
    for text, wanted in zip(texts, expected, strict=True):
        assert text.tokens[:TOKENS] == wanted.tokens[:TOKENS]
    assert max(max(text.tokens) for text in texts) < VOCAB


def test_rows_whose_tokens_the_host_must_know_draft_nothing(made: ModelEngine, scripted: Scripted) -> None:
    """The result says so, also where no other row drafts."""
    params, expected = told(scripted, made, ("allowed",) * 3)
    texts = begun(made, params)
    for _ in range(3):
        result = decode(made, [0, 1, 2], [MOST] * 3)
        assert np.frombuffer(result.counts, np.int32).tolist() == [1] * 3
        assert np.frombuffer(result.drafted, np.int32).tolist() == [0] * 3
        add(texts, result, [0, 1, 2])
    for text, wanted in zip(texts, expected, strict=True):
        assert text.tokens == wanted.tokens[:4]
