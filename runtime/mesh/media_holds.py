"""What a process says that it holds of media files, in messages of bounded length. Pure; frontends, the Python API, detokenizers."""

from collections.abc import Iterable, Iterator, Sequence

from meshlm.protocol.edges.media import Hold, HoldMedia

DIGESTS_AT_ONCE = 1 << 16  # of a message, 2 MiB


def hold_messages(holds: Iterable[Hold], through: int, others: Sequence[bytes] = ()) -> Iterator[HoldMedia]:
    """All holds of the sender, whose handles go from 1 to `through`, in as many messages as it takes."""
    after, some, num = 0, list[Hold](), 0
    for hold in sorted(holds, key=lambda one: one.handle):
        if some and num + len(hold.digests) > DIGESTS_AT_ONCE:
            yield HoldMedia(tuple(some), after, some[-1].handle)
            after, some, num = some[-1].handle, [], 0
        some.append(hold)
        num += len(hold.digests) + 1
    yield HoldMedia(tuple(some), after, through, tuple(others[:DIGESTS_AT_ONCE]))
    for begin in range(DIGESTS_AT_ONCE, len(others), DIGESTS_AT_ONCE):
        yield HoldMedia((), others=tuple(others[begin : begin + DIGESTS_AT_ONCE]))
