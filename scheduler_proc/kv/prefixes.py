"""Prefixes of which some pages are cached and others lie elsewhere: which keys would make a hit longer. Pure; owned by cache.py."""

from collections.abc import Container, Sequence

from meshlm.scheduler_proc.kv.groups import Kind
from meshlm.scheduler_proc.kv.lease import Key
from meshlm.scheduler_proc.kv.pool import BlockPool


class Prefixes:
    """`kinds` of groups whose pages are in `pool`."""

    def __init__(self, kinds: Sequence[Kind], pool: BlockPool, block_size: int) -> None:
        self._kinds, self._pool, self._block_size = kinds, pool, block_size

    @property
    def num_kinds(self) -> int:
        """The keys that a block has, one for each kind."""
        return len(self._kinds)

    def reach(self, hashes: Sequence[bytes], found: Container[bytes] = ()) -> int:
        """The number of leading blocks that all kinds could serve if they had these keys, too."""
        find, at_most = self._pool.find, -1
        while len(hashes) != at_most:
            at_most = len(hashes)
            for kind in self._kinds:
                hashes = hashes[: kind.longest_hit(hashes, lambda key: find(key) or (key in found) or None)]
        return at_most

    def absent(self, hashes: Sequence[bytes], num_hit: int) -> list[Key]:
        """Keys of these blocks that are not cached, and with which a hit could be longer than `num_hit`, in the order of tokens."""
        keys = self._absent(hashes, num_hit)
        end = self.reach(hashes, {key.key for key in keys})  # with states, behind a place of theirs
        return keys if end == len(hashes) else self._absent(hashes[:end], num_hit)

    def _absent(self, hashes: Sequence[bytes], num_hit: int) -> list[Key]:
        end = len(hashes)
        behind = [kind.rows_behind(num_hit, end) for kind in self._kinds]
        return [
            Key(key, kind.width)
            for row in range(min((rows[0] for rows in behind if rows), default=end), end)
            for kind, rows in zip(self._kinds, behind, strict=True)
            if row in rows and self._pool.find(key := kind.key(hashes[row])) is None
        ]

    def needed(self, hashes: Sequence[bytes]) -> list[Key]:
        """The keys of what a token behind these blocks sees."""
        computed = len(hashes) * self._block_size
        return [Key(kind.key(one), kind.width) for kind in self._kinds for one in hashes[kind.first_needed(computed) :]]
