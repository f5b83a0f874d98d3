"""Groups of equal spec, which behave alike: one kind, with a column of the block tables for each group. Pure; used by cache.py."""

from collections.abc import Callable, Sequence
from itertools import groupby

from meshlm.protocol.kv import KVSpec
from meshlm.protocol.wire.ids import BlockId

NO_PLACE = 1 << 31  # blocks; no request has so many


class Kind:
    """Columns `begin` to `end` of the block tables, and what their spec keeps."""

    __slots__ = ("_first_bytes", "begin", "block_size", "carried", "end", "every", "name", "number", "spec", "width")

    def __init__(self, spec: KVSpec, number: int, begin: int, end: int, block_size: int) -> None:
        self.spec, self.number, self.block_size = spec, number, block_size
        self.begin, self.end, self.width, self.carried = begin, end, end - begin, spec.carried
        self.name = str(spec.__struct_config__.tag) + (f"-{number}" if number else "")  # for /metrics
        self.every = spec.checkpoint_blocks or NO_PLACE  # blocks from one place of a checkpoint to the next
        self._first_bytes = [bytes((first ^ number,)) for first in range(256)]  # of a key, by that of the hash

    def key(self, block_hash: bytes) -> bytes:
        """The key of what this kind caches for these tokens; the first kind's key is the hash itself."""
        return self._first_bytes[block_hash[0]] + block_hash[1:] if self.number else block_hash

    def keys(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        return [self.key(block_hash) for block_hash in hashes] if self.number else hashes

    def first_needed(self, num_computed: int) -> int:
        """The first block that tokens from position `num_computed` on can see."""
        return self.spec.first_needed(self.block_size, num_computed)

    def places(self, begin: int, end: int) -> Sequence[int]:
        """Those of the rows from `begin` up to `end` behind which a checkpoint may be left."""
        return range(begin + (-begin - 1) % self.every, end, self.every)

    def rows_behind(self, num_hit: int, end: int) -> Sequence[int]:
        """The rows below `end` whose pages can make a hit of `num_hit` blocks a longer one."""
        if self.carried:
            return self.places(num_hit, end)
        return range(self.first_needed((num_hit + 1) * self.block_size), end)

    def is_left(self, column: Sequence[BlockId]) -> bool:
        """Whether the page of such a row, the first of `column`, keeps the state behind it, which was computed."""
        return len(column) == 1 or column[1] != column[0]

    def longest_hit(self, hashes: Sequence[bytes], find: Callable[[bytes], object | None]) -> int:
        """The most leading blocks of `hashes` after which a request can go on: all that its next token can see are cached."""
        end = len(hashes)
        while end:
            first = self.first_needed(end * self.block_size)
            if first == 0:
                break
            missing = next((i for i in reversed(range(first, end)) if find(self.key(hashes[i])) is None), -1)
            if missing < 0:
                return end
            end = missing
        found = list(map(find, self.keys(hashes[:end])))
        return found.index(None) if None in found else end


def kinds_of(specs: Sequence[KVSpec], block_size: int) -> list[Kind]:
    """One kind for each run of equal specs; `specs`: one per group, in the order of the tables' columns."""
    kinds: list[Kind] = []
    begin = 0
    for spec, some in groupby(specs):
        end = begin + sum(1 for _ in some)
        kinds.append(Kind(spec, len(kinds), begin, end, block_size))
        begin = end
    return kinds
