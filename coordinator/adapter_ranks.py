"""The ranks that had an adapter of late, and so need not read it again. Pure; owned by routing.py.

A guess, as a rank forgets adapters by its own rules: the last ones that it was given requests for, so many as its workers keep.
"""

from meshlm.coordinator.prefix_index import Found

WEIGHT = 512  # prompt tokens that a rank may have to compute more, for having the adapter already


class AdapterRanks:
    def __init__(self, kept: int) -> None:
        """kept: adapters that the workers of a rank keep."""
        self._kept = kept
        self._of_rank: dict[int, dict[bytes, None]] = {}  # by number; the last used last

    def used(self, number: int, key: bytes) -> None:
        """The rank gets a request for it."""
        of_rank = self._of_rank.setdefault(number, {})
        of_rank.pop(key, None)
        of_rank[key] = None
        if len(of_rank) > self._kept:
            del of_rank[next(iter(of_rank))]

    def forget(self, number: int) -> None:
        """The rank's workers are gone."""
        self._of_rank.pop(number, None)

    def preferred(self, found: Found, key: bytes) -> Found:
        """What each rank knows of a prompt, with what having the adapter is worth. Most first, as it was."""
        has = sum(1 << number for number, keys in self._of_rank.items() if key in keys)
        if not has:
            return found
        others, more = has, list[tuple[int, int]]()
        for tokens, mask in found:
            more += [(tokens + WEIGHT, mask & has), (tokens, mask & ~has)]
            others &= ~mask
        more.append((WEIGHT, others))
        return sorted(((tokens, mask) for tokens, mask in more if mask), reverse=True)
