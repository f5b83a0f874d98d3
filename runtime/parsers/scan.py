"""Tags in a text that comes in pieces, a place in it, and what the formats of calls read there. Pure.

What reads is a generator: it yields where it cannot know how to go on before more text is here. So a format is written like a parser of
whole texts, and its result cannot depend on the cuts.
"""

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar


class Tags:
    """Some tags to look for."""

    __slots__ = ("_first", "pattern", "tags")

    def __init__(self, *tags: str) -> None:
        self.tags = tuple(dict.fromkeys(filter(None, tags)))
        self._first = tuple({tag[0] for tag in self.tags})
        longest_first = sorted(self.tags, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def may_grow(self, text: str, begin: int) -> bool:
        """Whether the tag that was found here may turn out to be a longer one."""
        rest = text[begin:]
        return any(len(tag) > len(rest) and tag.startswith(rest) for tag in self.tags)

    def overlap(self, text: str, begin: int) -> int:
        """The number of last characters, of those behind `begin`, that may be the first ones of a tag."""
        if not any(text.find(first, begin) >= 0 for first in self._first):
            return 0
        return max(_overlap(text, begin, tag) for tag in self.tags)


def _overlap(text: str, begin: int, tag: str) -> int:
    longest = min(len(tag) - 1, len(text) - begin)
    return next((count for count in range(longest, 0, -1) if text.endswith(tag[:count])), 0)


class Lexer:
    """Cuts text at tags. What may begin a tag is held back."""

    __slots__ = ("_held", "_tags")

    def __init__(self, *tags: str) -> None:
        self._tags, self._held = Tags(*tags), ""

    def push(self, piece: str) -> list[str]:
        """Text, tag, text, tag ... text: at the odd places the tags that are complete."""
        text, parts, at = self._held + piece, list[str](), 0
        for found in self._tags.pattern.finditer(text):
            parts += [text[at : found.start()], found.group()]
            at = found.end()
        keep = len(text) - self._tags.overlap(text, at)
        self._held = text[keep:]
        return [*parts, text[at:keep]]

    @property
    def held(self) -> str:
        """The text that may be the begin of a tag."""
        return self._held

    def finish(self) -> str:
        """The text that was held back, when none follows."""
        held, self._held = self._held, ""
        return held


T = TypeVar("T")
Steps = Generator[None, None, T]


def nothing() -> Steps[None]:
    """Steps that read nothing."""
    yield from ()


Sink = Callable[[str], None]  # takes text in order; the cuts between its pieces mean nothing

MAX_NAME = 512  # characters of a name, a key or what else stands before the arguments begin
_BLANKS = re.compile(r"\s*")
_SHORT_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*')
# Parts of a JSON string that can be decoded without what follows, and the beginning of an escape that cannot.
_DECODABLE = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})*'
)
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,4}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?")


class Scan:
    """`text` as far as it is here, from the oldest place that may be gone back to, and the place `at` in it."""

    __slots__ = ("_marks", "at", "ended", "text")

    def __init__(self) -> None:
        self.text, self.at, self.ended = "", 0, False
        self._marks = list[int | None]()  # places that may be gone back to; None: no longer

    @property
    def oldest(self) -> int:
        """The oldest place that may be gone back to, or this one."""
        return next((mark for mark in self._marks if mark is not None), self.at)

    def feed(self, piece: str) -> None:
        begin = self.oldest
        self.text, self.at = self.text[begin:] + piece, self.at - begin
        self._marks = [None if mark is None else mark - begin for mark in self._marks]

    def hold(self) -> None:
        """Remember this place; `back` goes there, `drop` forgets it."""
        self._marks.append(self.at)

    def back(self) -> None:
        mark = self._marks.pop()
        self.at = self.at if mark is None else mark

    def drop(self) -> None:
        self._marks.pop()

    def stay(self) -> None:
        """No place so far is gone back to."""
        self._marks = [None] * len(self._marks)

    def give_up(self) -> None:
        """Go back to the oldest place, and forget all."""
        self.at, self._marks = self.oldest, []

    def ahead(self, *literals: str) -> Steps[str]:
        """The first of these literals that follows, or ""."""
        for literal in literals:
            while not self.ended and literal.startswith(self.text[self.at : self.at + len(literal)]):
                if len(self.text) - self.at >= len(literal):
                    return literal
                yield
            if self.text.startswith(literal, self.at):
                return literal
        return ""

    def take(self, *literals: str) -> Steps[str]:
        """The same, and go behind it."""
        found = yield from self.ahead(*literals)
        self.at += len(found)
        return found

    def take_behind_blanks(self, literal: str) -> Steps[bool]:
        """Goes behind this literal, which blanks may stand before; where it does not follow, nothing is taken."""
        self.hold()
        yield from self.blanks()
        if (yield from self.take(literal)):
            self.drop()
            return True
        self.back()
        return False

    def next(self) -> Steps[str]:
        """The next character; "" at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def blanks(self) -> Steps[None]:
        while True:
            found = _BLANKS.match(self.text, self.at)
            self.at = found.end() if found else self.at
            if self.at < len(self.text) or self.ended:
                return
            yield

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Reads as much as matches a pattern that any shorter text of the kind matches too, such as `\\w*`; "" where that is too
        long."""
        while True:
            found = pattern.match(self.text, self.at)
            end = found.end() if found else self.at
            if end - self.at > MAX_NAME:
                return ""
            if end < len(self.text) or self.ended:
                begin, self.at = self.at, end
                return self.text[begin:end]
            yield

    def upto(self, tags: Tags) -> Steps[tuple[str, str]]:
        """The text before the next of some tags, and the tag, which may be part of none; ("", "") where none is near."""
        while True:
            found = tags.pattern.search(self.text, self.at)
            end = found.start() if found else len(self.text) - tags.overlap(self.text, self.at)
            if end - self.at > MAX_NAME or (found is None and self.ended):
                return "", ""
            if found is not None:
                begin, self.at = self.at, found.end()
                return self.text[begin:end], found.group()
            yield

    def stream(self, tags: Tags, sink: Sink) -> Steps[str]:
        """Gives out all text before the next of some tags as it comes, and returns the tag; "" where none came."""
        while True:
            found = tags.pattern.search(self.text, self.at)
            if found is None:
                end = len(self.text) - (0 if self.ended else tags.overlap(self.text, self.at))
            else:
                end = found.start()
                if not self.ended and tags.may_grow(self.text, end):
                    found = None
            sink(self.text[self.at : end])
            self.at = end
            if found is not None:
                self.at = found.end()
                return found.group()
            if self.ended:
                return ""
            yield

    def json_string(self) -> Steps[str | None]:
        """A short JSON string that begins here, decoded; None where there is none."""
        if (yield from self.next()) != '"':
            return None
        while True:
            found = _SHORT_STRING.match(self.text, self.at)
            end = found.end() if found else self.at
            if end - self.at > MAX_NAME or self.text[end : end + 1] == "\n":
                return None
            if self.text[end : end + 1] == '"':
                begin, self.at = self.at, end + 1
                return _decoded(self.text[begin + 1 : end])
            if self.ended:
                return None
            yield

    def json_text(self, sink: Sink) -> Steps[None]:
        """The rest of a JSON string, decoded as it comes, and its end."""
        while True:
            found = _DECODABLE.match(self.text, self.at)
            end = found.end() if found else self.at
            if end > self.at:
                text = self.text[self.at : end]
                decoded = _decoded(text)
                sink(text if decoded is None else decoded)
                self.at = end
            sign = self.text[end : end + 1]
            if sign == '"':
                self.at += 1
                return
            if sign and (self.ended or not _BEGUN_ESCAPE.fullmatch(self.text, end)):
                sink(sign)  # a backslash that escapes nothing
                self.at += 1
                continue
            if self.ended:
                return
            yield


def _decoded(text: str) -> str | None:
    try:
        found = str(json.loads(f'"{text}"', strict=False))
        found.encode()  # half of a surrogate pair is no character
    except ValueError:
        return None
    return found


class JsonMarks:
    """Where the structure of JSON goes on: outside of strings, within one, and within one that holds a line break.

    A JSON string has no line break, so such a string is broken, and tags end it."""

    __slots__ = ("broken", "outside", "tags")
    inside = re.compile(r'["\\\n]')

    def __init__(self, tags: Tags) -> None:
        either = f"{tags.pattern.pattern}|" if tags.tags else ""
        self.tags = tags
        self.outside = re.compile(either + r'["{}\[\]]')
        self.broken = re.compile(either + r'["\\]')

    def value(self, scan: Scan, sink: Sink) -> Steps[bool]:
        """The object or list that begins here, given out as it comes; False where a tag or the end of the text cuts it short."""
        depth, pattern = 0, self.outside
        while True:
            text = scan.text
            limit = len(text) if scan.ended else len(text) - self.tags.overlap(text, scan.at)
            place = scan.at
            while found := pattern.search(text, place, limit):
                place, mark = found.end(), found.group()
                if mark == "\\":
                    if place == limit:  # what it escapes is not here yet
                        limit = len(text) if scan.ended else place - 1
                        break
                    place += 1
                elif mark == '"':
                    pattern = self.inside if pattern is self.outside else self.outside
                elif mark == "\n":
                    pattern = self.broken
                elif len(mark) == 1 and mark in "{[":
                    depth += 1
                elif len(mark) == 1 and mark in "}]":
                    depth -= 1
                    if not depth:
                        sink(text[scan.at : place])
                        scan.at = place
                        return True
                else:
                    sink(text[scan.at : found.start()])
                    scan.at = found.start()
                    return False
            sink(text[scan.at : limit])
            scan.at = limit
            if scan.ended:
                return False
            yield
