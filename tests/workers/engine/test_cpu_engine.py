"""The engine on a CPU, stepped as a scheduler would: chunks, decodes and neighbours give the model's tokens and log-probabilities."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
import torch
from byte_vocabulary import EOS, byte_vocabulary, of_regex
from cpu_steps import LENGTH, MODEL, OUTPUT, PROMPTS, VOCAB, alone, new, step, tokens_of
from llguidance import LLMatcher

from meshlm.protocol.edges.control import GraphCounts
from meshlm.protocol.edges.step import NewRow
from meshlm.protocol.prompt_embeds import PromptEmbeds
from meshlm.protocol.samplers import SequenceBreakers
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.make import make_engine
from meshlm.workers.output.grammars import GrammarRows, Grammars
from meshlm.workers.output.matchers import Matchers
from meshlm.workers.rows.extras.prompt_inputs import PromptEmbedsRows


@pytest.fixture(scope="module", params=["cpu", "torch"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelEngine]:
    """By the compiled kernels, and by plain torch, which is what a GPU without Triton runs."""
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    values: dict[str, object] = {"model": str(folder), "device": "cpu", "load_format": "dummy", "dtype": "float32"}
    values |= {
        "max_model_len": LENGTH,
        "max_num_seqs": 4,
        "attention_backend": request.param,
        "cpu_threads": 1,
        "enable_prompt_embeds": True,
    }
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    yield make_engine(resolve.resolve(flags.build(values, None)), lambda *progress: None)
    torch.set_grad_enabled(grad)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_chunks_and_neighbours_change_nothing(made: ModelEngine, temperature: float) -> None:
    params = [SamplingParams(temperature=temperature, seed=5 + row, top_k=50) for row in range(3)]
    expected = [alone(made, prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
    news = [new(row, prompt, each) for row, (prompt, each) in enumerate(zip(PROMPTS, params, strict=True))]
    found: list[list[int]] = [[], [], []]
    found[0] += tokens_of(step(made, [(0, 0, 5, True)], news[:1]))
    found[0] += tokens_of(step(made, [(0, 5, 1, True), (2, 0, 20, False)], news[2:]))  # the first chunk samples nothing
    mixed = tokens_of(step(made, [(0, 6, 1, True), (1, 0, 25, True), (2, 20, 25, True)], news[1:2]))
    for row in range(3):
        found[row].append(mixed[row])
    for _ in range(OUTPUT - 1):
        decodes = [(row, len(PROMPTS[row]) + len(found[row]) - 1, 1, True) for row in (2, 0, 1)]
        for row, token in zip((2, 0, 1), tokens_of(step(made, decodes, [])), strict=True):
            found[row].append(token)
    assert [each[:OUTPUT] for each in found] == expected


def test_logprobs_are_the_models_of_prompt_and_output(made: ModelEngine) -> None:
    params = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1, repetition_penalty=1.5)
    prompt = PROMPTS[1]
    result = step(made, [(0, 0, len(prompt), True)], [new(0, prompt, params)])
    (own,), (of_prompt,) = result.logprobs.values(), result.prompt_logprobs.values()
    told = np.frombuffer(of_prompt.logprobs, np.float32)
    assert len(told) == len(prompt) - 1
    for length in (1, 9, len(prompt) - 1):  # each of them as the log-probability of a sampled token
        allowed = SamplingParams(temperature=0.0, logprobs=0, allowed_token_ids=(prompt[length],))
        again = step(made, [(1, 0, length, True)], [new(1, prompt[:length], allowed)])
        (one,) = again.logprobs.values()
        np.testing.assert_allclose(np.frombuffer(one.logprobs, np.float32)[0], told[length - 1], atol=1e-4)
    likeliest = np.frombuffer(own.top_logprobs, np.float32)
    assert likeliest[0] >= likeliest[1]
    plain = step(made, [(2, 0, len(prompt), True)], [new(2, prompt, SamplingParams(temperature=0.0))])
    assert np.frombuffer(own.top_ids, np.int32)[0] == tokens_of(plain)[0], "of raw logits, before the penalty"
    assert not plain.logprobs
    assert not plain.prompt_logprobs


def test_vectors_in_the_place_of_tokens(made: ModelEngine) -> None:
    """Those of the model's own table give what their tokens give, in chunks that cut them, beside a row without any, and a row's next
    request has none of them."""
    params = SamplingParams(temperature=0.0)
    prompt = PROMPTS[1]
    expected = alone(made, prompt, params)
    table = made.model.embedding(torch.tensor(prompt)).numpy()
    spans = ((2, 9), (15, len(prompt) - 15))
    data = b"".join(table[first : first + count].astype("<f4").tobytes() for first, count in spans)
    hidden = [first + nth for first, count in spans for nth in range(count)]
    told = [5 if place in hidden else token for place, token in enumerate(prompt)]
    row = msgspec.structs.replace(new(1, told, params), extras=(PromptEmbeds("float32", spans, data),))
    step(made, [(1, 0, 6, False)], [row])
    other = new(0, PROMPTS[0], params)
    mixed = tokens_of(step(made, [(0, 0, 5, True), (1, 6, len(prompt) - 6, True)], [other]))
    assert mixed == [alone(made, PROMPTS[0], params)[0], expected[0]]
    found = [mixed[1]]
    while len(found) < OUTPUT:
        found += tokens_of(step(made, [(1, len(prompt) + len(found) - 1, 1, True)], []))
    assert found == expected
    assert not made.extras.kind(PromptEmbedsRows)._rows
    step(made, [(1, 0, 6, False)], [row])  # it is aborted, and another takes its row
    plain = new(1, prompt, params)
    assert tokens_of(step(made, [(1, 0, len(prompt), True)], [plain])) == expected[:1]


def test_a_row_with_llama_cpps_samplers_beside_others(made: ModelEngine) -> None:
    """DRY says nothing again, unless a breaker stands between; the neighbour's tokens are what they were."""
    plain = SamplingParams(temperature=0.0)
    prompt = [9, 8, 7, 6, 5, 4] * 4
    (again,) = alone(made, prompt, msgspec.structs.replace(plain, logit_bias={9: 20.0}))[:1]
    assert again == 9
    dry = msgspec.structs.replace(plain, logit_bias={9: 20.0}, dry_multiplier=50.0)
    assert alone(made, prompt, dry)[0] != 9
    breaks = msgspec.structs.replace(
        new(1, prompt, dry), extras=(SequenceBreakers(("x",), np.array([5], np.int32).tobytes()),)
    )
    assert tokens_of(step(made, [(1, 0, len(prompt), True)], [breaks])) == [9], (
        "one token behind the breaker is no repetition"
    )
    assert tokens_of(step(made, [(1, 0, len(prompt), True)], [new(1, prompt, dry)])) != [9], (
        "the row's next request has no breaker"
    )
    excluding = msgspec.structs.replace(plain, xtc_probability=1.0, xtc_threshold=0.0, top_k=3)
    rows = [new(0, PROMPTS[0], plain), new(2, PROMPTS[0], excluding)]
    first, third = tokens_of(step(made, [(0, 0, 5, True), (2, 0, 5, True)], rows))
    likely = step(made, [(0, 0, 5, True)], [new(0, PROMPTS[0], msgspec.structs.replace(plain, logprobs=3))]).logprobs[0]
    assert [first, third] == np.frombuffer(likely.top_ids, np.int32)[[0, 2]].tolist()


def test_a_cpu_has_no_graphs_and_its_steps_are_done_when_they_are_launched(made: ModelEngine) -> None:
    result = step(made, [(0, 0, 5, True)], [new(0, PROMPTS[0], SamplingParams(temperature=0.0))])
    assert made.graph_counts() == GraphCounts()
    assert not made.idle()
    assert (result.received_ns, result.gpu_ns, result.gap_ns) == (7, 0, 0)
    assert 0 < result.launched_ns <= result.done_ns


def constrained(row: NewRow, form: str, **changes: Any) -> NewRow:
    """The row with text that keeps to a regular expression."""
    return msgspec.structs.replace(row, extras=(of_regex(form),), **changes)


def test_rows_with_a_grammar_beside_others(made: ModelEngine) -> None:
    """Whatever the chunks, the others' tokens are what they were; log-probabilities are the model's own."""
    made.extras.kind(GrammarRows).grammars = Grammars(Matchers(lambda: byte_vocabulary(VOCAB)))
    plain = SamplingParams(temperature=0.9, seed=5)
    expected = alone(made, PROMPTS[0], plain)
    forms = {1: "[0-9]{4}[x-z]+", 2: "(ab|cd){3}"}
    params = {
        row: SamplingParams(temperature=0.9, seed=row, eos_token_ids=(EOS,), logprobs=0, frequency_penalty=1.0)
        for row in forms
    }
    news = [new(row, PROMPTS[row], params.get(row, plain)) for row in range(3)]
    news[1:] = [constrained(one, forms[one.row]) for one in news[1:]]
    found: list[list[int]] = [[], [], []]
    found[0] += tokens_of(step(made, [(0, 0, 5, True), (2, 0, 20, False)], [news[0], news[2]]))
    mixed = step(made, [(0, 5, 1, True), (1, 0, 25, True), (2, 20, 25, True)], news[1:2])
    assert not mixed.failed
    assert sorted(mixed.logprobs) == [1, 2]
    for row, token in enumerate(tokens_of(mixed)):
        found[row].append(token)
    for _ in range(OUTPUT - 2):
        decodes = [(row, len(PROMPTS[row]) + len(found[row]) - 1, 1, True) for row in (2, 0, 1)]
        for row, token in zip((2, 0, 1), tokens_of(step(made, decodes, [])), strict=True):
            found[row].append(token)
    assert found[0] == expected
    for row, form in forms.items():
        matcher = LLMatcher(byte_vocabulary(VOCAB).tokenizer, LLMatcher.grammar_from_regex(form))
        assert len(found[row]) == OUTPUT - 1
        assert matcher.try_consume_tokens(found[row]) == OUTPUT - 1


def test_a_row_with_a_grammar_that_begins_anew(made: ModelEngine) -> None:
    """Preempted after some tokens, it goes on as it would have."""
    made.extras.kind(GrammarRows).grammars = Grammars(Matchers(lambda: byte_vocabulary(VOCAB)))
    params, form = SamplingParams(temperature=1.2, seed=3, eos_token_ids=(EOS,)), "[a-f]{2}[0-9]{2}[a-f]{2}"
    prompt, tokens = PROMPTS[0], list[int]()
    tokens += tokens_of(step(made, [(0, 0, 5, True)], [constrained(new(0, prompt, params), form)]))
    for nth in range(6):
        tokens += tokens_of(step(made, [(0, 5 + nth, 1, True)], []))
    assert re.fullmatch(form, bytes(tokens[:6]).decode())
    assert tokens[6] == EOS
    for known in (1, 3, 5):
        again = constrained(new(1, prompt + tokens[:known], params), form, num_prompt_tokens=len(prompt))
        assert tokens_of(step(made, [(1, 0, 5 + known, True)], [again])) == [tokens[known]]


def test_a_row_whose_grammar_leaves_nothing_fails_alone(made: ModelEngine) -> None:
    made.extras.kind(GrammarRows).grammars = Grammars(Matchers(lambda: byte_vocabulary(VOCAB)))
    bad, fine = SamplingParams(allowed_token_ids=(5,), eos_token_ids=(EOS,)), SamplingParams(eos_token_ids=(EOS,))
    news = [constrained(new(row, PROMPTS[row], params), "ab") for row, params in enumerate((bad, fine))]
    result = step(made, [(0, 0, 5, True), (1, 0, 25, True)], news)
    assert list(result.failed) == [0]
    assert tokens_of(result)[1] == ord("a")


@pytest.mark.parametrize("heat", [0.0, 0.9])
def test_a_row_that_no_token_is_left_for_fails_alone(made: ModelEngine, heat: float) -> None:
    """Its request's parameters are at fault, and no id is made up; a step that was planned already computes it once more."""
    fine = SamplingParams(temperature=0.9, seed=5)
    expected = alone(made, PROMPTS[1], fine)[:2]
    bad = SamplingParams(temperature=heat, allowed_token_ids=(5,), bad_words_token_ids=((5,),), logprobs=1)
    first = step(made, [(0, 0, 5, True), (1, 0, 25, True)], [new(0, PROMPTS[0], bad), new(1, PROMPTS[1], fine)])
    second = step(made, [(0, 5, 1, True), (1, 25, 1, True)], [])
    for nth, result in enumerate((first, second)):
        assert {place: failed.kind for place, failed in result.failed.items()} == {0: ErrorKind.INVALID}
        assert tokens_of(result)[1] == expected[nth]


def test_a_row_whose_logits_are_not_numbers_fails_alone(made: ModelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose model overflows: a server's fault, whatever the request allows."""
    logits = made.model.logits

    def spoil(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        found[0] = torch.nan
        return found

    fine = SamplingParams(temperature=0.9, seed=5)
    expected = alone(made, PROMPTS[1], fine)[0]
    monkeypatch.setattr(made.model, "logits", spoil)
    bad = SamplingParams(temperature=0.7, allowed_token_ids=(5, 6))
    result = step(made, [(0, 0, 5, True), (1, 0, 25, True)], [new(0, PROMPTS[0], bad), new(1, PROMPTS[1], fine)])
    assert {place: failed.kind for place, failed in result.failed.items()} == {0: ErrorKind.INTERNAL}
    assert tokens_of(result)[1] == expected
