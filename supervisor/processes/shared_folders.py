"""Removes folders of meshes in the host's shared memory: this mesh's own at its start and end, and those of meshes that were killed."""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from meshlm.runtime.process import shared_memory
from meshlm.supervisor.processes import state_file

OWNER = "run_dir"  # the file in such a folder that names the run directory of its mesh


def remove(run_dir: Path) -> None:
    """The folder of the mesh with this run directory, which runs no more or not yet."""
    shutil.rmtree(shared_memory.folder_of(str(run_dir)), ignore_errors=True)


def remove_dead() -> None:
    """The folders of this user's meshes that do not run."""
    with contextlib.suppress(OSError):
        for folder in shared_memory.SHARED_MEMORY.glob(f"{shared_memory.prefix()}*"):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with contextlib.suppress(OSError):
                if not _runs(Path((folder / OWNER).read_text())):
                    shutil.rmtree(folder, ignore_errors=True)


def _runs(run_dir: Path) -> bool:
    """Whether a mesh has this run directory: it is locked as long as the mesh runs (rundir.py), or its supervisor alone has died."""
    if state_file.has_orphans(run_dir):
        return True
    try:
        directory = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(directory)
    return False
