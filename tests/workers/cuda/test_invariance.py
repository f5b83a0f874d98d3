"""--deterministic on a GPU: a request's logits are the same to the last bit, however its steps are made up. See ../models."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import Driver, engine

from meshlm.protocol.sampling import SamplingParams
from meshlm.workers.engine.engine import ModelEngine

pytestmark = pytest.mark.gpu
COMMON: dict[str, Any] = {
    "head_dim": 128, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
)  # fmt: skip


def config(family: str, *sizes: int, **others: object) -> dict[str, Any]:
    named = {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower()}
    return {**COMMON, **named, **dict(zip(SIZES, sizes, strict=True)), **others}


MODELS = {
    "llama": config("Llama", 4096, 14336, 2, 32, 8, 128256),  # layers of Llama-3.1-8B
    "qwen3": config("Qwen3", 1024, 3072, 3, 16, 8, 151936, tie_word_embeddings=True),
    "qwen2": config("Qwen2", 1536, 8960, 2, 12, 2, 32003),  # biases; groups of six; rows of logits that are not aligned
    "mistral": config("Mistral", 1024, 1792, 2, 8, 2, 4096, sliding_window=200),
    "qwen3-moe": config(
        "Qwen3Moe", 1024, 2048, 2, 8, 2, 4096, model_type="qwen3_moe", num_experts=64, num_experts_per_tok=6,
        moe_intermediate_size=384, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "mixtral": config("Mixtral", 1024, 1792, 2, 8, 2, 4096, num_local_experts=8, num_experts_per_tok=2),
}  # fmt: skip
LENGTH, DECODES, ROWS = 700, 6, 256
MODES = ["FULL", "NONE"]


@pytest.fixture(scope="module", params=[(name, mode) for name in MODELS for mode in MODES], ids="-".join)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, ModelEngine]]:
    name, mode = request.param
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    made = engine(
        folder, deterministic=True, max_num_seqs=ROWS, kv_cache_memory=4 << 30, cudagraph_mode=mode, max_model_len=1024
    )
    yield name, mode, made
    del made
    torch.cuda.empty_cache()


def prompts(name: str, lengths: list[int]) -> list[list[int]]:
    chance, vocab = random.Random(name), MODELS[name]["vocab_size"]
    return [[chance.randrange(vocab) for _ in range(length)] for length in lengths]


def chunks(length: int, most: int, chance: random.Random) -> list[int]:
    parts: list[int] = []
    while sum(parts) < length:
        parts.append(min(chance.randint(1, most), length - sum(parts)))
    return parts


class Watched:
    """Row 0, whose logits are watched, and others that come and go beside it."""

    def __init__(self, name: str, made: ModelEngine, others: int, params: SamplingParams, seed: int = 0) -> None:
        self._chance = random.Random(seed)
        lengths = [LENGTH] + [self._chance.randint(2, 40) for _ in range(others)]
        self.driver = Driver(made, prompts(name, lengths), params)
        self._lengths, self._others = lengths, range(1, 1 + others)

    def step(self, count: int) -> None:
        """Some others begin, those that have begun decode."""
        counts, driver = {0: count}, self.driver
        for row in self._others:
            if driver.computed[row]:
                counts[row] = 1
            elif self._chance.random() < 0.7:
                counts[row] = self._lengths[row]
        driver.step(counts)

    def all_begin(self) -> None:
        rest = {row: self._lengths[row] for row in self._others if not self.driver.computed[row]}
        if rest:
            self.driver.step(rest)

    def logits(self) -> list[tuple[int, torch.Tensor]]:
        return [(seen.length, seen.logits.cpu()) for seen in self.driver.seen if seen.row == 0]


GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
ALONE: dict[str, dict[int, torch.Tensor]] = {}
"""By model and length, of the first engine of a model: the second one, without graphs, has the same."""


def expected(name: str, made: ModelEngine) -> dict[int, torch.Tensor]:
    """The request alone, its prompt whole, with graphs where the mode has them."""
    if name not in ALONE:
        watched = Watched(name, made, 0, GREEDY)
        for count in (LENGTH, *[1] * DECODES):
            watched.step(count)
        ALONE[name] = dict(watched.logits())
        assert len(ALONE[name]) == 1 + DECODES
        assert all(logits.isfinite().all() and logits.std() > 0 for logits in ALONE[name].values())
    return ALONE[name]


def check(name: str, made: ModelEngine, watched: Watched, what: str) -> None:
    known = expected(name, made)
    found = [(length, logits) for length, logits in watched.logits() if length in known]
    assert found
    for length, logits in found:
        gap = float((logits - known[length]).abs().max())
        assert torch.equal(logits, known[length]), f"{what}: {gap} after {length} tokens"


def idle(made: ModelEngine) -> None:
    """Captures all graphs."""
    while not made.graphs.complete and made.idle():
        pass


def test_alone_and_again(made: tuple[str, str, ModelEngine]) -> None:
    name, mode, engine = made
    idle(engine)
    expected(name, engine)
    watched = Watched(name, engine, 0, GREEDY)
    for count in (LENGTH, *[1] * DECODES):
        watched.step(count)
    check(name, engine, watched, "again")
    assert bool(engine.graphs.replays) == (mode == "FULL")
    assert "capture_failed" not in engine.graphs.misses


@pytest.mark.parametrize("most", [1, 7, 33, 100, 300, 511])
def test_chunks(made: tuple[str, str, ModelEngine], most: int) -> None:
    name, _, engine = made
    cut = [*chunks(40, 1, random.Random(0)), LENGTH - 40] if most == 1 else chunks(LENGTH, most, random.Random(most))
    watched = Watched(name, engine, 0, GREEDY)
    for count in (*cut, *[1] * DECODES):
        watched.step(count)
    check(name, engine, watched, f"chunks {cut}")


@pytest.mark.parametrize("others", [1, 2, 3, 7, 15, 16, 31, 63, 64, 127, 128, 254, 255])
def test_batches(made: tuple[str, str, ModelEngine], others: int) -> None:
    """Its prompt in chunks beside prompts and decodes, then decodes with all."""
    name, _, engine = made
    watched = Watched(name, engine, others, GREEDY, seed=others)
    for count in chunks(LENGTH, 400, random.Random(others)):
        watched.step(count)
    watched.all_begin()
    for _ in range(DECODES):
        watched.step(1)
    check(name, engine, watched, f"beside {others}")


@pytest.mark.parametrize("others", [0, 5, 40])
@pytest.mark.parametrize("cached", [0, 16, 320, 688, 704])
def test_preempted_and_behind_a_prefix(made: tuple[str, str, ModelEngine], cached: int, others: int) -> None:
    """All again, or all but a prefix, whose keys and values are there."""
    name, _, engine = made
    watched = Watched(name, engine, others, GREEDY, seed=cached)
    for count in (LENGTH, *[1] * 5):
        watched.step(count)
    watched.driver.again(0, cached)
    rest = watched.driver.length(0) - cached
    for count in (*chunks(rest, 450, random.Random(cached)), 1):
        watched.step(count)
    assert len(watched.logits()) == 8
    check(name, engine, watched, f"again behind {cached} beside {others}")


SEEDED = SamplingParams(
    max_tokens=64, temperature=0.9, top_p=0.95, top_k=1000, seed=5, logprobs=5, repetition_penalty=1.1,
    presence_penalty=0.2, frequency_penalty=0.1,
)  # fmt: skip


def drawn(name: str, engine: ModelEngine, params: SamplingParams, others: int) -> list[int]:
    watched = Watched(name, engine, others, params, seed=others)
    for count in (LENGTH, *[1] * 12):
        watched.step(count)
    return watched.driver.tokens[0]


@pytest.mark.parametrize(
    "params", [SEEDED, replace(SEEDED, allowed_token_ids=tuple(range(0, 4000, 3))), replace(SEEDED, min_p=0.02)]
)
def test_draws(made: tuple[str, str, ModelEngine], params: SamplingParams) -> None:
    """By the kernels, and by the general sampler, where others beside it need it too."""
    name, _, engine = made
    tokens = drawn(name, engine, params, 0)
    assert len(tokens) == 13
    for others in (1, 9, 70):
        assert drawn(name, engine, params, others) == tokens, others
