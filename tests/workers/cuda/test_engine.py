"""The GPU engine: graphs, chunks, cache and fused kernels change nothing but rounding."""

import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from meshlm.protocol.edges.step import StepPlan
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import StepId

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import triton
from engine_driver import Driver, engine, prompts_of, reference
from triton.runtime.jit import JITFunction

from meshlm.workers.cuda import start
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.graphs.keys import Key
from meshlm.workers.weights.load import load_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["FULL", "NONE"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelEngine:
    return engine(tmp_path_factory.mktemp("model"), cudagraph_mode=request.param)


def test_error_is_no_worse_than_transformers_bfloat16(made: ModelEngine) -> None:
    """Prompt whole, then decodes: against float32."""
    (prompt,) = prompts_of([333])
    driver = Driver(made, [prompt], SamplingParams(max_tokens=8, temperature=0.0))
    rows = [driver.step({0: 333})[0]]
    rows += [driver.step({0: 1})[0] for _ in range(6)]
    exact, rounded = reference(made, prompt + driver.tokens[0][:-1])[:, 332:]
    ours = (torch.stack(rows) - exact).abs().mean()
    theirs = (rounded - exact).abs().mean()
    assert ours <= 1.2 * theirs, f"mean error {ours:.4f}, transformers' own {theirs:.4f}"


def test_chunks_mixed_steps_and_batches_agree(made: ModelEngine) -> None:
    """Each prompt alone and whole, against chunks beside decodes: the same logits within bfloat16."""
    lengths = [40, 333, 129, 17]
    prompts = prompts_of(lengths)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    alone = []
    for prompt in prompts:
        driver = Driver(made, [prompt], params)
        alone.append(driver.step({0: len(prompt)})[0])
    driver = Driver(made, prompts, params)
    mixed: dict[int, torch.Tensor] = {3: driver.step({3: 17, 1: 100})[0]}
    mixed[0] = driver.step({0: 40, 1: 64, 3: 1})[0]
    mixed[2] = driver.step({0: 1, 1: 100, 2: 129, 3: 1})[1]
    mixed[1] = driver.step({0: 1, 1: 69, 2: 1, 3: 1})[1]
    for row, logits in mixed.items():
        torch.testing.assert_close(logits, alone[row], atol=0.06, rtol=0.06)


def test_seeded_draws_do_not_depend_on_the_batch(made: ModelEngine) -> None:
    """Logits differ by rounding between batch sizes; draws are keyed by seed and index, so texts nearly always agree."""
    prompts = prompts_of([50] * 6)
    params = SamplingParams(max_tokens=8, temperature=0.7, seed=11)
    together = Driver(made, prompts, params)
    together.step(dict.fromkeys(range(6), 50))
    alone = []
    for prompt in prompts:
        driver = Driver(made, [prompt], params)
        driver.step({0: 50})
        alone.append(driver.tokens[0][0])
    same = sum(tokens[0] == other for tokens, other in zip(together.tokens, alone, strict=True))
    assert same >= 5


def test_penalties_and_logprobs_beside_plain_requests(made: ModelEngine) -> None:
    """The general sampler sees logits that no truncation has touched."""
    (prompt,) = prompts_of([64])
    params = SamplingParams(max_tokens=4, temperature=0.5, top_k=1, logprobs=3)
    driver = Driver(made, [prompt], params)
    logits = driver.step({0: 64})
    assert int(torch.isfinite(logits).sum()) == 1, "top_k 1 leaves one logit"
    plan = StepPlan(1, StepId(99), np.zeros(1, np.int32).tobytes(), np.array([64], np.int32).tobytes(), b"", b"", 1)
    result = made.step(plan, 0).wait()
    columns = result.logprobs[0]
    values = np.frombuffer(columns.top_logprobs, np.float32)
    assert len(values) == 3
    assert np.isfinite(values).all()
    assert values[0] == np.frombuffer(columns.logprobs, np.float32)[0]


STEADY = {
    "plain": SamplingParams(max_tokens=9, temperature=0.8, seed=3),
    "top-p": SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=3),
    "logprobs": SamplingParams(max_tokens=9, temperature=0.0, logprobs=5),
    "prompt logprobs": SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=2),
    "penalties": SamplingParams(
        max_tokens=9, temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1, seed=3
    ),
    "bias": SamplingParams(max_tokens=9, temperature=0.0, logit_bias={5: 3.0}),
    "allowed": SamplingParams(max_tokens=9, temperature=0.7, allowed_token_ids=(5, 6, 7), top_p=0.9, seed=3),
    "min_tokens": SamplingParams(max_tokens=9, temperature=0.0, min_tokens=8, stop_token_ids=(3, 4)),
}


@pytest.mark.parametrize("kind", STEADY)
def test_no_step_waits_for_the_device(made: ModelEngine, kind: str) -> None:
    """A prompt, a chunk beside decodes, decodes: torch raises where the host would wait for the GPU."""
    while made.idle():
        pass
    driver = Driver(made, prompts_of([40, 130]), STEADY[kind])
    driver.step({0: 40})
    driver.strict = True
    driver.step({0: 1, 1: 64})
    driver.step({0: 1, 1: 66})
    for _ in range(3):
        driver.step({0: 1, 1: 1})
    assert len(driver.tokens[0]) == 6
    assert "capture_failed" not in made.graphs.misses


def test_penalties_stay_in_the_graph(made: ModelEngine) -> None:
    """Tokens as the general sampler finds them, and no step but prompts is launched by hand."""
    while made.idle():
        pass
    prompts = prompts_of([60, 200])
    found = []
    penalised = SamplingParams(
        max_tokens=30,
        temperature=0.0,
        repetition_penalty=1.5,
        presence_penalty=0.7,
        frequency_penalty=0.3,
        logit_bias={8: 0.5},
        min_tokens=10,
        stop_token_ids=(9,),
    )
    everything = tuple(range(4099))  # allowed: the same tokens, by the general sampler
    for params in (penalised, msgspec.structs.replace(penalised, allowed_token_ids=everything)):
        driver = Driver(made, prompts, params)
        driver.step({0: 60, 1: 200})
        before = dict(made.graphs.misses)
        for _ in range(20):
            driver.step({0: 1, 1: 1})
        assert made.graphs.keys == [] or dict(made.graphs.misses) == before
        found.append(driver.tokens)
    assert found[0] == found[1]
    assert len(set(found[0][0])) > 15, "repeated tokens are penalised"


def test_more_decodes_than_one_chunk_of_logits(tmp_path: Path) -> None:
    """300 decodes from one graph give what they give without graphs and in small steps."""
    found = []
    prompts = prompts_of([20] * 300)
    params = SamplingParams(max_tokens=6, temperature=0.0)
    for mode, size in (("FULL", 300), ("NONE", 300), ("NONE", 50)):
        made = engine(tmp_path, max_num_seqs=300, cudagraph_mode=mode, kv_cache_memory=4 << 30)
        driver = Driver(made, prompts, params)
        for first in range(0, 300, 50):
            driver.step(dict.fromkeys(range(first, first + 50), 20))
        for _ in range(3):
            for first in range(0, 300, size):
                driver.step(dict.fromkeys(range(first, first + size), 1))
        found.append([tokens[:4] for tokens in driver.tokens])
        del made, driver
    same = sum(a == b == c for a, b, c in zip(*found, strict=True))
    assert same >= 285, f"{same} of 300 agree; rounding differs between batch sizes"


@pytest.mark.parametrize("max_num_seqs", [1, 16])
def test_a_mixed_step_of_all_running_requests_is_replayed(tmp_path: Path, max_num_seqs: int) -> None:
    """Decodes beside a chunk that samples nothing, then beside its end: as without graphs, within bfloat16."""
    last = max_num_seqs - 1
    prompts = prompts_of([20] * last + [140])
    params = SamplingParams(max_tokens=8, temperature=0.0)
    found, replays = [], 0
    for mode in ("FULL", "NONE"):
        made = engine(tmp_path, cudagraph_mode=mode, max_num_seqs=max_num_seqs)
        while made.idle():
            pass
        driver = Driver(made, prompts, params)
        if last:
            driver.step(dict.fromkeys(range(last), 20))
        before = made.graphs.replays["mixed"]
        decodes = dict.fromkeys(range(last), 1)
        found.append((driver.step({**decodes, last: 100}), driver.step({**decodes, last: 40}), driver.tokens))
        replays += made.graphs.replays["mixed"] - before
        del made, driver
    assert replays == 2
    graph, eager = found
    num_compared = 0
    for row in range(max_num_seqs):
        for nth in range(1 if row == last else 0, 2):
            if row == last or graph[2][row][: nth + 1] == eager[2][row][: nth + 1]:  # the same history
                torch.testing.assert_close(graph[nth][row], eager[nth][row], atol=0.06, rtol=0.06)
                num_compared += 1
    assert num_compared >= 2 * max_num_seqs - 5


@pytest.mark.parametrize("failures", [1, 2])
def test_a_graph_that_cannot_be_captured_is_done_without(tmp_path: Path, failures: int) -> None:
    """CUDA refuses to wait for the device in the midst of a capture, and spoils it."""
    made = engine(tmp_path)
    made.graphs._graphs.pop(Key(4, 4), None)  # it may be among those captured at the start
    padded, left = made.graphs._capture, failures

    def spoiled(key: Key) -> None:
        nonlocal left
        padded(key)
        if key == Key(4, 4) and left and torch.cuda.is_current_stream_capturing():
            left -= 1
            torch.cuda.synchronize()

    made.graphs._capture = spoiled
    while made.idle():
        pass
    assert (Key(4, 4) in made.graphs.keys) == (failures == 1)
    assert made.graphs.misses["rehearsed" if failures == 1 else "capture_failed"] == 1
    torch.cuda.empty_cache()  # refused while torch believes that a capture goes on
    driver = Driver(made, prompts_of([20, 30, 40]), SamplingParams(max_tokens=8, temperature=0.0))
    driver.step({0: 20, 1: 30, 2: 40})
    before = made.graphs.replays["decode"]
    for _ in range(4):
        assert torch.isfinite(driver.step({0: 1, 1: 1, 2: 1})).all()
    assert made.graphs.replays["decode"] == before + 4


def test_logprobs_of_a_long_prompt(made: ModelEngine) -> None:
    """Chunks of positions: as many as the prompt has, and the sampled tokens' beside them."""
    (prompt,) = prompts_of([900])
    driver = Driver(made, [prompt], SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=3, logprobs=1))
    driver.step({0: 900})
    columns = driver.result.prompt_logprobs[0]
    assert len(columns.logprobs) == 4 * 899
    assert len(columns.top_ids) == 4 * 899 * 3
    own, top = np.frombuffer(columns.logprobs, np.float32), np.frombuffer(columns.top_logprobs, np.float32)
    assert (own <= top.reshape(899, 3)[:, 0] + 1e-6).all()
    assert driver.result.logprobs[0].width == 1


def test_same_weights_for_the_same_seed(made: ModelEngine) -> None:
    resolved = made.resolved
    again = load_model(resolved, torch.device("cuda"), 0, lambda done, total: None)
    for (name, ours), theirs in zip(made.model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no 8-bit floats")
def test_an_fp8_cache_holds_twice_as_much_and_says_nearly_the_same(tmp_path: Path) -> None:
    """Prompts in chunks, the last token as a decode from a graph: logits point the same way as with a bfloat16 cache."""
    prompts = prompts_of([100, 333])
    params = SamplingParams(max_tokens=8, temperature=0.0)
    found, blocks = [], []
    for kind in ("auto", "fp8"):
        made = engine(tmp_path, kv_cache_dtype=kind, kv_cache_memory=16 << 20)
        blocks.append(made.facts.num_blocks)
        driver = Driver(made, prompts, params)
        driver.step({0: 60, 1: 64})
        driver.step({0: 39, 1: 268})
        found.append(driver.step({0: 1, 1: 1}))  # the last tokens of the prompts: the same history for both
    assert blocks[1] == 2 * blocks[0]
    assert float(torch.cosine_similarity(found[0], found[1], dim=1).min()) > 0.99


@pytest.mark.filterwarnings("default")  # the compiler's own
def test_compiled_parts_agree_with_the_fused_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--compile inductor, a prompt and decodes from a graph: the same logits within bfloat16."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "set by the engine")
    prompts = prompts_of([40, 129])
    params = SamplingParams(max_tokens=4, temperature=0.0)
    found = []
    for kind in ("none", "inductor"):
        driver = Driver(engine(tmp_path, compile=kind), prompts, params)
        driver.step({0: 39, 1: 128})
        found.append(driver.step({0: 1, 1: 1}))
    torch.testing.assert_close(found[0], found[1], atol=0.06, rtol=0.06)
    assert any((tmp_path / "cache/meshlm/inductor").iterdir())


KEPT: list[object] = []
"""Kernels that graphs of other tests' engines launch: some Tritons unload one with its last reference."""


def forget_kernels() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("meshlm.kernels."):
            KEPT.extend(
                list(value.device_caches.values()) for value in vars(module).values() if isinstance(value, JITFunction)
            )
    start._forget_loaded()


def test_a_start_without_a_kernel_cache_compiles_in_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No launch of the warm-up, of a step or of a graph has to compile or to look for its kernel; with the cache none is compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    found: list[tuple[bool, str, str]] = []

    def listen(*, src: Any, cache_hit: bool, **_: object) -> None:
        variant = f"{src.name} {src.signature} {src.constants} {src.attrs}"
        found.append((cache_hit, threading.current_thread().name.split("_")[0], variant))

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    for cached in (False, True):
        forget_kernels()
        found.clear()
        news: list[str] = []
        made = engine(tmp_path, news=news, tune="off")  # what a tuner finds in between is compiled anew
        driver = Driver(made, prompts_of([40, 130]), SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, seed=3))
        driver.step({0: 40})
        driver.step({0: 1, 1: 130})
        driver.step({0: 1, 1: 1})
        driver.step({0: 1, 1: 1})
        while made.idle():
            pass
        assert not made.graphs.misses["captured_now"], "those of the start do"
        assert [each for each in found if each[:2] != (cached, "kernels")] == []
        assert len(found) > 15
        assert cached or "kernels" in news
