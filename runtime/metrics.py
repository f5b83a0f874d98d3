"""Where prometheus_client keeps the numbers that several processes share. Call before it is imported."""

import os
from pathlib import Path


def prepare(run_dir: str) -> None:
    """Point the library at `metrics/` in the run directory."""
    folder = Path(run_dir) / "metrics"
    folder.mkdir(mode=0o700, exist_ok=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
