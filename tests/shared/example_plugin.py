"""examples/plugin, installed as its users would install it."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"


def install(folder: Path) -> Path:
    """The folder for PYTHONPATH."""
    target, source = folder / "site", folder / "plugin"
    shutil.copytree(PLUGIN, source)  # setuptools builds in it
    here = ["--no-index", "--no-build-isolation"] if importlib.util.find_spec("setuptools") else []
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", *here, "--target", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return target
