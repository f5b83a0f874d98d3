"""Texts that no tokens of the model make up: some vocabularies lack bytes, so a text with them cannot be asked for. Pure."""

from collections.abc import Iterable
from functools import cached_property

from meshlm.detokenizer.decode import TokenTable


class Spelling:
    """Safe to call from several threads. The bytes are gathered with the first text that is not plain ASCII."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table

    @cached_property
    def _tokens(self) -> tuple[frozenset[bytes], int]:
        """The bytes of all tokens but special ones, and the length of the longest."""
        special = self._table.special
        texts: Iterable[tuple[int, str | None]] = enumerate(self._table.text)
        found = {text.encode() for token, text in texts if text and token not in special}
        found |= {data for token, data in self._table.cut.items() if token not in special}
        return frozenset(found), max(map(len, found), default=0)

    def can_write(self, text: str) -> bool:
        """Whether some tokens make up the text. All vocabularies of models that write have printable ASCII."""
        if text.isascii() and text.isprintable():
            return True
        data = text.encode("utf-8", "surrogatepass")
        tokens, longest = self._tokens
        if all(bytes((byte,)) in tokens for byte in set(data)):
            return True
        ends = {0}  # of what tokens make up from the start
        for end in range(1, len(data) + 1):
            if any(end - n in ends and data[end - n : end] in tokens for n in range(1, min(longest, end) + 1)):
                ends.add(end)
            elif end - longest >= max(ends):
                return False
        return len(data) in ends
