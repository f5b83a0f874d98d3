"""Vectors in the place of a prompt's tokens, on their way from the client to the model's first layer.

Their places have token ids too, which are numbers made of the vectors: nobody reads them as tokens, but equal vectors have equal
ones, so that ranks are chosen by them. What the prefix cache goes by is the vectors themselves.
"""

import hashlib
from typing import Literal, Self

from msgspec.structs import replace

from meshlm.protocol.extra_kind import ExtraKind, Span
from meshlm.protocol.wire.parts import joined

EmbedsDType = Literal["float32", "float16", "bfloat16"]
ITEM_BYTES: dict[EmbedsDType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
DIGEST_BYTES = 16
MAX_EMBEDS_BYTES = 32 << 20  # of one prompt; the messages that carry it hold twice that
PLACEHOLDER = "<prompt_embeds>"  # vLLM's token for vectors within a chat


def mark(place: int) -> str:
    """The text that stands for a chat's vectors number `place` until the chat template is filled in."""
    return f"<prompt_embeds:{place}>"


class PromptEmbeds(ExtraKind, frozen=True, tag="embeds", omit_defaults=True):
    """`data` has one vector behind the other, those of the first span first. Little-endian."""

    dtype: EmbedsDType
    spans: tuple[Span, ...]  # (position of the first vector, their number), in order, none overlapping
    data: bytes
    token_ids: bytes = b""  # int32 column: ids that stand for the vectors, until the prompt has them
    digests: bytes = b""  # DIGEST_BYTES of each vector (`with_digests`)

    @property
    def row_bytes(self) -> int:
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

    def with_digests(self) -> Self:
        """The vectors with what keys of blocks are made of, by who reads them from the client: schedulers read no vectors."""
        data, size = memoryview(self.data), self.row_bytes
        begins = range(0, len(data), size) if size else ()
        digests = b"".join(hashlib.blake2b(data[at : at + size], digest_size=DIGEST_BYTES).digest() for at in begins)
        return replace(self, digests=digests)

    @property
    def num_bytes(self) -> int:
        return len(self.data) + len(self.token_ids) + len(self.digests)

    def cut(self, begin: int, end: int) -> Self | None:
        parts, size = self.parts(begin, end), self.row_bytes
        if not parts:
            return None
        spans = tuple((first - begin, count) for first, count, _ in parts)
        data, ids, digests = (
            b"".join(column[at * width : (at + count) * width] for _, count, at in parts)
            for column, width in ((self.data, size), (self.token_ids, 4), (self.digests, DIGEST_BYTES))
        )
        return replace(self, spans=spans, data=data, token_ids=ids, digests=digests)

    def key_parts(self, begin: int, end: int) -> bytes:
        """The vectors, and where they stand."""
        if not (parts := self.parts(begin, end)):
            return b""
        digests = self.digests or self.with_digests().digests
        found = [
            (b"%d" % (first - begin), digests[at * DIGEST_BYTES : (at + n) * DIGEST_BYTES]) for first, n, at in parts
        ]
        return joined(b"embeds", self.dtype.encode(), *(part for pair in found for part in pair))
