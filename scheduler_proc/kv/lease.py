"""What those who keep pages of the KV cache from outside know of them."""

from dataclasses import dataclass
from typing import NamedTuple

from meshlm.protocol.wire.ids import BlockId


@dataclass(slots=True, eq=False)
class Lease:
    """Pages that are not to be freed, evicted or given away. It ends once (BlockPool.end_lease)."""

    pages: list[BlockId]


class Key(NamedTuple):
    """What is cached under one key: the pages of all groups of a kind at one place of their tables."""

    key: bytes
    width: int  # pages
