"""What keys may ask for in a minute. Owned by io.py."""

import hashlib
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from meshlm.runtime.api_keys import ApiKey, Limits

_RECORD = struct.Struct("ddd")  # requests and tokens that are left, and when that was
MINUTE_S = 60.0


class _Levels(NamedTuple):
    requests: float
    tokens: float
    at: float


class RateLimits:
    """How much a key may ask for in a minute: requests, and tokens of prompts and answers. Both listeners ask it.

    Only keys of --api-key-file with `rpm=` or `tpm=` have limits. A level is a bucket that a minute fills: requests are taken out as
    they come, also those for the tokenizer alone, tokens when an answer has ended, since nobody knows before how many there are; a
    key whose tokens are below zero waits. The levels of a key are one small file in the run directory, so that all frontends count
    together and a frontend that dies forgets nothing. Two frontends that take from one key in the same microseconds may count it
    once. The clock must be one for all processes of the host, as the monotonic one is."""

    def __init__(self, run_dir: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = Path(run_dir) / "rates", clock
        self._limits: dict[str, Limits] = {}  # of the keys that have asked

    def take(self, key: ApiKey) -> float:
        """Counts one request of this key, or gives the seconds after which it would be let in."""
        limits = key.limits
        if limits is None:
            return 0.0
        name = key.key.decode()
        self._limits[name] = limits
        levels = self._read(name, limits)
        waits = 0.0
        if limits.rpm and levels.requests < 1:
            waits = (1 - levels.requests) * MINUTE_S / limits.rpm
        if limits.tpm and levels.tokens <= 0:
            waits = max(waits, (1 - levels.tokens) * MINUTE_S / limits.tpm)
        if waits == 0.0:
            self._write(name, levels._replace(requests=levels.requests - 1))
        return waits

    def used(self, name: str, num_tokens: int) -> None:
        """An answer for this key has ended that took so many tokens."""
        limits = self._limits.get(name)
        if limits is not None and limits.tpm and num_tokens:
            levels = self._read(name, limits)
            self._write(name, levels._replace(tokens=levels.tokens - num_tokens))

    def _read(self, name: str, limits: Limits) -> _Levels:
        """The levels of now. A limit that was changed holds from here on."""
        now = self._clock()
        try:
            before = _Levels(*_RECORD.unpack(self._path(name).read_bytes()))
        except (OSError, struct.error):
            return _Levels(limits.rpm, limits.tpm, now)
        minutes = max(0.0, now - before.at) / MINUTE_S
        return _Levels(
            min(limits.rpm, before.requests + minutes * limits.rpm),
            min(limits.tpm, before.tokens + minutes * limits.tpm),
            now,
        )

    def _write(self, name: str, levels: _Levels) -> None:
        path = self._path(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        try:
            file = os.open(path, flags, 0o600)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            file = os.open(path, flags, 0o600)
        try:
            os.pwrite(file, _RECORD.pack(*levels), 0)
        finally:
            os.close(file)

    def _path(self, name: str) -> Path:
        return self._folder / hashlib.sha256(name.encode()).hexdigest()[:32]
