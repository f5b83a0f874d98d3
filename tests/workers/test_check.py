"""What `meshlm serve --dry-run` asks of a worker: what it would refuse before it reads weights."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import torch
from cpu_steps import MODEL

from meshlm.runtime.errors import ProcessFatal
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers import check


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    dtype = torch.get_default_dtype()
    yield tmp_path
    torch.set_default_dtype(dtype)


def asked(folder: Path, **settings: object) -> None:
    values: dict[str, object] = {"model": str(folder), "load_format": "dummy", "device": "cpu"}
    check.check(resolve.resolve(flags.build(values | settings, None)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_gpu_blocks_override": 1}, "--num-gpu-blocks-override 1: one request of --max-model-len"),
        (
            {"num_gpu_blocks_override": 1, "device": "cuda"},
            "--num-gpu-blocks-override 1: one request of --max-model-len",
        ),
        ({"kv_cache_memory": 4096, "device": "cuda"}, "needs .* of KV cache and 4.00 KiB are there"),
        ({"worker_extension_cls": "nowhere.A"}, "--worker-extension-cls nowhere.A: ModuleNotFoundError"),
        ({"logits_processors": ["nowhere:A"], "device": "cuda"}, "logits processor nowhere:A: ModuleNotFoundError"),
    ],
)
def test_refused(folder: Path, settings: dict[str, object], said: str) -> None:
    with pytest.raises(ProcessFatal, match=said):
        asked(folder, **settings)


@pytest.mark.parametrize("device", ["cpu", "cuda", "fake"])
@pytest.mark.parametrize(
    "settings", [{}, {"max_model_len": -1, "kv_cache_memory": 32 << 10}, {"kv_cache_memory": 1 << 24}]
)
def test_what_would_start(
    folder: Path, device: str, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--max-model-len auto starts again with what fits. A GPU is asked for nothing."""

    def no_gpu(*_: object) -> None:
        raise AssertionError("a GPU is asked")

    for name in ("get_device_capability", "get_device_properties", "mem_get_info", "device_count"):
        monkeypatch.setattr(torch.cuda, name, no_gpu)
    asked(folder, device=device, **settings)


def test_shards_that_files_are_not_of(folder: Path) -> None:
    """What a rank reads by itself, too."""
    (folder / "model-rank-0-part-0.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(
        ProcessFatal, match=r"model-rank-0-part-0.safetensors: `meshlm save-sharded-state` has not written it"
    ):
        asked(folder, load_format="sharded_state")
