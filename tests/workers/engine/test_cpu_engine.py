"""The engine on a CPU, stepped as a scheduler would: chunks, decodes and neighbours give the model's tokens and log-probabilities."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from cpu_steps import LENGTH, MODEL, OUTPUT, PROMPTS, alone, new, step, tokens_of

from meshlm.protocol.control_edge import GraphCounts
from meshlm.protocol.sampling import SamplingParams
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.make import make_engine


@pytest.fixture(scope="module", params=["cpu", "torch"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelEngine]:
    """By the compiled kernels, and by plain torch, which is what a GPU without Triton runs."""
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    values: dict[str, object] = {"model": str(folder), "device": "cpu", "load_format": "dummy", "dtype": "float32"}
    values |= {"max_model_len": LENGTH, "max_num_seqs": 4, "attention_backend": request.param, "cpu_threads": 1}
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


def test_a_cpu_has_no_graphs_and_its_steps_are_done_when_they_are_launched(made: ModelEngine) -> None:
    result = step(made, [(0, 0, 5, True)], [new(0, PROMPTS[0], SamplingParams(temperature=0.0))])
    assert made.graph_counts() == GraphCounts()
    assert not made.idle()
    assert (result.received_ns, result.gpu_ns, result.gap_ns) == (7, 0, 0)
    assert 0 < result.launched_ns <= result.done_ns
