"""A process that reads a mapped file past its end is ended by SIGBUS: what the supervisor says of it."""

import json
import signal
import struct
from pathlib import Path
from typing import Literal

import pytest
from tiny_models import resolved_of, spec_of

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.ids import Identity, Role
from meshlm.supervisor.processes.cut_files import told

WORKER, SIGBUS = Identity(Role.WORKER, 0), -signal.SIGBUS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of a kilobyte of weights each."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [1024], "data_offsets": [0, 1024]}}).encode()
    for number in (1, 2):
        file = tmp_path / f"model-{number}.safetensors"
        file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(1024))
    return tmp_path


def config_of(path: Path, load_format: Literal["safetensors", "gguf", "dummy"]) -> MeshConfig:
    resolved = resolved_of(spec_of(), model_path=str(path), tokenizer_path=str(path), load_format=load_format)
    return MeshConfig(resolved=resolved)


def test_the_file_that_is_too_short_is_named(folder: Path) -> None:
    config = config_of(folder, "safetensors")
    file = folder / "model-2.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert told(config, WORKER, SIGBUS) == (
        f"worker/0: the weights file {file} ended early, or was changed while it was read (signal 7)"
    )


def test_one_that_is_whole_again_is_not(folder: Path) -> None:
    """Somebody wrote it anew while it was read."""
    said = told(config_of(folder, "safetensors"), WORKER, SIGBUS)
    assert said == f"worker/0: a weights file in {folder} ended early, or was changed while it was read (signal 7)"


@pytest.mark.parametrize(("role", "kind"), [(Role.WORKER, "weights file"), (Role.DETOKENIZER, "file")])
def test_a_gguf_file_is_the_only_one(tmp_path: Path, role: Role, kind: str) -> None:
    said = told(config_of(tmp_path / "m.gguf", "gguf"), Identity(role, 1), SIGBUS)
    assert f"{role.value}/1: the {kind} {tmp_path}/m.gguf ended early" in said


def test_of_other_ends_and_of_those_who_read_no_weights_nothing_is_known(folder: Path) -> None:
    config = config_of(folder, "safetensors")
    assert told(config, WORKER, -signal.SIGKILL) == told(config, WORKER, 1) == ""
    assert told(config, Identity(Role.SCHEDULER, 0), SIGBUS) == ""
    assert told(config, Identity(Role.DETOKENIZER, 0), SIGBUS) == "", "its vocabulary is no safetensors file"
    assert told(config_of(folder, "dummy"), WORKER, SIGBUS) == ""
