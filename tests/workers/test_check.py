"""What `meshlm serve --dry-run` asks of a worker: what it would refuse before it reads weights."""

import json
from collections.abc import Iterator
from pathlib import Path

import packed_models
import pytest
import quantised_models
import small_whisper
import tokenizers
import torch
from cpu_steps import MODEL
from family_models import folder_of
from safetensors.torch import save_file

from meshlm.architectures.registry import architectures
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


@pytest.mark.parametrize("name", [*packed_models.KINDS, *quantised_models.KINDS])
def test_quantised_checkpoints_are_looked_at_for_a_gpu_without_one(name: str, folder: Path) -> None:
    """Those that a worker serves are not refused, and a tensor that is not there is."""
    if name in packed_models.KINDS:
        _, tensors = packed_models.write(folder, packed_models.KINDS[name])
    else:
        _, tensors = quantised_models.write(folder, quantised_models.KINDS[name])
    asked(folder, device="cuda", load_format="auto")
    left = {key: tensor for key, tensor in tensors.items() if "layers.1.mlp.up_proj" not in key}
    save_file(left, folder / "model.safetensors")
    with pytest.raises(ProcessFatal, match=r"missing: layers\.1\.mlp\.up_proj"):
        asked(folder, device="cuda", load_format="auto")


@pytest.mark.parametrize("architecture", sorted(architectures()))
def test_every_family_is_looked_at_for_a_gpu_without_one(architecture: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if architecture == "WhisperForConditionalGeneration":
        small_whisper.made(folder)
    else:
        folder_of(architecture, folder)
    dtype = torch.get_default_dtype()
    try:
        asked(folder, device="cuda")
    finally:
        torch.set_default_dtype(dtype)
