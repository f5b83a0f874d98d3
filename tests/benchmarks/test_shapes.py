"""benchmarks/shapes.py: configurations that our architectures take, as large as their names say."""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import ModuleType

import pytest

from meshlm.architectures.quantization import formats
from meshlm.architectures.registry import weights_of
from meshlm.runtime.model_files.model_config import parse_config

BILLIONS = {
    "llama3-1b": 1.24, "llama3-3b": 3.21, "llama3-8b": 8.03, "llama3-70b": 70.6,
    "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.62,
    "qwen2.5-14b": 14.8, "qwen2.5-32b": 32.8, "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19,
    "qwen3-14b": 14.8, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5, "mistral-7b": 7.25, "mistral-nemo": 12.2,
    "gemma2-2b": 2.61, "gemma2-9b": 9.24, "gemma3-4b": 3.88,
    "gemma3-12b": 11.8, "gemma3-27b": 27.0, "phi3-mini": 3.82, "phi4": 14.7,
}  # fmt: skip


def test_each_is_as_large_as_its_model_is(benchmark_module: Callable[[str], ModuleType]) -> None:
    shapes = benchmark_module("shapes")
    assert set(shapes.SHAPES) == set(BILLIONS)
    for name, billions in BILLIONS.items():
        spec = parse_config(shapes.config_of(name), Path(name))[0]
        count = sum(prod(weight.shape) for weight in weights_of(spec).values())
        assert count / 1e9 == pytest.approx(billions, rel=0.01), name


@pytest.mark.parametrize(("name", "billions"), [("granite-4-h-tiny", 6.9), ("gpt-oss-20b", 20.9), ("bamba-9b", 9.8)])
def test_models_with_a_file_of_their_own(
    name: str, billions: float, benchmark_module: Callable[[str], ModuleType]
) -> None:
    spec = parse_config(benchmark_module("shapes").config_of(name), Path(name))[0]
    assert sum(prod(weight.shape) for weight in weights_of(spec).values()) / 1e9 == pytest.approx(billions, rel=0.03)


def test_a_folder_with_other_weights_and_a_tokenizer(
    benchmark_module: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    shapes = benchmark_module("shapes")
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 200_000}]})
    )
    folder = shapes.write("qwen3-8b+awq", tokenizer, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == 200_064
    for weights in ("awq", "fp8"):
        quantization = shapes.config_of(f"qwen3-8b+{weights}")["quantization_config"]
        assert formats()[weights].read(quantization)
    assert (folder / "tokenizer.json").exists()
    with pytest.raises(KeyError):
        shapes.config_of("qwen3-8b+gptq")
