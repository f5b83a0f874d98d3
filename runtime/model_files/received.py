"""Where weights that a trainer sends as tensors are kept: a folder in the host's memory, one below it for each update.

Its files are safetensors beside the descriptions of the model's own folder, so all that reads a model's folder reads it, and a
worker that comes back does. The folder of a mesh hangs on its run directory. The first worker writes there; who has the run directory
removes it.
"""

import contextlib
import hashlib
import os
import shutil
import stat
from pathlib import Path

MEMORY = Path("/dev/shm")
_PREFIX = "meshlm-weights-"


def folder_of(run_dir: Path) -> Path:
    """The folder of the mesh with this run directory, which may not be there."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(run_dir))).hexdigest()[:16]
    return MEMORY / f"{_PREFIX}{os.getuid()}-{name}"


def make_private(folder: Path) -> None:
    """Makes a folder for an update. OSError, also where another user has put something in its place."""
    for path in (folder.parent, folder):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        info = path.stat(follow_symlinks=False)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise PermissionError(1, "it must be a directory of ours with mode 0700", str(path))


def remove_others(parent: Path, keep: str) -> None:
    """Forgets all updates below `parent` but that of the folder `keep`."""
    with contextlib.suppress(OSError):
        for path in list(parent.iterdir()):
            if str(path) != keep:
                shutil.rmtree(path, ignore_errors=True)


def remove(run_dir: Path) -> None:
    """The mesh that had this run directory is gone."""
    shutil.rmtree(folder_of(run_dir), ignore_errors=True)
