"""Which weights a worker begins with, takes and refuses; nothing is half done."""

import json
import os
from pathlib import Path

import pytest
from model_folders import folder_with

from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.protocol.weights import UNKNOWN, Manifest, WeightsVersion
from meshlm.runtime.model_files import manifest
from meshlm.runtime.model_files.digest import digest_of
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.weights.versions import WeightsRefused, WorkerWeights


class Engine:
    """Notes which weights it was given."""

    def __init__(self, refused: str = "") -> None:
        self.refused, self.has = refused, ""

    def check_weights(self, resolved: Resolved) -> str:
        return self.refused

    def load_weights(self, resolved: Resolved) -> None:
        self.has = resolved.model_path

    def sum_weights(self) -> str:
        return self.has


@pytest.fixture
def config(tmp_path: Path) -> MeshConfig:
    """Of a model in the folder a, beside which there is b."""
    for name in "ab":
        (tmp_path / name).mkdir()
        folder_with(tmp_path / name, **{"tokenizer.json": {"model": {"type": "BPE", "vocab": {}, "merges": []}}})
    made = resolve.resolve(
        flags.build({"model": str(tmp_path / "a"), "device": "fake", "run_dir": str(tmp_path)}, None)
    )
    assert made.require_resolved().weights_digest
    return made


def version(folder: Path, number: int = 1) -> WeightsVersion:
    return WeightsVersion(number, source=str(folder), digest=digest_of(str(folder)))


def test_it_begins_with_the_weights_of_the_mesh(config: MeshConfig, tmp_path: Path) -> None:
    weights = WorkerWeights(config)
    assert weights.to_begin_with(None).require_resolved().model_path == str(tmp_path / "a")
    manifest.write(tmp_path, Manifest(newer := version(tmp_path / "b")))
    assert manifest.version(tmp_path) == newer
    assert WorkerWeights(config).to_begin_with(None).require_resolved().model_path == str(tmp_path / "b")
    asked = WorkerWeights(config)
    assert asked.to_begin_with(weights.start).require_resolved().model_path == str(tmp_path / "a"), "a Reset is newer"
    assert asked.version == weights.start


def touch(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


def test_what_cannot_be_read_again_is_said(config: MeshConfig, tmp_path: Path) -> None:
    manifest.write(tmp_path, Manifest(version(tmp_path / "b")))
    touch(tmp_path / "b")
    weights = WorkerWeights(config)
    weights.to_begin_with(None)
    assert weights.version.number == 0, "the start's, which nobody takes for the mesh's"
    assert "its files are no longer those of weights 1" in weights.behind
    touch(tmp_path / "a")
    weights = WorkerWeights(config)
    weights.to_begin_with(None)
    assert weights.version.number == UNKNOWN
    changed = WorkerWeights(config)
    changed.to_begin_with(WeightsVersion(2, digest="of a call"))
    assert "memory of workers alone" in changed.behind


def test_it_changes_them_or_keeps_what_it_has(config: MeshConfig, tmp_path: Path) -> None:
    weights, engine = WorkerWeights(config), Engine()
    newer = version(tmp_path / "b")
    weights.change(engine, newer)
    assert (weights.version, weights.behind, engine.has) == (newer, "", str(tmp_path / "b"))
    engine.has = ""
    again = WeightsVersion(5, "renamed", newer.source, newer.digest)
    weights.change(engine, again)
    assert (weights.version, engine.has) == (again, ""), "equal weights are not read again"
    weights.change(Engine("they hold NaN"), weights.start)
    assert (weights.version, weights.behind) == (again, "they hold NaN")
    weights.change(engine, WeightsVersion(6, digest="of a call"))
    assert weights.version == again
    assert "memory" in weights.behind
    of_another_host = WeightsVersion(0, source="/elsewhere", digest="of copies")
    assert weights.start.is_same(of_another_host), "each host has its own copy of the weights of the start"
    weights.change(engine, of_another_host)
    assert (weights.version, weights.behind, engine.has) == (weights.start, "", str(tmp_path / "a"))


def test_a_source_is_checked_whole(config: MeshConfig, tmp_path: Path) -> None:
    weights = WorkerWeights(config)
    assert weights.check(Engine(), str(tmp_path / "b")) == digest_of(str(tmp_path / "b"))
    with pytest.raises(WeightsRefused, match="NaN"):
        weights.check(Engine("NaN"), str(tmp_path / "b"))
    with pytest.raises(WeightsRefused, match="nowhere"):
        weights.check(Engine(), str(tmp_path / "nowhere"))
    described = json.loads((tmp_path / "b" / "config.json").read_text())
    (tmp_path / "b" / "config.json").write_text(json.dumps(described | {"rms_norm_eps": 0.1}))
    with pytest.raises(WeightsRefused, match=r"another model than at the start \(rms_norm_eps\)"):
        weights.check(Engine(), str(tmp_path / "b"))

    class Writes(Engine):
        def check_weights(self, resolved: Resolved) -> str:
            touch(tmp_path / "a")
            return ""

    with pytest.raises(WeightsRefused, match="are being written"):
        weights.check(Writes(), str(tmp_path / "a"))


def test_calls_that_do_the_same_make_the_same_version() -> None:
    one, other = WeightsVersion(3, digest="x"), WeightsVersion(3, "named", digest="x")
    assert one.after_call("id") == other.after_call("id") != one.after_call("other")
    assert one.after_call("id").in_memory
    assert (one.label, other.label, WeightsVersion().key, one.key) == ("3", "named", b"", b"x")
