"""examples/weight_sender.py, loaded from where it lies, and a mesh that it sends to."""

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from split_models import FLAGS
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


def dev(backend: str) -> tuple[str, ...]:
    """The flags of a mesh to which tensors are sent by this backend."""
    return (*FLAGS, "--server-dev-mode", "--weight-transfer-config", json.dumps({"backend": backend}))


def tensors(folder: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = load_file(f"{folder}/model.safetensors")
    return found
