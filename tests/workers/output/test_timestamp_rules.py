"""Times between words: what transformers' processor leaves of any logits is left here, after any tokens."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.protocol.audio import SpeechTokens
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.sampling import SamplingParams
from meshlm.workers.output.logits_processor import LogitsBatch
from meshlm.workers.output.processors import TimestampRules

EOS, NO_TIMES, TICKS, LATEST = 20, 23, 12, 5
ZERO, VOCAB = NO_TIMES + 1, NO_TIMES + 1 + TICKS
WORD, TIME = st.integers(0, EOS - 1), st.integers(ZERO, VOCAB - 1)


def processor(max_initial_timestamp_index: int = LATEST) -> TimestampRules:
    speech = SpeechTokens(start=21, no_timestamps=NO_TIMES, max_initial_timestamp_index=max_initial_timestamp_index)
    resolved = SimpleNamespace(speech=speech, eos_token_ids=(EOS,))
    config = SimpleNamespace(resolved=resolved, require_resolved=lambda: resolved)
    return TimestampRules(cast("MeshConfig", config), torch.device("cpu"), 8)


def batch_of(prompts: list[list[int]], outputs: list[list[int]]) -> LogitsBatch:
    """Behind a row's tokens stands anything."""
    lens = np.array([len(prompt) + len(out) for prompt, out in zip(prompts, outputs, strict=True)], np.int64)
    tokens = torch.full((len(prompts), int(lens.max())), VOCAB - 1, dtype=torch.int32)
    for row, (prompt, out) in enumerate(zip(prompts, outputs, strict=True)):
        tokens[row, : lens[row]] = torch.tensor(prompt + out)
    return LogitsBatch(np.arange(len(prompts), dtype=np.int32), lens, np.array(list(map(len, prompts))), lambda: tokens)


def theirs(
    logits: torch.Tensor, prompt: list[int], output: list[int], max_initial_timestamp_index: int | None
) -> torch.Tensor:
    from transformers import GenerationConfig
    from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

    config: Any = GenerationConfig(eos_token_id=EOS)
    config.no_timestamps_token_id, config.max_initial_timestamp_index = NO_TIMES, max_initial_timestamp_index
    found = WhisperTimeStampLogitsProcessor(config, len(prompt))(torch.tensor([prompt + output]), logits[None])
    return cast("torch.Tensor", found[0])


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_it_leaves_what_transformers_leaves(data: st.DataObject) -> None:
    count, seed = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 1 << 30))
    prompts = [data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)) for _ in range(count)]
    outputs = [data.draw(st.lists(st.one_of(WORD, TIME), max_size=6)) for _ in range(count)]
    latest = data.draw(st.sampled_from([-1, LATEST]))
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * data.draw(
        st.sampled_from([0.5, 3.0])
    )
    found = processor(latest).apply(logits.clone(), batch_of(prompts, outputs))
    for row, line in enumerate(logits):
        # Which of a time and a word is likelier may hang on roundings, where they are as likely.
        expected = theirs(line, prompts[row], outputs[row], None if latest < 0 else latest)
        assert torch.equal(found[row], expected), (prompts[row], outputs[row])


def test_the_first_is_an_early_time_and_then_comes_a_word() -> None:
    logits = torch.zeros(2, VOCAB)
    found = processor().apply(logits, batch_of([[21], [21]], [[], [ZERO]]))
    assert found.isfinite()[0].nonzero().flatten().tolist() == list(range(ZERO, ZERO + LATEST + 1))
    assert found.isfinite()[1].nonzero().flatten().tolist() == [*range(NO_TIMES)]


def test_it_is_for_those_that_ask() -> None:
    assert TimestampRules.wants(SamplingParams(extra_args={"whisper_timestamps": True}))
    for other in ({}, {"whisper_timestamps": 1}, {"whisper_timestamps": "true"}):
        assert not TimestampRules.wants(SamplingParams(extra_args=other))
    assert not processor().is_argmax_invariant()
