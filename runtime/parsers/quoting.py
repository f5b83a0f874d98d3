"""Which tags in the body of a call are text: those within a JSON string, or within a value between tags. Pure, piece by piece."""

import re
from typing import Protocol

_MARKS = re.compile(r'["\\{}\[\]\n]')


class Quoting(Protocol):
    """What one body holds so far. `inside`: the next text belongs to a value, whatever it looks like."""

    inside: bool

    def push(self, text: str) -> int:
        """Takes the next text; gives the place in it behind the end of the body's value, or -1."""
        ...


class JsonQuoting:
    """JSON, from its first bracket on. A JSON string has no line break, so one ends the string of a broken body."""

    __slots__ = ("_depth", "_escaped", "inside")

    def __init__(self) -> None:
        self.inside, self._depth, self._escaped = False, 0, False

    def push(self, text: str) -> int:
        """Takes the next text; gives the place behind the bracket that closes the first one, or -1."""
        at = 1 if self._escaped and text else 0
        self._escaped = self._escaped and not text
        while mark := _MARKS.search(text, at):
            at, sign = mark.end(), mark.group()
            if self.inside:
                self._escaped = sign == "\\" and at == len(text)
                at += sign == "\\" and not self._escaped
                self.inside = sign not in '"\n'
            elif sign == '"':
                self.inside = self._depth > 0
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]" and self._depth:
                self._depth -= 1
                if not self._depth:
                    return at
        return -1


class BetweenTags:
    """Values between two tags, which may be the same one."""

    __slots__ = ("_begin", "_end", "_tail", "inside")

    def __init__(self, begin: str, end: str) -> None:
        self.inside, self._begin, self._end, self._tail = False, begin, end, ""

    def push(self, text: str) -> int:
        """Takes the next text; such a body does not tell its end."""
        text = self._tail + text
        if self._begin == self._end:
            self.inside ^= text.count(self._begin) % 2 == 1
            self._tail = text.rpartition(self._begin)[2][1 - len(self._begin) :]
        else:
            begin, end = text.rfind(self._begin), text.rfind(self._end)
            self.inside = begin > end if max(begin, end) >= 0 else self.inside
            self._tail = text[1 - max(len(self._begin), len(self._end)) :]
        return -1
