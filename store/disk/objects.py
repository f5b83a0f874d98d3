"""Files of the second tier in object storage, by fsspec. Called by threads.py, in its threads; errors are OSError and BadFile.

An object appears whole, as such storage has it. Who may read the objects is the storage's to say.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from meshlm.runtime.model_files.object_store import RemotePath
from meshlm.store.disk.content import HEADER_BYTES, BadFile, check, header_of, key_of, name_of
from meshlm.store.disk.events import Listed


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Packages of storages raise errors of their own."""
    try:
        yield
    except (OSError, BadFile):
        raise
    except Exception as error:  # of whatever package reaches this storage
        raise OSError(f"{type(error).__name__}: {error}") from error


class Objects:
    """`base`: where the namespaces' folders are."""

    def __init__(self, base: RemotePath) -> None:
        self._base = base

    def _path(self, key: bytes) -> str:
        return str(self._base.path / name_of(key))

    def write(self, key: bytes, pages: Sequence[memoryview]) -> int:
        """Gives the bytes of the object."""
        content = b"".join((header_of(key, pages), *pages))
        with _as_os_errors():
            path = self._path(key)
            self._base.system.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._base.system.pipe_file(path, content)
        return len(content)

    def read(self, key: bytes, pages: Sequence[memoryview]) -> None:
        """Into these pages. BadFile; FileNotFoundError."""
        with _as_os_errors():
            content = memoryview(self._base.system.cat_file(self._path(key)))
        if len(content) != HEADER_BYTES + sum(map(len, pages)):
            raise BadFile("truncated")
        at = HEADER_BYTES
        for page in pages:
            page[:] = content[at : at + len(page)]
            at += len(page)
        check(key, bytes(content[:HEADER_BYTES]), pages)

    def delete(self, key: bytes) -> None:
        with _as_os_errors():
            try:
                self._base.system.rm_file(self._path(key))
            except FileNotFoundError:
                return

    def list(self) -> Listed:
        """All of it, of whatever namespace; in no order, as not every storage says when an object was written."""
        with _as_os_errors():
            self._base.system.invalidate_cache()  # other meshes write there, too
            try:
                found = self._base.system.find(str(self._base.path), detail=True)
            except FileNotFoundError:
                found = {}
        sizes: dict[bytes, int] = {}
        for path, about in found.items():
            words = path.split("/")
            if len(words) > 2 and (key := key_of(*words[-3:])) is not None:
                sizes[key] = int(about["size"])
        return Listed(sizes)
