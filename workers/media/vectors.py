"""The vectors of items that were encoded lately, by digest, on the device: bounded in bytes, the least recently used go first."""

from collections import OrderedDict

from torch import Tensor


class VectorCache:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self.hits = self.misses = 0
        self._vectors: OrderedDict[bytes, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._vectors)

    def get(self, digest: bytes) -> Tensor | None:
        """[vectors, width], or None."""
        found = self._vectors.get(digest)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._vectors.move_to_end(digest)
        return found

    def put(self, digest: bytes, vectors: Tensor) -> None:
        """What alone is larger than the cache is not kept."""
        self._drop(digest)
        if vectors.nbytes > self.max_bytes:
            return
        while self.num_bytes + vectors.nbytes > self.max_bytes:
            self._drop(next(iter(self._vectors)))
        self._vectors[digest] = vectors
        self.num_bytes += vectors.nbytes

    def _drop(self, digest: bytes) -> None:
        if (gone := self._vectors.pop(digest, None)) is not None:
            self.num_bytes -= gone.nbytes

    def clear(self) -> None:
        """The encoder has other weights."""
        self._vectors.clear()
        self.num_bytes = 0

    def check(self) -> None:
        """Asserts what always holds."""
        assert self.num_bytes == sum(one.nbytes for one in self._vectors.values()) <= self.max_bytes
