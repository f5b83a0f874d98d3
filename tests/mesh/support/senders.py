"""examples/weight_sender.py, loaded from where it lies."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from waiting import free_port

EXAMPLE = Path(__file__).parents[3] / "examples" / "weight_sender.py"


def _module() -> Any:
    spec = importlib.util.spec_from_file_location("weight_sender", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = _module()
Refused: type[Exception] = example.Refused


@contextlib.contextmanager
def sender(backend: str, url: str) -> Iterator[Any]:
    made = example.MemorySender(url) if backend == "ipc" else example.GlooSender(url, free_port())
    try:
        yield made
    finally:
        made.close()
