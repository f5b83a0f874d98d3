"""Files of the second tier in a folder of this host. Called by threads.py, in its threads; errors are OSError and BadFile.

The files hold the KV of users' prompts, from which these can be guessed: folders have mode 0700 and files 0600. A file appears whole,
by a rename; what a dead process has left half written is deleted when it is old.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshlm.store.disk.content import HEADER_BYTES, BadFile, check, header_of, key_of, name_of
from meshlm.store.disk.events import Listed

TEMPORARY = ".tmp"
OLD_S = 600.0  # a file that has been half written for so long is nobody's any more
SPARE = 20  # one part of the disk in so many is left free, where nobody says how much may be used


class Folder:
    """`path` need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, key: bytes, pages: Sequence[memoryview]) -> int:
        """Gives the bytes of the file."""
        file = self._path / name_of(key)
        self._make(file.parent)
        new = file.with_name(f"{file.name}.{os.getpid()}{TEMPORARY}")
        parts: list[bytes | memoryview] = [header_of(key, pages), *pages]
        num_bytes = sum(map(len, parts))
        try:
            with open(
                os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb", 0
            ) as opened:
                for part in parts:
                    _write(opened.fileno(), part)
            new.rename(file)
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        return num_bytes

    def _make(self, folder: Path) -> None:
        """The folder of two digits, its namespace's, and this one. OSError where others could read them."""
        if folder.is_dir():
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for one in (self._path, folder.parent, folder):
            one.mkdir(mode=0o700, exist_ok=True)
        found = folder.parent.lstat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{folder.parent} is another user's, or others may read it")

    def read(self, key: bytes, pages: Sequence[memoryview]) -> None:
        """Into these pages. BadFile; FileNotFoundError."""
        file = self._path / name_of(key)
        header = bytearray(HEADER_BYTES)
        num_bytes = HEADER_BYTES + sum(map(len, pages))
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", 0) as opened:
            descriptor = opened.fileno()
            if os.fstat(descriptor).st_size != num_bytes or os.preadv(descriptor, [header, *pages], 0) != num_bytes:
                raise BadFile("truncated")
            check(key, bytes(header), pages)
            with contextlib.suppress(OSError):  # a folder that is read only
                os.utime(descriptor)  # it is used

    def delete(self, key: bytes) -> None:
        (self._path / name_of(key)).unlink(missing_ok=True)

    def list(self) -> Listed:
        """All of it, of whatever namespace."""
        found: list[tuple[float, bytes, int]] = []
        for namespace in _entries(self._path):
            if namespace.is_dir(follow_symlinks=False):
                found += _files(namespace)
        found.sort()
        sizes = {key: size for _, key, size in found}
        disk = os.statvfs(_nearest(self._path))
        free = disk.f_frsize * (disk.f_bavail - disk.f_blocks // SPARE)
        return Listed(sizes, max(0, free))


def _files(namespace: "os.DirEntry[str]") -> Iterator[tuple[float, bytes, int]]:
    now = time.time()
    for shard in _entries(namespace.path):
        for entry in _entries(shard.path) if shard.is_dir(follow_symlinks=False) else ():
            key = key_of(namespace.name, shard.name, entry.name)
            with contextlib.suppress(FileNotFoundError):  # another mesh has just deleted it
                found = entry.stat(follow_symlinks=False)
                if key is not None:
                    yield found.st_mtime, key, found.st_size
                elif entry.name.endswith(TEMPORARY) and now - found.st_mtime > OLD_S:
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)


def _entries(path: Path | str) -> "list[os.DirEntry[str]]":
    try:
        with os.scandir(path) as found:
            return list(found)
    except FileNotFoundError:
        return []


def _nearest(path: Path) -> Path:
    """It, or the folder in which it will be made."""
    return next(one for one in (path, *path.parents) if one.is_dir())


def _write(descriptor: int, part: bytes | memoryview) -> None:
    rest = memoryview(part)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
