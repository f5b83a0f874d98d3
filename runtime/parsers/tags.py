"""Text that comes in pieces, cut at tags. Pure; its users' results must not depend on the cuts."""

import re


class Lexer:
    """Finds some tags, of which none is a part of another one. What may begin a tag is held back."""

    __slots__ = ("_first", "_held", "_pattern", "_tags")

    def __init__(self, *tags: str) -> None:
        self._tags, self._held = tags, ""
        self._first = {tag[0] for tag in tags}
        self._pattern = re.compile("(" + "|".join(map(re.escape, tags)) + ")")

    def push(self, piece: str) -> list[str]:
        """Text, tag, text, tag ... text: at the odd places the tags that are complete. Linear in the piece."""
        text = self._held + piece
        if not any(first in text for first in self._first):
            self._held = ""
            return [text]
        found = self._pattern.split(text)
        last = found[-1]
        keep = max(_overlap(last, tag) for tag in self._tags)
        found[-1], self._held = last[: len(last) - keep], last[len(last) - keep :]
        return found

    def finish(self) -> str:
        """The text that was held back, when none follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, tag: str) -> int:
    """The number of last characters that may be the first ones of a tag."""
    return next((count for count in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:count])), 0)
