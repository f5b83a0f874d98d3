"""The next chunk of many event streams at once. Pure but for the functions that it is given.

Made by steady.py for choices whose chunks differ in one text only. After 20 ms of sleep every object that a loop over hundreds of
streams touches comes from memory, so a stream has here what its chunk is made of and a function that sends it, and nothing else is
looked at: the texts are encoded in one call, the sizes of HTTP's chunks come from a table. Whatever else a stream needs (its socket is
full, its client is gone, its transport holds something back) its line does.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

_encoder = msgspec.json.Encoder()
_SIZES = [b"%x\r\n" % size for size in range(2048)]

Direct = Callable[[bytes], int]  # to the socket: how many of these bytes it took. OSError when none


class Line(Protocol):
    """The way to one client (http.py's EventWriter)."""

    def write(self, event: bytes) -> None:
        """A whole event, however long it takes."""
        ...

    def lend(self, slots: list[Direct | None], place: int) -> None:
        """Put what sends to the socket in this place, if nothing stands before it; take it away as soon as something does.

        Only places of one burst at a time.
        """
        ...

    def rest(self, data: bytes) -> None:
        """What the socket did not take of bytes that were sent directly."""
        ...


class Form(NamedTuple):
    """A stream whose events are a constant prefix, an encoded text and a constant suffix."""

    prefix: bytes
    suffix: bytes
    line: Line


class Burst:
    """Streams in a fixed order."""

    def __init__(self, forms: list[Form]) -> None:
        self._forms = forms
        self._prefixes = [form.prefix for form in forms]
        suffixes: dict[bytes, bytes] = {}  # few different ones: one object each
        self._suffixes = [suffixes.setdefault(form.suffix, form.suffix + b"\r\n") for form in forms]
        self._direct: list[Direct | None] = [None] * len(forms)

    def send(self, texts: list[str]) -> None:
        """One text for each; "" sends nothing."""
        encoded = _encoder.encode_lines(texts).split(b"\n")  # a newline inside a text is escaped
        sizes, join, place = _SIZES, b"".join, -1
        for text, direct, prefix, middle, suffix in zip(texts, self._direct, self._prefixes, encoded, self._suffixes):
            place += 1
            if not text:
                continue
            size = len(prefix) + len(middle) + len(suffix) - 2
            if direct is None or size >= len(sizes):
                self._general(place, prefix + middle + suffix[:-2])
                continue
            chunk = join((sizes[size], prefix, middle, suffix))
            try:
                taken = direct(chunk)
            except OSError:
                taken = 0
            if taken != len(chunk):
                self._forms[place].line.rest(chunk[taken:])

    def _general(self, place: int, event: bytes) -> None:
        """The way that is always right; the next time it may be the direct one."""
        line = self._forms[place].line
        line.write(event)
        if self._direct[place] is None:
            line.lend(self._direct, place)
