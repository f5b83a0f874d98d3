"""Vectors of prompts are made of transformers' hidden states, whatever chunks, neighbours, preemptions and ranks there are."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from engine_driver import Driver, engine
from hypothesis import given, settings
from hypothesis import strategies as st
from near_transformers import vector
from numpy.typing import NDArray
from sharded_models import Threads, communicators, shards
from small_models import SMALL

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.pool import Pool, PoolKind
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.distributed.communicator import Communicator
from meshlm.workers.distributed.placement import WorkerPlacement
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.make import make_engine
from meshlm.workers.rows.extras.prompt_results import PoolingRows

KINDS = tuple(PoolKind)
GREEDY = SamplingParams(temperature=0.0)
ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "kv_cache_memory": 1 << 24,
    "max_num_seqs": 4,
    "cpu_threads": 1,
}


def saved(name: str, folder: Path) -> Any:
    """transformers' model, saved to the folder."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **{**SMALL, "num_hidden_layers": 2, "max_position_embeddings": 1024}
    )
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    theirs.save_pretrained(folder)
    return theirs


def same(found: bytes, expected: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(np.frombuffer(found, np.float32), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_beside_a_text(name: str, kind: PoolKind, tmp_path: Path) -> None:
    theirs, ours = saved(name, tmp_path), engine(tmp_path, load_format="auto", **ON_CPU)
    assert ours.facts.pool_kinds == KINDS
    prompts = [[5, 9, 200, 3, 77, 8, 1, 40, 12], [7], [30, 31, 32]]
    driver = Driver(ours, prompts, GREEDY, {0: Pool(kind), 1: Pool(kind)})
    driver.step({1: 1, 0: 5, 2: 3})
    assert list(driver.pooled) == [1]
    driver.step({2: 1, 0: 4})
    for row in range(2):
        same(driver.pooled[row], vector(theirs, prompts[row], kind))
        num_vectors = len(prompts[row]) if kind is PoolKind.ALL else 1
        assert len(driver.pooled[row]) == ours.facts.pooled_bytes * num_vectors
    ours.reset()
    alone = Driver(ours, [prompts[2]], GREEDY)
    alone.step({0: 3})
    alone.step({0: 1})
    assert alone.tokens[0] == driver.tokens[2], "the neighbours' vectors change no token"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelEngine]:
    folder = tmp_path_factory.mktemp("llama")
    return saved("Llama", folder), engine(folder, load_format="auto", **ON_CPU)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_histories(small: tuple[Any, ModelEngine], data: st.DataObject) -> None:
    """Chunks of any length, and rows that begin anew in the middle of their prompts."""
    theirs, ours = small
    draw = data.draw
    prompts = draw(st.lists(st.lists(st.integers(0, 210), min_size=1, max_size=40), min_size=1, max_size=4))
    kinds = [draw(st.sampled_from(KINDS)) for _ in prompts]
    ours.reset()
    driver = Driver(ours, prompts, GREEDY, {row: Pool(kind) for row, kind in enumerate(kinds)})
    waiting = set(range(len(prompts)))
    while waiting:
        counts = {}
        for row in sorted(waiting):
            left = len(prompts[row]) - driver.computed[row]
            if driver.computed[row] and draw(st.integers(0, 5)) == 5:
                driver.again(row, 0)
            elif count := left - draw(st.integers(0, left)):
                counts[row] = count
        if counts:
            driver.step(counts)
        waiting -= set(driver.pooled)
    for row, kind in enumerate(kinds):
        same(driver.pooled[row], vector(theirs, prompts[row], kind))


class Placed(WorkerPlacement):
    """A rank in a thread of this process."""

    def __init__(self, shard: Shard, comm: Threads) -> None:
        super().__init__(shard)
        self._comm = comm

    def connect(self, device: torch.device, dtype: torch.dtype, tokens: int, hidden: int) -> Communicator:
        return self._comm


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_of_a_group(tp: int, pp: int, tmp_path: Path) -> None:
    """Each of the last stage finds the same, and the stages before give none."""
    theirs, prompts = saved("Llama", tmp_path), [[5, 9, 200, 3, 77, 8, 1, 40, 12], [7], [30, 31, 32]]
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    layout = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "max_model_len": 1024}
    config = resolve.resolve(flags.build({"model": str(tmp_path), **ON_CPU, **layout}, None))
    ranks = shards(tp, pp)

    def one(shard: Shard, comm: Threads) -> dict[int, bytes]:
        driver = Driver(placed(config, shard, comm), prompts, GREEDY, {row: Pool(KINDS[row]) for row in range(3)})
        driver.step({1: 1, 0: 5, 2: 2})
        driver.step({2: 1, 0: 4})
        return driver.pooled

    with ThreadPoolExecutor(len(ranks)) as threads:
        found = list(threads.map(one, ranks, communicators(ranks)))
    for shard, vectors in zip(ranks, found, strict=True):
        assert sorted(vectors) == (list(range(3)) if shard.is_last else [])
        for row, found_vector in vectors.items():
            same(found_vector, vector(theirs, prompts[row], KINDS[row]))


def placed(config: MeshConfig, shard: Shard, comm: Threads) -> ModelEngine:
    report: Callable[..., None] = lambda *news: None  # noqa: E731
    return make_engine(config, report, Placed(shard, comm))


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
def test_a_vector_that_is_not_finite_is_an_error_of_its_request_alone(
    small: tuple[Any, ModelEngine], spoilt: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON would say null for each of its numbers."""
    _, ours = small
    ours.reset()
    pooler = ours.extras.kind(PoolingRows)._pooled_step.__self__  # type: ignore[attr-defined]
    finish = pooler._finish
    weights = torch.tensor([[1.0], [spoilt]])
    monkeypatch.setattr(pooler, "_finish", lambda states, task: finish(states, task) * weights)
    driver = Driver(ours, [[5, 9], [7, 8]], GREEDY, {row: Pool(PoolKind.LAST) for row in range(2)})
    driver.step({0: 2, 1: 2})
    assert list(driver.pooled) == [0]
    assert {place: failed.kind for place, failed in driver.result.failed.items()} == {1: ErrorKind.INTERNAL}
