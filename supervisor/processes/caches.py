"""The folders in which workers keep compiled kernels. Where the usual ones cannot be written there is a private one, so that none is
left out.

Kernels are programs: the folder in their place is as private as the run directories beside it. Called by io.py.
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from meshlm.protocol.config import MeshConfig
from meshlm.runtime import platforms
from meshlm.supervisor.errors import StartError
from meshlm.supervisor.processes import rundir

USUAL = {"XDG_CACHE_HOME": ".cache", "TRITON_CACHE_DIR": ".triton/cache"}


def prepared(config: MeshConfig, say: Callable[[str, str], None]) -> dict[str, str]:
    """Variables to set for the workers of this mesh. Where they are not the usual ones that is said once."""
    changed, why = for_workers(config.resolved.device if config.resolved else "", os.environ)
    if why:
        say(why, "warning")
    return changed


def for_workers(device: str, environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Variables to set for workers, and a line that says why; empty where the usual folders can be used."""
    changed, why = {}, []
    for variable in platforms.named(device).kernel_caches if device else ():
        folder = _usual(variable, environment)
        reason = "there is no home directory" if folder is None else _unusable(folder)
        if reason:
            try:
                other = rundir.private(rundir.base_dir(environment) / rundir.CACHE) / USUAL[variable].replace(
                    "/", "-"
                ).strip(".")
            except (OSError, StartError) as error:
                return {}, f"kernels cannot be kept: {reason}; {error}"
            changed[variable] = str(other)
            why.append(f"{reason}: kernels are kept in {other}")
    return changed, "; ".join(why)


def _usual(variable: str, environment: Mapping[str, str]) -> Path | None:
    if environment.get(variable):
        return Path(environment[variable])
    try:
        return Path.home() / USUAL[variable]
    except RuntimeError:  # a user without a name, as in some containers
        return None


def _unusable(folder: Path) -> str:
    """Why nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0")
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""
