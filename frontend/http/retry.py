"""What lets a client ask again: its Idempotency-Key, and the ids of the events that it has. Pure; used by generation.py, responses.py.

An event's id is how far the stream has come with it: for each choice the number of its output tokens, `e` behind it once its end is
told, nothing before its first event; joined by `-`; then `.u` with the usage and `.d` with [DONE]. `12`, `7-9e`, `30e.d`.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from meshlm.frontend.http.bodies import fields_of
from meshlm.frontend.http.errors import HttpError, field_error
from meshlm.protocol.wire.parts import joined

KEY, LAST_ID = "Idempotency-Key", "Last-Event-ID"
MAX_KEY_LENGTH = 255
MAX_CHOICES = 64  # of a stream with event ids: an id names them all

_ENTRY = re.compile(r"([0-9]{1,9})(e?)")


class IdempotencyKey(NamedTuple):
    """One request that may come again."""

    key: str  # 32 hexadecimal digits, of the client's key, its API key and the route
    body: bytes  # digest of what is asked
    last_id: str  # "" without one

    @property
    def seed(self) -> int:
        """The seed for sampling, where the client gave none: the same each time."""
        return int(self.key[16:], 16) >> 1


def refuse_last_id(last_id: str) -> None:
    """A stream of these begins anew when it is asked for again."""
    if last_id:
        raise field_error(LAST_ID, "not supported on this path, whose events have no ids")


def read(keys: Sequence[str], last_id: str, path: str, api_key: str, body: bytes) -> IdempotencyKey | None:
    """Reads a retry: None without an Idempotency-Key, HttpError for a wrong one. `body` is JSON; its layout does not count."""
    if not keys:
        return None
    if len(keys) > 1:
        raise field_error(KEY, f"this header is given {len(keys)} times; give it once")
    (key,) = keys
    if not 1 <= len(key) <= MAX_KEY_LENGTH or not (key.isascii() and key.isprintable()):
        raise field_error(KEY, f"must be 1 to {MAX_KEY_LENGTH} printable ASCII characters")
    name = hashlib.sha256(joined(path.encode(), api_key.encode(), key.encode())).hexdigest()[:32]
    return IdempotencyKey(name, _digest(fields_of(body)), last_id)


def _digest(fields: dict[str, Any]) -> bytes:
    """A digest of the request. It takes many calls where the request is large, as in bodies.py; `fields` is empty afterwards."""
    asked = hashlib.sha256()
    try:
        for name in sorted(fields):
            value = fields.pop(name)
            asked.update(msgspec.json.encode(name) + b":")
            if isinstance(value, list) and value and isinstance(value[0], list | dict):
                while value:
                    asked.update(msgspec.json.encode(value.pop(), order="sorted") + b";")
            else:
                asked.update(msgspec.json.encode(value, order="sorted") + b",")
    except RecursionError:  # parse.py took it with a little less below it on the stack
        raise HttpError(400, "the body is nested too deeply") from None
    return asked.digest()[:16]


class Position(NamedTuple):
    """How far a client has read: of each choice (tokens, end) or None, and of the last events 0, 1 (usage) or 2 ([DONE])."""

    choices: list[tuple[int, bool] | None]
    last: int = 0

    @property
    def cuts(self) -> tuple[int, ...]:
        """The number of tokens whose text the client has, by choice."""
        return tuple(choice[0] if choice else 0 for choice in self.choices)


def parse(last_id: str, num_choices: int) -> Position:
    """HttpError for what is no id of such a stream's event."""
    if not last_id:
        return Position([None] * num_choices)
    vector, dot, last = last_id.partition(".")
    entries = vector.split("-")
    if len(entries) != num_choices or (dot and last not in ("u", "d")):
        raise field_error(LAST_ID, f"{last_id[:40]!r} is no event of this stream")
    choices: list[tuple[int, bool] | None] = []
    for entry in entries:
        match = _ENTRY.fullmatch(entry)
        if entry and match is None:
            raise field_error(LAST_ID, f"{last_id[:40]!r} is no event of this stream")
        choices.append((int(match[1]), bool(match[2])) if match else None)
    return Position(choices, ("", "u", "d").index(last))


def _entry(num_tokens: int, ended: bool) -> bytes:
    return b"%de" % num_tokens if ended else b"%d" % num_tokens


class Progress:
    """Names the events of one stream, and knows those that its client has. An id names what the client has of every choice, of those
    too that have said nothing on this connection."""

    def __init__(self, has: Position) -> None:
        self._has = has
        self._entries = [_entry(*choice) if choice else b"" for choice in has.choices]

    def event(self, choice: int, num_tokens: int, ended: bool) -> bytes | None:
        """The id of the event that brings a choice so far; None when the client has it."""
        has = self._has.choices[choice]
        if has is not None and (num_tokens, ended) <= has:
            return None
        self._entries[choice] = _entry(num_tokens, ended)
        return b"-".join(self._entries)

    def last(self, place: int) -> bytes | None:
        """The id of the usage (1) or of [DONE] (2); None when the client has it."""
        return None if place <= self._has.last else b"-".join(self._entries) + (b"", b".u", b".d")[place]
