"""The API keys of the port that clients meet: those of --api-key, and those of --api-key-file, which may change while the mesh runs.

A line of the file is a key, and after white space what it may be used for: `inference`, `admin` or both, with a comma between. A
key without any is for inference; those of --api-key are for all. `#` begins a comment. The supervisor reads the file to see that it is
good, each frontend to serve with.
"""

import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

INFERENCE, ADMIN = "inference", "admin"
SCOPES = frozenset((INFERENCE, ADMIN))
MAX_FILE_BYTES = 1 << 20


class KeyFileError(Exception):
    """The file cannot be used; one line, which has no key in it."""


class ApiKey(NamedTuple):
    """A key and what it may be used for."""

    key: bytes
    scopes: frozenset[str]


def read_file(path: str) -> tuple[ApiKey, ...]:
    """KeyFileError names the line."""
    found: dict[bytes, ApiKey] = {}
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"--api-key-file {path}: {error.strerror or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise KeyFileError(f"--api-key-file {path}: it has more than {MAX_FILE_BYTES} bytes")
    for number, line in enumerate(data.splitlines(), 1):
        words = line.partition(b"#")[0].split()
        if not words:
            continue
        where = f"--api-key-file {path}, line {number}"
        if len(words) > 2:
            raise KeyFileError(f"{where}: a key and its scopes are expected, as in `KEY inference,admin`")
        key, scopes = words[0], frozenset(words[1].decode("latin-1").split(",") if words[1:] else (INFERENCE,))
        if not (key.isascii() and key.decode().isprintable()):
            raise KeyFileError(f"{where}: a key is made of printable ASCII")
        if not scopes <= SCOPES:
            raise KeyFileError(f"{where}: scopes are {' and '.join(sorted(SCOPES))}")
        if key in found:
            raise KeyFileError(f"{where}: this key stands there twice")
        found[key] = ApiKey(key, scopes)
    if not found:
        raise KeyFileError(f"--api-key-file {path}: there is no key")
    return tuple(found.values())


class ApiKeys:
    """The keys that hold now. Where the file cannot be read when this is made, `problem` says why, and none of it does."""

    def __init__(self, keys: Iterable[str], path: str) -> None:
        self._given = tuple(ApiKey(key.encode(), SCOPES) for key in keys)
        self._path = path
        self._of_file: tuple[ApiKey, ...] = ()
        self.problem = ""
        if path:
            try:
                self.read_again()
            except KeyFileError as error:
                self.problem = str(error)

    def __bool__(self) -> bool:
        """Whether one is asked for."""
        return bool(self._given or self._path)

    def read_again(self) -> None:
        """The file has changed. With a KeyFileError the keys before it go on to hold."""
        self._of_file = read_file(self._path)

    def find(self, given: Iterable[bytes]) -> ApiKey | None:
        """The key that is among what a client gave, compared in constant time with all."""
        given = tuple(given)
        matches = [key for key in (*self._given, *self._of_file) for one in given if hmac.compare_digest(one, key.key)]
        return matches[0] if matches else None
