"""The run directory: the sockets of one mesh and the state that its processes share, for its user alone.

By default one directory per port below a per-user base, so that `meshlm status` finds every mesh of this user. Whoever can replace a
directory can stand between the processes, so every directory on the way must be root's or this user's. Where such a one lets everybody
replace what is in it (a /tmp without the sticky bit, as an emptyDir volume of Kubernetes is) that is its owner's decision, and is said.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from meshlm.protocol.wire.ids import Identity
from meshlm.runtime.model_files import received
from meshlm.runtime.process.black_box import BEFORE, SUFFIX
from meshlm.runtime.process.streams import complain
from meshlm.supervisor.errors import StartError, StillRuns, raised_as
from meshlm.supervisor.group.succession import MeshState
from meshlm.supervisor.processes import shared_folders, state_file

STATUS_SOCKET = "status.sock"
LLM_PREFIX = "llm-"  # of the run directories of meshes that no command is for
CACHE = "cache"  # beside them, for kernels (children.py)
MAX_SOCKET_PATH = 107  # bytes of sun_path on Linux, less the terminator
OURS = (".sock", ".json", ".txt", ".store", ".sqlite", ".sqlite-wal", ".sqlite-shm", SUFFIX, BEFORE)
LOCK_WAIT_S = 1.0  # somebody may just be removing what a dead mesh left


def base_dir(environment: Mapping[str, str]) -> Path:
    """The folder of this user's run directories. XDG_RUNTIME_DIR may be another user's, after `sudo`."""
    runtime = environment.get("XDG_RUNTIME_DIR")
    with contextlib.suppress(OSError):
        if runtime and os.stat(runtime).st_uid == os.getuid() and os.access(runtime, os.W_OK):
            return Path(runtime) / "meshlm"
    return Path(tempfile.gettempdir()) / f"meshlm-{os.getuid()}"


@contextlib.contextmanager
def taken(wanted: Path) -> Iterator[Path]:
    """This run directory, empty and locked, by its real path; what is in it is removed in the end, and with it the directory where
    it was made here. StartError when another mesh runs there, when others could get into it, or when its path is too long."""
    with raised_as(StartError, OSError, of=f"--run-dir {wanted}"):
        longest = wanted.parent.resolve() / wanted.name / "coordinator-0000.sock"
        if len(os.fsencode(longest)) > MAX_SOCKET_PATH:
            raise StartError(f"--run-dir {wanted}: too long for a Unix socket; at most {MAX_SOCKET_PATH - 21} bytes")
        made = not wanted.exists() or wanted.parent == base_dir(os.environ)
        path = private(wanted)
        directory = _locked(path)
        if weak := ", ".join(_open_to_all(path)):
            complain(f"meshlm: other users can replace the run directory {path}: they can write in {weak}", "warning")
    with _left_empty(path, directory, made=made):
        try:
            _empty(directory)
            received.remove(path)
        except OSError as error:
            raise StartError(f"--run-dir {wanted}: {error.filename}: {error.strerror}") from None
        shared_folders.remove_dead()
        shared_folders.remove(path)
        yield path


@contextlib.contextmanager
def taken_over(path: Path, directory: int = -1) -> Iterator[MeshState | None]:
    """The run directory of a mesh whose supervisor died, with all that is in it, locked; and what that supervisor left, None where it
    had ended the mesh or this version cannot read it. In the end as `taken`. `directory`: a descriptor of it that is locked already."""
    if directory < 0:
        with raised_as(StartError, OSError, of=f"--run-dir {path}"):
            directory = _locked(private(path))
    made = path.parent == base_dir(os.environ)
    with _left_empty(path, directory, made=made):
        yield state_file.read(path)


@contextlib.contextmanager
def _left_empty(path: Path, directory: int, *, made: bool) -> Iterator[None]:
    """In the end what is in the locked directory is removed, unless the mesh in it is another one's to take over."""
    failed = True
    try:
        yield
        failed = False
    except StillRuns:
        os.close(directory)
        directory = -1
        raise
    except (SystemExit, KeyboardInterrupt) as stop:
        failed = isinstance(stop, SystemExit) and bool(stop.code)  # who stops a start knows why
        raise
    finally:
        if directory >= 0:
            shared_folders.remove(path)
            with contextlib.suppress(OSError):  # the next start says what is wrong there
                received.remove(path)
                _empty(directory, keep_stacks=True, keep_events=failed)
                if made:
                    path.rmdir()
            os.close(directory)


def private(wanted: Path) -> Path:
    """The real path of a private directory, made where it is missing. StartError, OSError."""
    wanted.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = wanted.parent.resolve() / wanted.name
    _check_way(path)
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        try:
            check_private(path)
        except StartError:
            if os.path.lexists(path):
                raise
            continue  # the mesh that had it has just removed it
        return path


def _locked(path: Path) -> int:
    """A descriptor of the directory, locked as long as it is open. The lock also keeps systemd-tmpfiles from cleaning in there."""
    until = time.monotonic() + LOCK_WAIT_S
    while True:
        directory = _opened(path)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(directory, path):
                return directory
            private(path)  # the mesh that had it has just ended and removed it
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(directory)
                raise StartError(f"--run-dir {path}: another mesh runs there") from None
            time.sleep(0.02)
        os.close(directory)


def _opened(path: Path) -> int:
    while True:
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # removed since it was checked
            private(path)


def _is_at(directory: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(directory), os.stat(path, follow_symlinks=False))
    return False


def check_private(path: Path, *, or_root: bool = False) -> None:
    """StartError unless `path` is a directory of ours that nobody else can enter, and nobody else can replace. `or_root`: root may ask
    another user's mesh."""
    with raised_as(StartError, OSError, of=f"run directory {path}"):
        info = path.stat(follow_symlinks=False)
    if or_root and os.getuid() == 0 and stat.S_ISDIR(info.st_mode):
        return
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise StartError(f"run directory {path} must be a directory of yours with mode 0700; --run-dir chooses another")
    _check_way(path.parent.resolve() / path.name)


def _check_way(path: Path) -> None:
    """StartError when a directory above `path`, which is a real path, is another user's, who could replace what is in it."""
    trusted = {0, os.getuid(), os.stat("/").st_uid}  # who owns the root can do all that anyway
    for above in path.parents:
        if above.stat(follow_symlinks=False).st_uid not in trusted:
            why = f"{above} is another user's, who could take the mesh over; choose another place with --run-dir"
            raise StartError(f"run directory {path}: {why}")


def _open_to_all(path: Path) -> list[str]:
    """Directories above in which others may replace what is not theirs."""
    modes = {above: above.stat(follow_symlinks=False).st_mode for above in path.parents}
    return [str(above) for above, mode in modes.items() if mode & 0o022 and not mode & stat.S_ISVTX]


def stacks_file(identity: Identity) -> str:
    """The file to which a process writes its stacks on SIGUSR1 (runtime/process/process.py), in the run directory."""
    return f"{identity.role.value}-{identity.index}.stacks.txt"


def _empty(directory: int, *, keep_stacks: bool = False, keep_events: bool = False) -> None:
    """Remove what a mesh left; its files are ours by name. Stacks that were written, and the last events of a mesh that failed, are for
    whoever looks for the reason."""
    for name in os.listdir(directory):
        if name in ("metrics", "rates"):
            shutil.rmtree(name, dir_fd=directory)
        elif name.endswith(OURS) or name in ("lock", "mesh.json.new"):  # the last two are of earlier versions
            info = os.stat(name, dir_fd=directory, follow_symlinks=False)
            kept = keep_events and name.endswith((SUFFIX, BEFORE))
            if not kept and not (keep_stacks and name.endswith(".txt") and info.st_size):
                os.unlink(name, dir_fd=directory)


def remove_dead(base: Path) -> None:
    """Remove the run directories below `base` in which no mesh runs any more; those in use are locked, or have processes whose
    supervisor died."""
    for path in _private_in(base):
        with contextlib.suppress(OSError):
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if state_file.has_orphans(path):
                    continue
                _empty(directory)
                received.remove(path)
                path.rmdir()
            finally:
                os.close(directory)


def running(base: Path) -> list[Path]:
    """Run directories below `base` that have a status socket (its mesh may still be gone). StartError when others could be there."""
    found = [path for path in _private_in(base) if (path / STATUS_SOCKET).exists()]
    return sorted(path for path in found if not path.name.startswith(LLM_PREFIX))


def left(base: Path) -> list[Path]:
    """Run directories below `base` with last events, of meshes that run or not. StartError as above."""
    return [path for path in _private_in(base) if any(path.glob(f"*{SUFFIX}"))]


def _private_in(base: Path) -> list[Path]:
    if not os.path.lexists(base):
        return []
    check_private(base)
    return [path for path in base.iterdir() if path.is_dir() and path.name != CACHE]
