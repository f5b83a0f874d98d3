"""Whisper behind a scheduler: tokens stay transformers' own, in chunks, preempted, and beside requests with other audio.

What no request needs any more is overwritten with NaN before each step, so whoever sees another's audio, or none, is seen.
"""

from pathlib import Path
from typing import Any

import pytest
import small_whisper
import torch
from bench import COORDINATOR, DETOKENIZER, LIFE, Bench, limits
from engine_driver import engine, prompts_of
from near_transformers import LENGTHS, errors, expected, history
from served_engines import LENGTH, OUTPUT, STEP, Engines
from small_models import CPU, load

from meshlm.protocol.edges.admit import Assign, EngineRequest
from meshlm.protocol.kv import CrossAttention, FullAttention
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Handle, RequestId
from meshlm.runtime.process.events import Received
from meshlm.workers.models.whisper import LogMelSpectrogram, Whisper

BEFORE = [8, *range(60, 110)]  # of a block of 64 tokens, which the answer outgrows
PROMPTS = [
    [*BEFORE, 1, 2, 6, 9],
    [1, 3, 6, 9],
    [*BEFORE, 1, 2, 6, 9],
    [*BEFORE, *BEFORE[:45], 1, 4, 6],
    [1, 2, 5],
    [*BEFORE, 1, 2],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("whisper")
    return folder, small_whisper.made(folder)


def greedy(theirs: Any, nth: int, prompt: list[int], tokens: list[int]) -> list[int]:
    """transformers' likeliest token after each of these: the greedy text, where they are that."""
    with torch.no_grad():
        ids = torch.tensor([prompt + tokens[:-1]])
        logits = theirs(input_features=small_whisper.features(nth), decoder_input_ids=ids).logits[0]
    found: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return found


def test_features_and_encoder_states_are_transformers(model: tuple[Path, Any]) -> None:
    ours = load(model[0])
    assert isinstance(ours, Whisper)
    assert ours.spec.audio_encoder is not None
    assert ours.spec.architecture == "WhisperForConditionalGeneration"
    features = LogMelSpectrogram(ours.spec.audio_encoder, CPU)(torch.from_numpy(small_whisper.samples(1)))
    torch.testing.assert_close(features, small_whisper.features(1)[0], atol=2e-5, rtol=1e-4)
    with torch.inference_mode():
        states = ours.encoder(torch.from_numpy(small_whisper.samples(1)), ours.ops)
        expected = model[1].model.encoder(small_whisper.features(1)).last_hidden_state[0]
    torch.testing.assert_close(states, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_tokens_are_transformers(backend: str, model: tuple[Path, Any]) -> None:
    folder, theirs = model
    engines = Engines(folder, 8, backend)
    try:
        bench = Bench(limits(max_model_len=LENGTH, max_num_batched_tokens=STEP), 0, 0, model=engines)
        engines.cached = bench.directory._hashes
        for nth, prompt in enumerate(PROMPTS):
            sampling = SamplingParams(max_tokens=OUTPUT, temperature=0.0)
            work = EngineRequest(
                RequestId(f"r{nth}"), Handle(nth), pack_i32(prompt), sampling, extras=(small_whisper.audio(nth),)
            )
            bench.event(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)))
        bench.finish()
    finally:
        engines.close()
    assert FullAttention() in engines.kv_specs
    assert CrossAttention(50) in engines.kv_specs
    assert bench.tokens == {nth: greedy(theirs, nth, PROMPTS[nth], tokens) for nth, tokens in bench.tokens.items()}
    assert all(len(tokens) == OUTPUT for tokens in bench.tokens.values())
    assert len({tuple(tokens) for tokens in bench.tokens.values()}) == len(PROMPTS), "audio make the difference"
    assert bench.core.batching.num_preemptions > 0, "memory was to be too little"
    assert not any(bench.cached.values()), "equal tokens of other audio are no prefix"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_torch_is_as_near_as_transformers(dtype: str, tmp_path: Path) -> None:
    """As where a GPU has no kernels: exact in float32, and no worse than transformers in bfloat16."""
    theirs = small_whisper.WithAudio(small_whisper.made(tmp_path, small_whisper.LARGER), prompts_of(LENGTHS))
    settings: dict[str, Any] = {"attention_backend": "torch", "kv_cache_memory": 64 << 20, "max_model_len": 448}
    made = engine(tmp_path, load_format="auto", device="cpu", dtype=dtype, **settings)
    driver = history(made, [small_whisper.audio(nth) for nth in range(2)])
    if dtype == "float32":
        found = torch.stack([seen.logits for seen in driver.seen])
        torch.testing.assert_close(found, expected(theirs, driver), atol=2e-4, rtol=2e-4)
    else:
        ours, error = errors(theirs, driver)
        assert ours <= 1.1 * error, f"mean error {ours:.4f}, transformers' own {error:.4f}"
