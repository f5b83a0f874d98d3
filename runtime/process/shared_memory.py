"""The folder of a mesh in the host's shared memory. Files in it outlive the process that made them, and end with the mesh.

The media process makes the folder; the supervisor removes it (supervisor/processes/shared_folders.py).
"""

import hashlib
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def prefix() -> str:
    """Of the names of this user's folders."""
    return f"meshlm-{os.getuid()}-"


def folder_of(run_dir: str) -> Path:
    """The folder of the mesh with this run directory: in that directory itself where the host has no shared memory."""
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return Path(run_dir) / "shared"
    return SHARED_MEMORY / f"{prefix()}{hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:16]}"
