"""Kernels compile for a Hopper GPU, with the Triton that is installed; also where there is no GPU (support/compiled.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "support/compiled.py"


@pytest.mark.parametrize(("what", "least"), [("products", 17), ("attention", 12), ("states", 9)])
def test_kernels_compile(what: str, least: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", str(PROGRAM), what], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) >= least, done.stdout
