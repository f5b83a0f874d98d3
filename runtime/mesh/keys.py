"""The mesh's CURVE keys, as `meshlm keys` wrote them: read by every process that opens a tcp socket.

One pair for the whole mesh: each member proves with it that it is one, and knows by it that its peer is. The secret is never
logged, printed or sent.
"""

import json
import os
import stat
from typing import NamedTuple

import zmq


class KeyFileError(Exception):
    """The key file cannot be used; the text is one line and names the file."""


class Keys(NamedTuple):
    """Z85 text of 40 characters each."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"Keys(public={self.public!r})"


def load(path: str) -> Keys:
    """Read a key file. KeyFileError unless it is its owner's alone and holds a pair that belongs together."""
    try:
        with open(path, encoding="ascii") as file:
            info, text = os.fstat(file.fileno()), file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no key file"
        raise KeyFileError(f"--key-file {path}: {reason}") from None
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise KeyFileError(f"--key-file {path}: others can read it; make its mode 0600")
    if info.st_uid not in (os.getuid(), 0):
        raise KeyFileError(f"--key-file {path}: it belongs to another user")
    try:
        content = json.loads(text)
        keys = Keys(content["public_key"].encode(), content["secret_key"].encode())
        if zmq.curve_public(keys.secret) == keys.public:
            return keys
    except (ValueError, KeyError, TypeError, AttributeError, zmq.ZMQError):
        pass
    raise KeyFileError(f"--key-file {path}: no pair of keys; make one with `meshlm keys`")
