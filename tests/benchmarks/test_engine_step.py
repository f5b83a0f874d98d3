"""benchmarks/engine_step.py: the tables of models with several groups of layers, stepped on a CPU."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from meshlm.protocol.kv import FullAttention, RecurrentState, SlidingWindow

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def engine_step(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("engine_step")


def test_each_group_has_a_column(engine_step: ModuleType) -> None:
    specs = (FullAttention(), RecurrentState(), SlidingWindow(8))
    assert engine_step.block_table(1, 2, specs).tolist() == [6, 7, 8, 9, 7, 11], "a state's page is carried on"
    assert engine_step.block_table(2, 3, ()).tolist() == [6, 7, 8]
    rows = engine_step.prompts(3, 5, 4, 6, specs)
    tables = [np.frombuffer(new.block_ids, np.int32) for new in rows]
    assert [len(table) for table in tables] == [9, 9, 9]
    assert len(set(np.concatenate(tables).tolist())) == 3 * (3 + 1 + 3), "rows share none"


def test_flags_are_words_or_numbers(engine_step: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other benchmarks say numbers as such."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(engine_step.make, "make_engine", lambda config, *rest: config)
    given = ["--max-num-seqs", 8, "--max-model-len", "512", "--tune", "off", "--device", "cpu"]
    config = engine_step.make_engine(str(tmp_path), given)
    assert (config.scheduler.max_num_seqs, config.model.max_model_len, config.worker.tune) == (8, 512, "off")


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen2.5-7b", 7.62 - 152064 * 3584e-9), ("gemma3-4b", 3.88), ("llama3-3b", 3.21)]
)
def test_an_embedding_that_is_no_head_is_not_read(
    name: str, billions: float, engine_step: ModuleType, benchmark_module: Callable[[str], ModuleType]
) -> None:
    read = engine_step.bytes_read(benchmark_module("shapes").config_of(name), Path(name))
    assert read / 2e9 == pytest.approx(billions, rel=0.01)
