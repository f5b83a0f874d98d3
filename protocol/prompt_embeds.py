"""Vectors in the place of a prompt's tokens, on their way from the client to the model's first layer.

Their places have token ids too, which are numbers made of the vectors: nobody reads them as tokens, but equal vectors have equal
ones, so that ranks are chosen by them. What the prefix cache goes by is the vectors themselves.
"""

from typing import Literal

from msgspec import Struct

from meshlm.protocol.wire.parts import joined

EmbedsDType = Literal["float32", "float16", "bfloat16"]
ITEM_BYTES: dict[EmbedsDType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
MAX_EMBEDS_BYTES = 32 << 20  # of one prompt; the messages that carry it hold twice that


PLACEHOLDER = "<prompt_embeds>"  # vLLM's token for vectors within a chat


def mark(place: int) -> str:
    """The text that stands for a chat's vectors number `place` until the chat template is filled in."""
    return f"<prompt_embeds:{place}>"


class PromptEmbeds(Struct, frozen=True):
    """`data` has one vector behind the other, those of the first span first. Little-endian."""

    dtype: EmbedsDType
    spans: tuple[tuple[int, int], ...]  # (position of the first vector, their number), in order, none overlapping
    data: bytes

    @property
    def row_bytes(self) -> int:
        """The bytes of one vector."""
        return len(self.data) // max(1, sum(count for _, count in self.spans))

    def parts(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """The vectors of the positions begin to end: (first position, number, place of the first in `data` as a number of vectors)."""
        found, before = [], 0
        for first, count in self.spans:
            low, high = max(first, begin), min(first + count, end)
            if low < high:
                found.append((low, high - low, before + low - first))
            before += count
        return found

    def cut(self, begin: int, end: int) -> "PromptEmbeds | None":
        """The vectors of the prompt's part from begin to end, by their positions in it; None where it has none."""
        parts, size = self.parts(begin, end), self.row_bytes
        if not parts:
            return None
        spans = tuple((first - begin, count) for first, count, _ in parts)
        data = b"".join(self.data[place * size : (place + count) * size] for _, count, place in parts)
        return PromptEmbeds(self.dtype, spans, data)

    def bytes_of(self, begin: int, end: int) -> bytes:
        """The vectors of the positions begin to end, for a key of what is computed from them; where they stand is part of it."""
        size = self.row_bytes
        parts = [
            (b"%d" % (first - begin), self.data[place * size : (place + count) * size])
            for first, count, place in self.parts(begin, end)
        ]
        return joined(*(each for part in parts for each in part))
