"""The mesh's version of the weights, in a file of the run directory: the coordinator writes it, its successor and workers read it."""

from pathlib import Path

import msgspec

from meshlm.protocol.weights import WeightsVersion

FILE = "weights.json"


def read(run_dir: Path) -> WeightsVersion | None:
    """None where the weights were never updated, or this host does not see the run directory of the coordinator."""
    try:
        return msgspec.json.decode((run_dir / FILE).read_bytes(), type=WeightsVersion)
    except FileNotFoundError:
        return None


def write(run_dir: Path, version: WeightsVersion) -> None:
    """It is there whole, or as it was."""
    new = run_dir / f"new-{FILE}"
    new.write_bytes(msgspec.json.encode(version))
    new.replace(run_dir / FILE)
