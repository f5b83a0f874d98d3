"""The API keys of the port that clients meet: those of --api-key, and those of --api-key-file, which may change while the mesh runs.

A line of the file is a key, and after white space what it may be used for: `inference`, `admin` or both, with a comma between. A
key without any is for inference. `rpm=60` and `tpm=10000` limit its requests and tokens in a minute (frontend/requests/budget.py).
Keys of --api-key are for all, or for inference alone where --admin-api-key gives others. `#` begins a comment. The supervisor reads
the file to see that it is good, each frontend to serve with.
"""

import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from meshlm.protocol.config import ServerConfig

INFERENCE, ADMIN = "inference", "admin"
SCOPES = frozenset((INFERENCE, ADMIN))
MAX_FILE_BYTES = 1 << 20
MAX_RATE = 1 << 40


class KeyFileError(Exception):
    """The file cannot be used; one line, which has no key in it."""


class Limits(NamedTuple):
    """How much a key may ask for in a minute; 0: as much as it likes."""

    rpm: int = 0  # requests
    tpm: int = 0  # tokens of prompts and answers


class ApiKey(NamedTuple):
    """A key and what it may be used for."""

    key: bytes
    scopes: frozenset[str]
    limits: Limits | None = None


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
        rates = [word for word in words[1:] if b"=" in word]
        words = [word for word in words if word not in rates or word == words[0]]
        if len(words) > 2:
            raise KeyFileError(f"{where}: a key and its scopes are expected, as in `KEY inference,admin rpm=60`")
        key, scopes = words[0], frozenset(words[1].decode("latin-1").split(",") if words[1:] else (INFERENCE,))
        if not (key.isascii() and key.decode().isprintable()):
            raise KeyFileError(f"{where}: a key is made of printable ASCII")
        if not scopes <= SCOPES:
            raise KeyFileError(f"{where}: scopes are {' and '.join(sorted(SCOPES))}")
        if key in found:
            raise KeyFileError(f"{where}: this key stands there twice")
        found[key] = ApiKey(key, scopes, _limits(rates, where))
    if not found:
        raise KeyFileError(f"--api-key-file {path}: there is no key")
    return tuple(found.values())


def _limits(words: Iterable[bytes], where: str) -> Limits | None:
    """The limits of one line; None without any."""
    found: dict[str, int] = {}
    for word in words:
        name, _, number = word.decode("latin-1").partition("=")
        good = name in Limits._fields and name not in found and number.isascii() and number.isdecimal()
        if not good or not 0 < int(number[:20]) <= MAX_RATE:
            raise KeyFileError(
                f"{where}: limits are rpm=N (requests a minute) and tpm=N (tokens), each at most once and from 1"
            )
        found[name] = int(number)
    return Limits(**found) if found else None


class ApiKeys:
    """The keys that hold now. Where the file cannot be read when this is made, `problem` says why, and none of it does."""

    def __init__(
        self, keys: Iterable[str], path: str, admin_keys: Iterable[str] = (), *, admin_is_open: bool = False
    ) -> None:
        """`admin_is_open`: where no key is asked for at all, admin's routes are for all who reach the port."""
        admin = tuple(ApiKey(key.encode(), SCOPES) for key in admin_keys)
        of_flag = frozenset((INFERENCE,)) if admin else SCOPES
        self._given = (*admin, *(ApiKey(key.encode(), of_flag) for key in keys))
        self._asks = len(self._given) > len(admin) or bool(path)
        self._admin_is_open = admin_is_open and not admin
        self._path = path
        self._of_file: tuple[ApiKey, ...] = ()
        self.problem = ""
        if path:
            try:
                self.read_again()
            except KeyFileError as error:
                self.problem = str(error)

    @classmethod
    def of_server(cls, server: ServerConfig) -> "ApiKeys":
        """The keys of these settings. Without any, who has a login on this host may do what admin's keys are for."""
        return cls(server.api_key, server.api_key_file, server.admin_api_key, admin_is_open=server.is_local)

    def __bool__(self) -> bool:
        return self._asks

    @property
    def has_admin(self) -> bool:
        """Whether a flag gives a key for admin."""
        return any(ADMIN in key.scopes for key in self._given)

    def asks_for(self, scope: str) -> bool:
        """Whether a key is asked for, for routes of this scope."""
        return self._asks or (scope == ADMIN and not self._admin_is_open)

    def read_again(self) -> None:
        """The file has changed. With a KeyFileError the keys before it go on to hold."""
        self._of_file = read_file(self._path)

    def find(self, given: Iterable[bytes]) -> ApiKey | None:
        """The key that is among what a client gave, compared in constant time with all."""
        given = tuple(given)
        matches = [key for key in (*self._given, *self._of_file) for one in given if hmac.compare_digest(one, key.key)]
        return matches[0] if matches else None
