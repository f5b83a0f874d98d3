"""Stop strings across token borders.

Text is held back only while its end could be the beginning of a stop string. What is output_token_ids after k tokens depends on those k
tokens alone.
"""


class StopFinder:
    """One request's search. Feed it each token's text; it gives what may be shown."""

    __slots__ = ("_first", "_held", "_include", "_longest", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._stops, self._include = stops, include
        self._first = frozenset(stop[0] for stop in stops)
        self._longest = max(len(stop) for stop in stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """The text that is safe to show; `matched` is set when a stop string is complete."""
        if not piece:
            return ""
        text = self._held + piece
        if not self._held and self._first.isdisjoint(text):
            return text
        found = min(((at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            at, _, self.matched = found
            self._held = ""
            return text[: at + len(self.matched)] if self._include else text[:at]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length] in self._first:
                end = text[-length:]
                if any(stop.startswith(end) for stop in self._stops):
                    return length
        return 0

    def finish(self) -> str:
        """The text that was held back, when no token follows."""
        held, self._held = self._held, ""
        return held
