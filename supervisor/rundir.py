"""The run directory: sockets, mesh.json and the status socket of one mesh, readable by its user alone.

By default one directory per port below a per-user base, so that `meshlm status` finds every mesh of this user.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.ids import Identity
from meshlm.supervisor.errors import StartError

STATUS_SOCKET = "status.sock"
CONFIG_FILE = "mesh.json"
MAX_SOCKET_PATH = 107  # bytes of sun_path on Linux, less the terminator


def base_dir(environment: Mapping[str, str]) -> Path:
    """Where this user's run directories are."""
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "meshlm"
    return Path(tempfile.gettempdir()) / f"meshlm-{os.getuid()}"


def create(path: Path) -> Path:
    """Make an empty run directory of mode 0700. StartError when it is another user's or its path is too long."""
    longest = path / "coordinator-0000.sock"
    if len(os.fsencode(longest)) > MAX_SOCKET_PATH:
        raise StartError(f"--run-dir {path}: too long for a Unix socket; at most {MAX_SOCKET_PATH - 21} bytes")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists():
            check_private(path)
            _empty(path)
        else:
            path.mkdir(mode=0o700)
    except OSError as error:
        raise StartError(f"--run-dir {path}: {error.strerror}") from None
    check_private(path)
    return path


LOCK_FILE = "lock"


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep other meshes out of this run directory. StartError when one is in it."""
    with (path / LOCK_FILE).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StartError(f"--run-dir {path}: another mesh runs there") from None
        yield


def refuse_held(path: Path) -> None:
    """StartError when a mesh runs there; its files must not be emptied away."""
    if (path / LOCK_FILE).exists():
        with held(path):
            pass


def check_private(path: Path) -> None:
    """StartError unless `path` is a directory of ours that nobody else can enter."""
    info = path.stat(follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise StartError(f"run directory {path} must be a directory of yours with mode 0700")


def stacks_file(identity: Identity) -> str:
    """Where a process writes its stacks on SIGUSR1 (runtime/process.py), in the run directory."""
    return f"{identity.role.value}-{identity.index}.stacks.txt"


def _empty(path: Path) -> None:
    """Remove what an earlier mesh left; its files are ours by name."""
    for entry in path.iterdir():
        if entry.suffix in {".sock", ".json", ".txt"}:
            entry.unlink()
        elif entry.name == "metrics":
            shutil.rmtree(entry)


def write_config(path: Path, config: MeshConfig) -> None:
    """Write mesh.json: whole, or as it was before, whenever a process reads it. StartError when it cannot be written."""
    new = path / f"{CONFIG_FILE}.new"
    try:
        new.touch(mode=0o600)
        new.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
        new.replace(path / CONFIG_FILE)
    except OSError as error:
        raise StartError(f"{path / CONFIG_FILE} cannot be written: {error.strerror}") from None


def running(base: Path) -> list[Path]:
    """Run directories below `base` that have a status socket (its mesh may still be gone)."""
    if not base.is_dir():
        return []
    return sorted(path for path in base.iterdir() if (path / STATUS_SOCKET).exists())
