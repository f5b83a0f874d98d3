"""nvidia-smi is asked for properties, and what it does instead of an answer is an OSError."""

from pathlib import Path

import pytest

from meshlm.runtime import nvidia_smi


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is found as nvidia-smi."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "nvidia-smi"


def write(program: Path, text: str) -> None:
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


def test_each_gpu_is_a_line(program: Path) -> None:
    write(program, 'echo "$@"; echo "H200, 143771 MiB"')
    asked = "--id=1 --query-gpu=name,memory.total --format=csv,noheader"
    assert nvidia_smi.query("name,memory.total", "--id=1") == [asked, "H200, 143771 MiB"]


def test_no_driver_is_no_error(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(program.parent))
    assert nvidia_smi.query("name") is None


def test_a_driver_that_fails_or_hangs_is_one(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(program, "exit 9")
    with pytest.raises(OSError, match="exit status 9"):
        nvidia_smi.query("name")
    monkeypatch.setattr(nvidia_smi, "LIMIT_S", 0.1)
    write(program, "exec sleep 60")
    with pytest.raises(OSError, match="timed out"):
        nvidia_smi.query("name")
