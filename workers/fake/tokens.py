"""What the fake model (engine.py) gives: tokens, vectors and log-probabilities that the tests compute from a prompt, too."""

import zlib
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshlm.protocol.edges.token import LogprobColumns
from meshlm.protocol.media import MediaItem
from meshlm.protocol.prompt_embeds import PromptEmbeds
from meshlm.workers.rows.changes import I32

FACTOR = 6364136223846793005  # odd, so that it has an inverse mod 2^64 (Knuth's MMIX multiplier)
INVERSE = pow(FACTOR, -1, 1 << 64)
FIRST_TOKEN = 256  # smaller ids are often special

U64 = NDArray[np.uint64]


def powers(base: int, count: int) -> U64:
    """1, base, base^2 ... mod 2^64."""
    values = np.full(count, base, np.uint64)
    values[0] = 1
    return np.multiply.accumulate(values)


def tokens_of_embeds(embeds: PromptEmbeds, vocab_size: int) -> list[int]:
    """The tokens that the fake model reads in place of vectors. Placeholder ids are others: a lost vector shows as a wrong token."""
    size, data = embeds.row_bytes, memoryview(embeds.data)
    return [(zlib.crc32(data[at : at + size]) >> 7) % vocab_size for at in range(0, len(data), size)]


def tokens_of_media(item: MediaItem, vocab_size: int) -> list[int]:
    """The tokens that the fake model reads in place of an item's vectors: others for each digest, and for each place in the item."""
    return [(zlib.crc32(item.digest + b"%d" % nth) >> 7) % vocab_size for nth in range(item.num_vectors)]


def vectors(states: U64) -> NDArray[np.float64]:
    return states[:, None].view(np.uint8).astype(np.float64)


def dice(rows: NDArray[Any], positions: NDArray[Any]) -> U64:
    """A number for each, by chance and always the same."""
    mixed = rows.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15) + positions.astype(np.uint64)
    return (mixed * np.uint64(FACTOR)) >> np.uint64(40)


def columns(token_ids: I32, width: int, vocab_size: int) -> LogprobColumns:
    """The token is the likeliest, at -1, and those after it follow, at -2, -3 ..."""
    top = (token_ids[:, None] + np.arange(width, dtype=np.int32)) % vocab_size
    own, ranks, likely = _likely(len(token_ids), width)
    return LogprobColumns(width, own, ranks, top.astype(np.int32).tobytes(), likely)


@cache
def _likely(count: int, width: int) -> tuple[bytes, bytes, bytes]:
    """Their log-probabilities, ranks, and the log-probabilities of the likeliest."""
    likely = np.broadcast_to(-1 - np.arange(width, dtype=np.float32), (count, width))
    return np.full(count, -1, np.float32).tobytes(), np.ones(count, np.int32).tobytes(), likely.tobytes()
