"""Which keys would make a hit longer, for any kinds of groups, against a search through all sets of keys that could be there."""

from collections.abc import Sequence
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st
from kv_device import BLOCK, FULL, GROUPS

from meshlm.protocol.kv import CrossAttention, KVSpec, RecurrentState, SlidingWindow
from meshlm.scheduler_proc.kv.cache import KVCache
from meshlm.scheduler_proc.kv.groups import Kind, kinds_of

SHARED = [specs for specs in GROUPS if specs and not any(isinstance(one, CrossAttention) for one in specs)]


def hashes(length: int) -> list[bytes]:
    return [bytes([n]) * 32 for n in range(length)]


def rows_of(kind: Kind, end: int) -> Sequence[int]:
    """The rows that may have a key."""
    return kind.places(0, end) if kind.carried else range(end)


def cache(specs: tuple[KVSpec, ...], keys: set[bytes]) -> KVCache:
    """A cache that has these keys."""
    kv = KVCache(400, BLOCK, specs)
    widths = {kind.key(one): kind.width for kind in kinds_of(specs, BLOCK) for one in hashes(12)}
    for key in sorted(keys):
        kv.pool.cache_block(key, kv.pool.allocate(widths[key]))
    return kv


@settings(deadline=None)
@given(st.data())
def test_what_is_asked_for_is_enough_and_what_is_copied_too(data: st.DataObject) -> None:
    specs = data.draw(st.sampled_from(SHARED))
    text = hashes(data.draw(st.integers(1, 12)))
    every = [kind.key(text[n]) for kind in kinds_of(specs, BLOCK) for n in rows_of(kind, len(text))]
    here = {key for key in every if data.draw(st.booleans())}
    elsewhere = {key for key in every if data.draw(st.booleans())}
    prefixes = cache(specs, here).prefixes
    hit = prefixes.reach(text)
    absent = prefixes.absent(text, hit)
    assert not here & {key.key for key in absent}
    found = elsewhere & {key.key for key in absent}
    reached = prefixes.reach(text, found)
    assert reached == prefixes.reach(text, elsewhere) >= hit, "a key was not asked for that would have made it longer"
    needed = {key.key for key in prefixes.needed(text[:reached])}
    assert needed <= here | found
    assert cache(specs, needed).prefixes.reach(text) >= reached, "what is copied and what is here serves"


def test_a_window_needs_its_last_blocks_and_a_state_its_last_checkpoint() -> None:
    specs = (FULL, SlidingWindow(5), RecurrentState("all", 2))
    kv = cache(specs, set())
    text = hashes(5)
    numbers = count()
    order = {
        kind.key(one): (next(numbers), kind.name, n) for kind in kinds_of(specs, BLOCK) for n, one in enumerate(text)
    }
    asked = [order[key.key][1:] for key in kv.prefixes.absent(text, 0)]
    assert ("state-2", 1) in asked
    assert ("state-2", 0) not in asked, "there is a place behind each second block"
    assert not any(n == 4 for _, n in asked), "behind the last place no hit can end"
    copied = [order[key.key][1:] for key in kv.prefixes.needed(text[:4])]
    assert copied == [("full", 0), ("full", 1), ("full", 2), ("full", 3), ("sliding-1", 3), ("state-2", 3)]
