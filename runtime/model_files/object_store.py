"""Models in object storage (s3://, gs://, and whatever else fsspec has a package for): small files are fetched, weights stay there.

Called by model_files.py, which reads the small files as a folder's; workers stream the weights (workers/weights/sources.py).
Credentials are those of the storage's own package (AWS_ACCESS_KEY_ID, ...). fsspec is imported where a URL is given, and nowhere else.
"""

import fnmatch
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.extras import how_to_install

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://.+")
_FETCHED = ("*.json", "*.txt", "*.model", "*.jinja")
"""What is fetched of a folder and of the folders in it."""
MAX_FETCHED = 256 << 20  # bytes of one file: a vocabulary is no larger


def is_url(name: str) -> bool:
    """Whether this is a URL, not a path or a hub name."""
    return _URL.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A file or folder of object storage: as much of a Path as those need who read a folder of weights."""

    url: str  # of the folder, for messages
    system: Any  # of fsspec
    path: PurePosixPath
    size: int = 0

    def __str__(self) -> str:
        return f"{self.url.partition('://')[0]}://{str(self.path).lstrip('/')}"

    def __lt__(self, other: "RemotePath") -> bool:
        return self.path < other.path

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self.url, self.system, self.path / name)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def suffix(self) -> str:
        return self.path.suffix

    def is_dir(self) -> bool:
        return bool(self.system.isdir(str(self.path)))

    def is_file(self) -> bool:
        return bool(self.system.isfile(str(self.path)))

    def iterdir(self) -> Iterator["RemotePath"]:
        found = self.system.find(str(self.path), maxdepth=1, detail=True)
        return (RemotePath(self.url, self.system, PurePosixPath(path), int(at["size"])) for path, at in found.items())

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        return (file for file in self.iterdir() if fnmatch.fnmatch(file.name, pattern))

    def stat(self) -> os.stat_result:
        size = self.size or int(self.system.size(str(self.path)))
        return os.stat_result((0, 0, 0, 0, 0, 0, size, 0, 0, 0))

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Reads what is asked for, and a little more."""
        opened: IO[bytes] = self.system.open(str(self.path), mode, block_size=1 << 20)
        return opened

    def read_text(self, encoding: str) -> str:
        return self.read().decode(encoding)

    def read(self, begin: int | None = None, end: int | None = None) -> bytes:
        """The bytes from begin to end. Threads may call it side by side."""
        found: bytes = self.system.cat_file(str(self.path), start=begin, end=end)
        return found


AnyPath = Path | RemotePath


def folder_of(url: str) -> RemotePath:
    """ModelFilesError for storage that cannot be reached, or whose package is not installed."""
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise ModelFilesError(f"{url}: {error}; {how_to_install('objects')}") from None
    except (ValueError, OSError) as error:
        raise ModelFilesError(f"{url}: {error}") from None
    return RemotePath(url, system, PurePosixPath(path))


def fetch(url: str, download_dir: str) -> Path:
    """The small files of a folder, in a folder of their own below `download_dir` or the user's cache. ModelFilesError."""
    remote = folder_of(url)
    base = Path(download_dir).expanduser() if download_dir else _cache()
    folder = base / f"{remote.name}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    try:
        found = remote.system.find(str(remote.path), maxdepth=2, detail=True)
        if not found:
            raise ModelFilesError(f"{url}: there is nothing")
        names = {PurePosixPath(path).relative_to(remote.path): int(at["size"]) for path, at in found.items()}
        wanted = [name for name, size in names.items() if size <= MAX_FETCHED and _is_fetched(name)]
        for name in wanted:
            _replace(folder / name, remote.system.cat_file(str(remote.path / name)))
        for old in [file for file in folder.rglob("*") if file.is_file()]:
            if PurePosixPath(old.relative_to(folder)) not in wanted:
                old.unlink()
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{url}: cannot be read ({type(error).__name__}: {error})") from None
    return folder


def _is_fetched(name: PurePosixPath) -> bool:
    """Names of objects are anyone's: none may lead out of the folder."""
    return ".." not in name.parts and any(fnmatch.fnmatch(name.name, pattern) for pattern in _FETCHED)


def _replace(file: Path, content: bytes) -> None:
    """In one step: another mesh may be reading it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_bytes(content)
    new.replace(file)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshlm" / "objects"
