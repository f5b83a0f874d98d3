"""Steps that verify drafts give the text of plain steps, token by token, with its log-probabilities, whatever is drafted."""

import json
import re
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tokenizers
import torch
from byte_vocabulary import EOS, byte_vocabulary, of_regex
from cpu_steps import LENGTH, MODEL, PROMPTS, VOCAB, new, tokens_of
from drafted_steps import Scripted, add, begun, decode, plain, verify
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.protocol.config.speculative import SpeculativeConfig
from meshlm.protocol.edges.step import NewRow
from meshlm.protocol.extras import Extras
from meshlm.protocol.grammar import ThinkingBudget
from meshlm.protocol.sampling import SamplingParams
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.kit import TorchInputs
from meshlm.workers.engine.make import make_engine
from meshlm.workers.engine.pending import Timeline
from meshlm.workers.output.grammars import GrammarRows, Grammars
from meshlm.workers.output.matchers import Matchers
from meshlm.workers.rows.step_columns import Drafts as Verified
from meshlm.workers.rows.step_columns import columns_of
from meshlm.workers.speculative import drafters
from meshlm.workers.speculative.verification import Verification

TOKENS, MOST = 14, 5
SPECULATIVE = SpeculativeConfig(method="ngram", num_speculative_tokens=MOST)
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=1.0, seed=7, top_k=40, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(
        temperature=0.7, seed=3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4
    ),
    "lists": SamplingParams(
        temperature=0.0,
        min_tokens=6,
        eos_token_ids=tuple(range(40, 90)),
        logit_bias={5: 2.0},
        bad_words_token_ids=((7, 8), (9,)),
    ),
    "allowed": SamplingParams(
        temperature=1.2, seed=11, allowed_token_ids=tuple(range(30, 36)), bad_words_token_ids=((31, 32),)
    ),
    "llama": SamplingParams(temperature=1.0, seed=5, dry_multiplier=0.8, xtc_probability=0.5, xtc_threshold=0.05),
    "logprobs": SamplingParams(temperature=0.9, seed=2, logprobs=3, repetition_penalty=1.2),
    "ids": SamplingParams(temperature=0.0, logprobs=2, logprob_token_ids=(4, 9)),
    "regex": SamplingParams(temperature=1.0, seed=4, eos_token_ids=(EOS,), logprobs=1),
    "reasoning": SamplingParams(temperature=1.0, seed=6, eos_token_ids=(EOS,), allowed_token_ids=(*b"\n01ab",)),
    "budget": SamplingParams(temperature=0.0, eos_token_ids=(EOS,)),
}
DIGITS = of_regex("[0-9]{2,6}")
EXTRAS: dict[str, Extras] = {
    "regex": (of_regex("[a-c]{2}([0-9]{2}-)+[a-c]?"),),
    "reasoning": (msgspec.structs.replace(DIGITS, begins_after="\n"),),
    "budget": (msgspec.structs.replace(DIGITS, begins_after="</t>", thinking=ThinkingBudget(3, "</t>")),),
}


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, scripted: Scripted) -> Iterator[ModelEngine]:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    values: dict[str, object] = {"model": str(folder), "device": "cpu", "load_format": "dummy", "dtype": "float32"}
    values |= {"max_model_len": LENGTH, "max_num_seqs": 4, "cpu_threads": 1}
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    config = msgspec.structs.replace(resolve.resolve(flags.build(values, None)), speculative=SPECULATIVE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(drafters, "drafter_of", lambda made: scripted)
        found = make_engine(config, lambda *progress: None)
    scripted.tokens = found.rows.tokens.numpy()
    found.extras.kind(GrammarRows).grammars = Grammars(Matchers(lambda: byte_vocabulary(VOCAB)))
    yield found
    torch.set_grad_enabled(grad)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "kinds",
    [
        ("greedy", "seeded", "penalties"),
        ("lists", "allowed", "llama"),
        ("logprobs", "ids", "seeded"),
        ("regex", "reasoning", "budget"),
        ("seeded", "regex", "logprobs"),
    ],
)
def test_any_drafts_give_the_text_of_plain_steps(made: ModelEngine, scripted: Scripted, kinds: tuple[str, ...]) -> None:
    params, extras = [KINDS[kind] for kind in kinds], [EXTRAS.get(kind, ()) for kind in kinds]
    expected = plain(made, params, TOKENS + MOST + 1, extras)
    scripted.texts = {
        row: prompt + text.tokens for row, (prompt, text) in enumerate(zip(PROMPTS, expected, strict=True))
    }

    if "reasoning" in kinds:
        assert re.fullmatch(rb"[01ab]+\n[01]{2,6}\x02*", bytes(expected[kinds.index("reasoning")].tokens))

    @settings(max_examples=40)
    @given(
        st.lists(st.tuples(st.integers(0, MOST), st.integers(0, MOST + 2)), min_size=1, max_size=8),
        st.lists(st.integers(0, MOST), min_size=1, max_size=5),
        st.lists(st.permutations([0, 1, 2]), min_size=1, max_size=3),
    )
    def holds(script: list[tuple[int, int]], allowed: list[int], orders: list[list[int]]) -> None:
        scripted.script = (entry for _ in repeat(0) for entry in script)
        texts, nth = begun(made, params, extras), 0
        while min(len(text.tokens) for text in texts) < TOKENS:
            rows = [row for row in orders[nth % len(orders)] if len(texts[row].tokens) < TOKENS]
            most = [min(allowed[(nth + row) % len(allowed)], TOKENS - 1 - len(texts[row].tokens)) for row in rows]
            most = [max(0, one) for one in most]
            result = decode(made, rows, most)
            drafted = np.frombuffer(result.drafted, np.int32) if result.drafted else np.zeros(len(rows), np.int32)
            assert (drafted <= most).all()
            add(texts, result, rows)
            nth += 1
        for text, wanted in zip(texts, expected, strict=True):
            assert text.tokens == wanted.tokens[: len(text.tokens)]
            assert text.logprobs == wanted.logprobs[: len(text.logprobs)]
            assert len(text.logprobs) in (0, len(text.tokens))

    holds()


def test_right_drafts_are_kept_whole(made: ModelEngine, scripted: Scripted) -> None:
    params = [KINDS["seeded"]] * 3
    expected = plain(made, params, TOKENS + MOST + 1)
    scripted.texts = {
        row: prompt + text.tokens for row, (prompt, text) in enumerate(zip(PROMPTS, expected, strict=True))
    }
    scripted.script = iter([(5, 9), (5, 0), (5, 3)])
    begun(made, params)
    result = decode(made, [0, 1, 2], [5, 5, 5])
    assert np.frombuffer(result.counts, np.int32).tolist() == [6, 1, 4]
    assert np.frombuffer(result.drafted, np.int32).tolist() == [5, 5, 5]


def test_a_row_begins_anew_with_all_its_tokens(made: ModelEngine, scripted: Scripted) -> None:
    """After a preemption, in the middle of what was drafted."""
    params = [KINDS["penalties"]] * 3
    expected = plain(made, params, TOKENS + MOST + 1)
    scripted.texts = {
        row: prompt + text.tokens for row, (prompt, text) in enumerate(zip(PROMPTS, expected, strict=True))
    }
    scripted.script = repeat((5, 2))
    texts = begun(made, params)
    add(texts, decode(made, [0, 1, 2], [5, 5, 5]), [0, 1, 2])
    tokens = PROMPTS[1] + texts[1].tokens
    row = new(1, tokens, params[1])
    again = NewRow(row.row, row.token_ids, len(PROMPTS[1]), row.block_ids, row.sampling)
    add(texts, verify(made, [(0, 0, 1), (1, 0, len(tokens))], [5, 0], (again,)), [0, 1])
    add(texts, decode(made, [0, 1, 2], [3, 3, 3]), [0, 1, 2])
    for text, wanted in zip(texts, expected, strict=True):
        assert text.tokens == wanted.tokens[: len(text.tokens)]
    assert [len(text.tokens) for text in texts] == [10, 8, 7]


def test_a_token_that_may_not_come_ends_its_row_alone(made: ModelEngine, scripted: Scripted) -> None:
    """A draft is token 0, and before it stands no token at all: that is no match."""
    none = SamplingParams(temperature=0.0, allowed_token_ids=(3,), bad_words_token_ids=((3,),), min_tokens=1)
    params = [KINDS["greedy"], KINDS["seeded"], KINDS["greedy"]]
    expected = plain(made, params, TOKENS + MOST + 1)
    scripted.texts = {
        row: prompt + text.tokens for row, (prompt, text) in enumerate(zip(PROMPTS, expected, strict=True))
    }
    begun(made, params)
    ends = new(0, [*PROMPTS[0]], none)
    scripted.texts[0] = PROMPTS[0] + [0] * 20
    scripted.script = repeat((3, 9))
    result = verify(made, [(0, 0, len(PROMPTS[0])), (1, 0, 1)], [0, 3], (ends,))
    assert list(result.failed) == [0], "no token is left"
    result = verify(made, [(0, 0, 1), (1, 0, 1)], [3, 3])
    assert list(result.failed) == [0]
    assert np.frombuffer(result.counts, np.int32).tolist() == [1, 4]
    assert tokens_of(result)[1:] == expected[1].tokens[5:9]


def test_acceptance_by_chance(made: ModelEngine, scripted: Scripted) -> None:
    """Drafts are kept as often as the rates say, whatever the model says: to compare engines with weights that mean nothing."""
    rates = (0.8, 0.5, 0.2)
    config = SpeculativeConfig(
        method="ngram", num_speculative_tokens=3, rejection_sample_method="synthetic", synthetic_acceptance_rates=rates
    )
    assert isinstance(made.inputs, TorchInputs)
    verification = Verification(config, scripted, made.rows, made.inputs, staged=False)
    verification._num_known[:] = 20
    kept = np.zeros(4, np.int64)
    for turn in range(400):
        made.rows.table.columns["seed"][:3] = np.arange(3) + 3 * turn
        verification._num_known[:] = 20
        columns = columns_of(np.arange(3, dtype=np.int32), np.full(3, 19, np.int32), np.full(3, 4, np.int32))
        columns.drafts = Verified(np.full(3, 3, np.int32), np.zeros(9, np.int32))
        sampled = torch.full((12,), 5, dtype=torch.int32)
        tokens, counts, _ = verification.accept(columns, sampled, torch.empty(0), Timeline()).told()
        assert counts is not None
        assert (tokens[np.cumsum(counts) - 1][counts < 4] != 0).all(), "what differs is no draft"
        kept += np.bincount(counts - 1, minlength=4)
    shares = 1 - np.cumsum(kept)[:3] / kept.sum()
    np.testing.assert_allclose(shares, rates, atol=0.05)


def test_a_grammar_is_kept_to_where_drafts_are_accepted_by_chance(made: ModelEngine, scripted: Scripted) -> None:
    config = SpeculativeConfig(
        method="ngram", num_speculative_tokens=3, rejection_sample_method="synthetic", synthetic_acceptance_rates=(1.0, 1.0, 1.0)
    )  # fmt: skip
    assert isinstance(made.inputs, TorchInputs)
    verification = Verification(config, scripted, made.rows, made.inputs, staged=False)
    prompt = new(0, PROMPTS[0], KINDS["regex"])
    for extras, wanted in ((EXTRAS["regex"], [9, 5]), ((), [9, 9, 9, 5])):
        verification.add_row(msgspec.structs.replace(prompt, extras=extras))
        known = len(PROMPTS[0])
        columns = columns_of(np.zeros(1, np.int32), np.array([known - 1], np.int32), np.array([4], np.int32))
        columns.drafts = Verified(np.array([3], np.int32), np.full(3, 9, np.int32))
        sampled = torch.tensor([9, 5, 9, 5], dtype=torch.int32)
        tokens, *_ = verification.accept(columns, sampled, torch.empty(0), Timeline()).told()
        assert tokens.tolist() == wanted
