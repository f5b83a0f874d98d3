"""What is known without the weights is told before they are read."""

import json
from pathlib import Path

import pytest
import tokenizers
from cpu_steps import MODEL

from meshlm.protocol.config import MeshConfig
from meshlm.runtime import platforms
from meshlm.runtime.errors import ContextTooLong, ProcessFatal
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.engine import engine
from meshlm.workers.engine.make import make_engine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))

    def load_model(*_: object, deterministic: bool) -> None:
        raise AssertionError("the weights are read")

    monkeypatch.setattr(engine, "load_model", load_model)
    return tmp_path


def resolved(folder: Path, **settings: object) -> MeshConfig:
    values: dict[str, object] = {"model": str(folder), "device": "cpu", "load_format": "dummy", "dtype": "float32"}
    return resolve.resolve(flags.build(values | {"max_num_seqs": 4, "cpu_threads": 1} | settings, None))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_cache_memory": 4096}, "needs .* of KV cache and 4.00 KiB are there"),
        ({"num_gpu_blocks_override": 1}, "--num-gpu-blocks-override 1: one request of --max-model-len"),
    ],
)
def test_a_kv_cache_that_is_too_small(folder: Path, settings: dict[str, object], said: str) -> None:
    """It was told when the weights had been read, which takes minutes for large ones."""
    with pytest.raises(ProcessFatal, match=said):
        make_engine(resolved(folder, **settings), lambda *progress: None)


def test_a_cpu_without_memory_for_one_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(platforms.named("cpu")), "kv_cache_bytes", lambda self: 8192)
    with pytest.raises(ProcessFatal, match=r"of KV cache and 8.00 KiB are there"):
        make_engine(resolved(folder), lambda *progress: None)


def test_a_context_that_is_to_fit_starts_again_at_once(folder: Path) -> None:
    with pytest.raises(ContextTooLong):
        make_engine(resolved(folder, max_model_len=-1, kv_cache_memory=32 << 10), lambda *progress: None)


def test_a_cache_that_is_large_enough_goes_on_to_the_weights(folder: Path) -> None:
    with pytest.raises(AssertionError, match="the weights are read"):
        make_engine(resolved(folder, kv_cache_memory=1 << 24), lambda *progress: None)
