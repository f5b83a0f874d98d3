"""The mesh's version of the weights, and how ranks roll to it, in a file of the run directory: the coordinator writes it, its successor
and workers read it."""

from pathlib import Path

import msgspec

from meshlm.protocol.weights import Manifest, WeightsVersion

FILE = "weights.json"


def read(run_dir: Path) -> Manifest | None:
    """None where the weights were never updated, or this host does not see the run directory of the coordinator."""
    try:
        return msgspec.json.decode((run_dir / FILE).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None


def version(run_dir: Path) -> WeightsVersion | None:
    """The mesh's version alone."""
    found = read(run_dir)
    return None if found is None else found.version


def write(run_dir: Path, manifest: Manifest) -> None:
    """It is there whole, or as it was."""
    new = run_dir / f"new-{FILE}"
    new.write_bytes(msgspec.json.encode(manifest))
    new.replace(run_dir / FILE)
