"""benchmarks/tune_rows.py: the products that it measures are those of the models."""

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from meshlm.kernels import tables


@pytest.fixture(autouse=True)
def nothing_asked() -> Iterator[None]:
    tables.forget(all_of_it=True)
    yield
    tables.forget(all_of_it=True)


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen2.5-7b", 7.62), ("gemma3-4b", 3.88), ("phi3-mini", 3.82), ("mistral-nemo", 12.2)]
)
def test_products_hold_the_weights_of_a_model(
    name: str, billions: float, benchmark_module: Callable[[str], ModuleType]
) -> None:
    config = benchmark_module("shapes").config_of(name)
    found = benchmark_module("tune_rows").products_of(config)
    vocabulary = (config["vocab_size"], config["hidden_size"], False)
    layer = sum(outputs * inputs * (2 if gate else 1) for outputs, inputs, gate in found - {vocabulary})
    embedding = vocabulary[0] * vocabulary[1] * (1 if config["tie_word_embeddings"] else 2)
    assert (layer * config["num_hidden_layers"] + embedding) / 1e9 == pytest.approx(billions, rel=0.01)


def test_what_is_asked_for(benchmark_module: Callable[[str], ModuleType]) -> None:
    """Gates of silu are in the kernel, of GELU they are not; the head of a large vocabulary is too large for it."""
    tune_rows = benchmark_module("tune_rows")
    assert ("gemv", (18944, 3584, True)) in tune_rows.asked(["qwen2.5-7b"])
    assert ("gemv", (152064, 3584, False)) not in tables.asked()
    assert ("gemv", (2 * 10240, 2560, False)) in tune_rows.asked(["gemma3-4b"])
