"""Tags in a text that comes in pieces. Pure; its users' results must not depend on the cuts."""

import re


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
