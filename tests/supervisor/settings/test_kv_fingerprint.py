"""The digest of all that decides what KV is computed; and settings with which no pages can be moved."""

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tiny_models import resolved_of, spec_of

from meshlm.protocol.config import KVTransferConfig, MeshConfig
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, kv_transfer, resolve

MOVES = KVTransferConfig(kv_offloading_size=1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"weights")
    (made / "config.json").write_bytes(b"{}")
    return made


def fingerprint(folder: Path, resolved: dict[str, Any] | None = None, **model: Any) -> str:
    facts = {"model_path": str(folder), "load_format": "safetensors", **(resolved or {})}
    config = MeshConfig(kv_transfer=MOVES, resolved=resolved_of(spec_of(), **facts))
    config = replace(config, model=replace(config.model, **model))
    return kv_transfer.with_fingerprint(config).kv_transfer.fingerprint


def test_it_differs_by_files_and_settings_and_by_nothing_else(folder: Path) -> None:
    found = [fingerprint(folder)]
    assert fingerprint(folder, max_model_len=7, served_model_name=("other",)) == found[0]
    for changes in (
        {"dtype": "bfloat16"},
        {"max_model_len": 77},
        {"load_format": "dummy"},
        {"weights_url": "s3://bucket/model"},
        {"drafter": resolved_of(spec_of(), model_path=str(folder))},
    ):
        found.append(fingerprint(folder, changes))
    for asked in ({"revision": "other"}, {"gguf_weights": "decoded"}, {"cpu_exact": True}, {"quantization": "fp8"}):
        found.append(fingerprint(folder, **asked))
    seeds = [fingerprint(folder, {"load_format": "dummy"}, seed=seed) for seed in (0, 1)]
    assert seeds[0] in found
    assert fingerprint(folder, seed=1) == found[0], "weights of files have no seed"
    found.append(seeds[1])
    weights = folder / "model.safetensors"
    weights.write_bytes(b"weightz")  # as large as it was
    status = weights.stat()
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1000))
    found.append(fingerprint(folder))
    (folder / "model-2.safetensors").write_bytes(b"")
    found.append(fingerprint(folder))
    assert len(set(found)) == len(found)


def test_it_costs_nothing_where_pages_stay() -> None:
    config = MeshConfig(resolved=resolved_of(spec_of(), model_path="/nowhere"))
    assert kv_transfer.with_fingerprint(config) is config


def settled(smollm2: Path, **values: object) -> MeshConfig:
    return resolve.resolve(flags.build({"model": str(smollm2), "device": "fake", **values}, None))


def test_a_mesh_has_one(smollm2: Path) -> None:
    one = settled(smollm2, kv_offloading_size=0.01).kv_transfer.fingerprint
    assert len(one) == 64
    assert settled(smollm2, kv_offloading_size=0.02).kv_transfer.fingerprint == one
    assert settled(smollm2).kv_transfer.fingerprint == ""


WRONG: tuple[tuple[dict[str, object], str], ...] = (
    (
        {"device": "cuda", "dp_roles": "prefill:1,decode:1", "data_parallel_size": 2, "enable_sleep_mode": True},
        "--enable-sleep-mode: ranks of --device cuda have one another's memory open, and none can give its own back; leave it out",
    ),
    (
        {"device": "cpu", "kv_offloading_size": 0.01, "kv_cache_dtype": "fp8", "calculate_kv_scales": True},
        "--calculate-kv-scales: scales that are calculated at a start are no others', whose pages are moved; leave it out",
    ),
)


@pytest.mark.parametrize(("values", "text"), WRONG)
def test_what_cannot_be_moved_is_refused_by_name(smollm2: Path, values: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError) as refused:
        settled(smollm2, **values)
    assert str(refused.value) == text
