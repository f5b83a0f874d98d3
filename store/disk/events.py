"""What the second tier has done by its threads, and what came of it. Keys have their namespaces before them."""

from msgspec import Struct


class ReadFile(Struct, frozen=True):
    """Read a key's file into these slots."""

    key: bytes
    slots: tuple[int, ...]
    slot_bytes: int


class FileRead(Struct, frozen=True):
    """`failure`: why nothing in the slots counts. `is_bad`: the file was not what its name says, and is deleted; else nobody knows."""

    key: bytes
    duration_s: float = 0.0
    failure: str = ""
    is_bad: bool = False
    is_gone: bool = False  # there is no such file


class WriteFile(Struct, frozen=True):
    """Write a key's file from these slots."""

    key: bytes
    slots: tuple[int, ...]
    slot_bytes: int


class FileWritten(Struct, frozen=True):
    """`num_bytes`: of the file. failure: why there is none."""

    key: bytes
    num_bytes: int = 0
    failure: str = ""


class DeleteFile(Struct, frozen=True):
    """Delete a key's file, behind all writes before."""

    key: bytes


class ListFiles(Struct, frozen=True):
    """Look what is there, behind all writes and deletions before."""


class Listed(Struct, frozen=True):
    """The bytes of each key's file, those first that have not been used for longest. free_bytes: so many may be added; None: any."""

    sizes: dict[bytes, int] = {}
    free_bytes: int | None = None
    failure: str = ""


DiskEffect = ReadFile | WriteFile | DeleteFile | ListFiles
DiskEvent = FileRead | FileWritten | Listed
