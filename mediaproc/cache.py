"""Which files of items there are, how many bytes they have, and which of them may go. Pure; owned by core.py.

A file with a lease stays: a request may need it again, after a preemption or a worker's death. Of the others the one that was used
least recently goes first. Leases end by themselves, so whatever dies leaves nothing behind.
"""

from collections import OrderedDict

from meshlm.protocol.edges.media import LEASE_S


class FileCache:
    """`max_bytes` bound the files with a lease, too."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._files: OrderedDict[bytes, tuple[int, float]] = (
            OrderedDict()
        )  # bytes, and when the lease ends; used last, last

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._files

    def __len__(self) -> int:
        return len(self._files)

    def lease(self, digest: bytes, now: float) -> bool:
        """Whether the file is there; its lease begins anew."""
        found = self._files.pop(digest, None)
        if found is None:
            return False
        self._files[digest] = found[0], now + LEASE_S
        return True

    def add(self, digest: bytes, size: int, now: float) -> list[bytes] | None:
        """Takes a new file, with a lease; the files that go for it. None: there is no room, and it is not taken."""
        going, freed = [], 0
        for other, (other_size, until) in self._files.items():
            if self.num_bytes - freed + size <= self.max_bytes:
                break
            if until <= now:
                going.append(other)
                freed += other_size
        if self.num_bytes - freed + size > self.max_bytes:
            return None
        for other in going:
            del self._files[other]
        self._files[digest] = size, now + LEASE_S
        self.num_bytes += size - freed
        return going

    def keep_only(self, digests: frozenset[bytes]) -> None:
        """Forgets the other files, with a lease or without: they are not there any more."""
        for digest in self._files.keys() - digests:
            size, _ = self._files.pop(digest)
            self.num_bytes -= size

    def num_leased(self, now: float) -> int:
        """Files with a lease."""
        return sum(until > now for _, until in self._files.values())

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        assert self.num_bytes == sum(size for size, _ in self._files.values()) <= self.max_bytes
