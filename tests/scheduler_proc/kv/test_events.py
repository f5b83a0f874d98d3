"""Whoever follows the events knows what the prefix cache has."""

from typing import Any

import pytest
from cache_subscriber import Block, Subscriber
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_device import BLOCK, FULL, GROUPS, Device, request_of, take_turn

from meshlm.protocol.kv import SlidingWindow
from meshlm.protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, hash_of
from meshlm.scheduler_proc.kv.cache import KVCache
from meshlm.scheduler_proc.kv.events import CacheEvents


class Follower:
    """A device, and a subscriber to the events of its cache."""

    def __init__(self, device: Device) -> None:
        self.device, self.subscriber = device, Subscriber()
        self.blocks: dict[int, tuple[Any, ...]] = {}  # what the hashes of all requests stand for
        self.keys: dict[bytes, Block] = {}
        self.has_heir = False  # which was given keys whose tokens it does not know
        device.kv.pool.events = self.events = CacheEvents()

    def note(self) -> None:
        """Keeps what the running requests' hashes stand for."""
        for request in self.device.running:
            salt = request.work.cache_salt
            for at, name in enumerate(request.hashes):
                parent = hash_of(request.hashes[at - 1]) if at else None
                tokens = request.tokens[at * BLOCK : (at + 1) * BLOCK].tolist()
                self.blocks[hash_of(name)] = (parent, tokens, (salt,) if salt and not at else None)
                self.keys |= {kind.key(name): (hash_of(name), kind.number) for kind in self.device.kv._kinds}

    def look(self) -> None:
        """All that the subscriber knows is there, and all that is there it knows."""
        self.note()
        self.subscriber.apply(self.events.take())
        known = set(self.subscriber.known)
        for block in known:
            assert self.subscriber.known[block] == self.blocks[block[0]]
        assert {self.keys[key] for key in self.events.told} == known
        cached = {self.keys[key] for key in self.device.kv.pool._cached}
        assert known <= cached if self.has_heir else known == cached

    def inherit(self, share: int, *, is_new: bool) -> None:
        """The next session, whose workers kept one key of `share`; of another scheduler where is_new."""
        before = self.device.kv
        kept = [(page, key) for key, pages in list(before.pool._cached.items())[::share] for page in pages]
        self.device.kv = KVCache(before.num_blocks * before.num_groups, BLOCK, self.device.specs, step_tokens=64)
        if is_new:
            self.events = CacheEvents()
        self.device.kv.pool.events = self.events
        self.device.kv.pool.restore([page for page, _ in kept], [key for _, key in kept])
        self.device.kv.pool.tell_inherited()
        self.has_heir = True


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_subscriber_knows_what_is_cached(data: st.DataObject) -> None:
    draw = data.draw
    groups = [specs for specs in GROUPS if all(spec.shares_prefix for spec in specs)]
    follower = Follower(device := Device(draw(st.sampled_from(groups)), draw(st.integers(8, 40))))
    texts: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, 25))):
        turn = draw(st.sampled_from(["start", "start", "go on", "go on", "end", "reset", "inherit"]))
        if turn == "inherit" and draw(st.integers(0, 2)) == 0:
            follower.look()
            for request in list(device.running):
                device.end(request)
            follower.inherit(draw(st.integers(1, 3)), is_new=draw(st.booleans()))
        take_turn(device, draw, turn, texts)
        follower.note()
        if draw(st.booleans()):  # else the events of several turns are one batch
            follower.look()
    follower.look()


def followed(device: Device) -> list[KVEvent]:
    assert device.kv.pool.events is not None
    return device.kv.pool.events.take()


def test_the_events_of_a_text_are_one_and_its_removals_too() -> None:
    device = Device((FULL,), 6)
    device.kv.pool.events = CacheEvents()
    first = device.start([*range(12)], salt="s")
    assert first is not None
    names = [hash_of(name) for name in first.hashes]
    stored = BlockStored(names, None, [*range(12)], BLOCK, None, "GPU", None, [("s",), None, None], 0, "full_attention")
    assert followed(device) == [AllBlocksCleared(), stored]
    first.tokens.extend([12, 13, 14, 15])
    device.go_on(first, 4, 16)
    (more,) = followed(device)
    assert isinstance(more, BlockStored)
    assert (more.parent_block_hash, more.block_hashes) == (names[-1], [hash_of(first.hashes[3])])
    device.end(first)
    assert followed(device) == [], "what is free is still known"
    device.start([9] * 24)
    removed = followed(device)[0]
    assert removed == BlockRemoved([hash_of(name) for name in reversed(first.hashes)], "GPU", 0), "the last one first"


def test_each_kind_of_attention_is_a_group() -> None:
    device = Device((FULL, SlidingWindow(5)), 40)
    device.kv.pool.events = CacheEvents()
    request = device.start([*range(8)])
    assert request is not None
    _, full, sliding = followed(device)
    assert isinstance(full, BlockStored)
    assert isinstance(sliding, BlockStored)
    assert (full.group_idx, full.kv_cache_spec_kind, full.kv_cache_spec_sliding_window) == (0, "full_attention", None)
    found = (sliding.group_idx, sliding.kv_cache_spec_kind, sliding.kv_cache_spec_sliding_window)
    assert found == (1, "sliding_window", 5)
    assert sliding.block_hashes == full.block_hashes


@pytest.mark.parametrize("is_new", [False, True])
def test_an_heir_tells_of_a_block_when_its_tokens_come(is_new: bool) -> None:
    """A scheduler that begins knows the keys of its workers' pages and no tokens: subscribers forget all, and learn with each hit."""
    follower = Follower(device := Device((FULL,), 8))
    first = device.start([*range(9)])
    assert first is not None
    follower.look()
    device.end(first)
    follower.inherit(1, is_new=is_new)
    events = follower.events.take()
    assert events == ([AllBlocksCleared()] if is_new else [])
    again = request_of([*range(9), 10])
    assert device.kv.match(again) == 8
    told = follower.events.take()
    if not is_new:
        assert told == [], "the same scheduler has told of them"
        return
    (stored,) = told
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [hash_of(name) for name in again.hashes[:2]]
    assert stored.token_ids == [*range(8)]
    assert not device.kv.pool.has_untold()


def test_sessions_whose_workers_kept_less_tell_of_the_rest() -> None:
    follower = Follower(device := Device((FULL,), 8))
    first = device.start([*range(17)])
    assert first is not None
    follower.look()
    device.end(first)
    follower.inherit(2, is_new=False)
    (removed,) = follower.events.take()
    assert removed == BlockRemoved([hash_of(first.hashes[1]), hash_of(first.hashes[3])], "GPU", 0)
    follower.device.kv.tell_cleared()
    assert follower.events.take() == [AllBlocksCleared()]
    follower.device.kv.tell_cleared()
    assert follower.events.take() == [], "nobody knows of anything"


def test_without_subscribers_nothing_is_kept() -> None:
    device = Device((FULL,), 8)
    device.start([*range(9)])
    device.kv.tell_cleared()
    device.kv.pool.tell_inherited()
    assert device.kv.pool.events is None
    assert not device.kv.pool.has_untold()
