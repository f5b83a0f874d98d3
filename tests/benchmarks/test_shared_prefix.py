"""benchmarks/shared_prefix.py: both ways that it times give the same (in the interpreter, no GPU)."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run in the interpreter")
@pytest.mark.parametrize(("shape", "rows"), [((8, 2, 32), 64), ((3, 1, 16), 16)])
def test_both_ways_give_the_same(
    shape: tuple[int, int, int],
    rows: int,
    benchmark_module: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=8))
    module = benchmark_module("shared_prefix")
    for name, value in (("DEVICE", torch.device("cpu")), ("DTYPE", torch.float32), ("OWN", 48), ("CACHES", 1)):
        monkeypatch.setattr(module, name, value)
    case = module.Case(shape, 5, 256, filled=True)
    case.shared(module.Choice(rows, 32, 4, 2, 1))()
    case.shared(module.Choice(), only_prefix=True)()
    assert case.error() < 1e-5
