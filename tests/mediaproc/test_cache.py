"""The cache of files: any history keeps its bytes, and no file with a lease goes."""

from hypothesis import given
from hypothesis import strategies as st

from meshlm.mediaproc.cache import FileCache
from meshlm.protocol.edges.media import LEASE_S

ROOM = 20
ACTIONS = st.tuples(st.sampled_from(["add", "lease", "later", "list"]), st.integers(0, 5), st.integers(0, 25))


@given(st.lists(ACTIONS, max_size=80))
def test_any_history(actions: list[tuple[str, int, int]]) -> None:
    cache, now = FileCache(ROOM), 0.0
    leases: dict[bytes, tuple[int, float]] = {}  # bytes, and the lease's end
    for name, which, number in actions:
        digest = bytes([which])
        match name:
            case "add" if digest not in cache:
                leased = sum(size for size, until in leases.values() if until > now)
                going = cache.add(digest, number, now)
                assert (going is None) == (leased + number > ROOM), "refused with room, or taken without"
                for other in going or ():
                    assert leases.pop(other)[1] <= now, "a file with a lease went"
                if going is not None:
                    leases[digest] = number, now + LEASE_S
            case "lease":
                assert cache.lease(digest, now) == (digest in leases)
                if digest in leases:
                    leases[digest] = leases[digest][0], now + LEASE_S
            case "later":
                now += 5 * number
            case "list":
                cache.keep_only(frozenset(leases) - {digest})
                leases.pop(digest, None)
        cache.check()
        assert len(cache) == len(leases)
        assert cache.num_bytes == sum(size for size, _ in leases.values())
        assert cache.num_leased(now) == sum(until > now for _, until in leases.values())


def test_what_was_used_least_recently_goes_first() -> None:
    cache = FileCache(3)
    for digest in (b"a", b"b", b"c"):
        assert cache.add(digest, 1, 0.0) == []
    cache.lease(b"a", 1.0)
    assert cache.add(b"d", 2, LEASE_S + 2) == [b"b", b"c"]
