"""The KV cache of one rank: any requests on a device that knows what its pages hold, and single rules."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_device import BLOCK, FULL, GROUPS, Device, request_of, take_turn

from meshlm.protocol.kv import ChunkedAttention, KVSpec, RecurrentState, SlidingWindow
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.scheduler_proc.kv import cache, hashes
from meshlm.scheduler_proc.kv.cache import FREED_AT_ONCE, KVCache


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_requests(data: st.DataObject) -> None:
    """No page is owned twice, all are free at the end, and whatever a token sees is what was computed for its own tokens."""
    draw = data.draw
    device = Device(draw(st.sampled_from(GROUPS)), draw(st.integers(8, 40)))
    texts: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, 25))):
        take_turn(device, draw, draw(st.sampled_from(["start", "go on", "go on", "end", "reset"])), texts)
        device.check()
    for request in list(device.running):
        device.end(request)
    device.check()
    assert device.kv.pool.num_free == device.kv.pool.num_blocks


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_blocks_outside_the_window_are_given_back_while_a_request_runs(chunk: int) -> None:
    spec = SlidingWindow(10)
    device = Device((FULL, spec, spec), 200)
    request = device.start(list(range(160)), chunk=chunk)
    assert request is not None
    most = 0
    while request.num_computed < 160:
        assert device.go_on(request, min(chunk, 160 - request.num_computed), 160)
        used = device.kv.pool.num_blocks - device.kv.pool.num_free
        most = max(most, used - -(-request.num_computed // BLOCK))
    assert spec.num_held(BLOCK, 160, chunk) <= 3 + -(-chunk // BLOCK) + 1
    assert most <= 2 * (spec.num_held(BLOCK, 160, chunk) + FREED_AT_ONCE)


def test_all_that_is_unseen_is_given_back_where_memory_is_short() -> None:
    """However few blocks that are: a request alone needs no more than `num_held`."""
    spec = SlidingWindow(10)
    device = Device((spec,), spec.num_held(BLOCK, 160))
    request = device.start([1])
    assert request is not None
    while request.num_computed < 160:
        request.tokens.append(1)
        assert device.go_on(request, 1, 160)


def test_a_hit_of_a_window_needs_its_last_blocks_only() -> None:
    device = Device((SlidingWindow(5),), 6)
    first = device.start(list(range(16)))
    assert first is not None
    for _ in range(8):
        first.tokens.append(99)
        device.go_on(first, 1, 100)
    device.end(first)
    other = device.start([7] * 8)  # takes pages that were freed first, of the beginning
    assert other is not None
    again = request_of([*range(16), 50, 51])
    assert device.kv.match(again) == 16
    assert again.num_freed == [3], "one block holds the four tokens that token 16 sees"


def test_a_hit_is_what_all_kinds_can_serve() -> None:
    device = Device((FULL, SlidingWindow(5)), 40)
    first = device.start(list(range(20)), chunk=8)
    assert first is not None
    device.go_on(first, 12, 20)
    assert device.kv.match(request_of([*range(20), 1])) == 20
    # A page of the window's last block goes: the hit ends where a window is still whole.
    gone = first.blocks[2 * 4 + 1]
    key = device.kv.pool._key[gone]
    assert key is not None
    device.end(first)
    device.kv.pool._evict(key)
    late = request_of([*range(20), 1])
    assert device.kv.match(late) == 16
    assert late.num_freed == [0, 3]


@pytest.mark.parametrize(
    ("mode", "every", "ends"),
    [("none", 1, []), ("align", 1, [3]), ("align", 2, [3]), ("all", 1, [0, 1, 2, 3]), ("all", 2, [1, 3])],
)
def test_checkpoints_are_left_at_their_places(mode: Any, every: int, ends: list[int]) -> None:
    """A prompt of 18 tokens whose first step ends with the fourth block."""
    device = Device((FULL, RecurrentState(mode, every)), 40)
    first = device.start(list(range(18)), chunk=16)
    assert first is not None
    assert device.kv.match(request_of([*range(18), 1])) == (16 if ends else 0)
    state = device.kv._kinds[1]
    assert [n for n, one in enumerate(first.hashes) if device.kv.pool.find(state.key(one))] == ends
    assert device.go_on(first, 2, 18)
    device.end(first)
    hit = BLOCK * max([0, *(end + 1 for end in ends if end < 3)])
    assert device.kv.match(request_of([*range(15), 1])) == hit
    assert device.kv.limited == ({"state-1": 12 - hit} if hit < 12 else {})


def test_checkpoints_of_a_request_are_evicted_by_use() -> None:
    device = Device((FULL, RecurrentState("all")), 18)
    first = device.start(list(range(32)), chunk=32)
    assert first is not None
    device.end(first)
    again = device.start([*range(8), 77])
    assert again is not None, "its two blocks were used last"
    device.end(again)
    for n, length in enumerate((16, 12)):
        other = device.start([100 + n] * length)
        assert other is not None
        device.end(other)
    assert device.kv.match(request_of([*range(32), 1])) == 8


def test_a_state_is_one_page_while_a_request_decodes() -> None:
    for spec, most in ((RecurrentState("none"), 1), (RecurrentState("align"), 2), (RecurrentState("all"), 2)):
        device = Device((spec,), most)
        request = device.start([1])
        assert request is not None
        while request.num_computed < 160:
            request.tokens.append(1)
            assert device.go_on(request, 1, request.num_computed)
        assert device.kv.pool.num_blocks - device.kv.pool.num_free <= most


def test_a_state_of_the_step_that_is_planned_is_found_by_no_one_in_it() -> None:
    kv = KVCache(40, BLOCK, (FULL, RecurrentState("align")))
    first, second, third = (request_of([*range(16), n]) for n in range(3))
    assert kv.grow(first, 16) is not None
    first.num_computed = 16
    kv.cache_full(first, 16, sent=False)
    assert kv.match(second) == 0, "the state is written by the same step"
    kv.take_changes()
    assert kv.match(second) == 16
    kv.free(second)
    kv.reset_prefix_cache([])
    assert kv.grow(third, 16) is not None
    third.num_computed = 16
    kv.cache_full(third, 16, sent=False)
    kv.free(third)  # preempted: nothing of it is computed
    kv.take_changes()
    assert kv.match(second) == 0


def test_steps_of_a_prompt_end_where_a_checkpoint_is_left() -> None:
    kv = KVCache(40, BLOCK, (FULL, RecurrentState("align", 2)))
    assert [kv.step_end(start, count) for start, count in ((0, 20), (0, 16), (0, 7), (5, 4), (16, 3))] == [
        16,
        16,
        7,
        3,
        3,
    ]
    for spec in (RecurrentState("none"), RecurrentState("all")):
        assert KVCache(40, BLOCK, (FULL, spec)).step_end(0, 19) == 19
    assert KVCache(40, BLOCK, (RecurrentState("align"),), prefix_caching=False).step_end(0, 19) == 19


def test_groups_of_equal_spec_are_cached_together() -> None:
    device = Device((FULL, SlidingWindow(100), SlidingWindow(100)), 9)
    first = device.start(list(range(12)))
    assert first is not None
    device.end(first)
    assert device.start([5] * 4) is not None, "three pages: of the last block, as it was freed first"
    assert device.kv.match(request_of([*range(12), 1])) == 8


def test_a_failed_step_makes_nothing_known_of_what_ran() -> None:
    device = Device((), 10)
    first = device.start(list(range(10)))
    assert first is not None
    device.kv.reset_prefix_cache(device.running)
    device.kv.cache_full(first, 8)
    assert device.kv.match(request_of([*range(10), 1])) == 0
    device.kv.cache_full(first, 10)
    first.tokens.extend([1, 2])
    device.go_on(first, 2, 12)
    late = request_of([*range(10), 1, 2, 3])
    assert device.kv.match(late) == 0
    assert device.kv.pool.find(late.hashes[2]) is None, "its third block was begun before"


def test_what_was_given_back_before_its_tokens_were_known_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "FREED_AT_ONCE", 1)
    device = Device((SlidingWindow(1),), 4)
    first = device.start([1])
    assert first is not None
    for _ in range(12):
        first.tokens.append(1)
        assert device.go_on(first, 1, 0)
    assert first.num_freed == [3]
    device.kv.cache_full(first, 13)
    assert [device.kv.pool.find(block_hash) for block_hash in first.hashes] == [None] * 3


@pytest.mark.parametrize("specs", GROUPS)
def test_the_longest_request_that_is_taken_runs_alone(specs: tuple[KVSpec, ...]) -> None:
    device = Device(specs, 60)
    longest = device.kv.longest(500)
    assert device.kv.holds(longest)
    assert longest == 499 or not device.kv.holds(longest + 1)
    request = device.start(list(range(longest)), chunk=64)
    assert request is not None
    while request.num_computed < longest:
        assert device.go_on(request, min(64, longest - request.num_computed), longest)


def test_what_a_table_grows_by_is_told_row_by_row() -> None:
    device = Device((FULL, SlidingWindow(4)), 20)
    request = request_of(list(range(10)))
    assert device.kv.grow(request, 5) == ints(pack_i32(request.blocks)) == [0, 1, 2, 3]
    assert device.kv.grow(request, 8) == []
    assert device.kv.grow(request, 9) == [4, 5]
    assert request.capacity == 12
    assert SlidingWindow(4).first_needed(BLOCK, 9) == 1


def test_choices_of_one_prompt_hash_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand choices that begin in one plan each hashed their prompt."""
    known: list[int] = []
    extend = hashes.extend

    def spy(found: list[bytes], *rest: Any) -> None:
        known.append(len(found))
        extend(found, *rest)

    monkeypatch.setattr(hashes, "extend", spy)
    cache = KVCache(64, 4)
    tokens = list(range(21))
    requests = [
        request_of(tokens),
        request_of(tokens),
        request_of(tokens, "salt"),
        request_of([*tokens, 9]),
        request_of(tokens),
    ]
    for request in requests:
        cache.match(request)
    assert known == [0, 5, 0, 0, 0]
    alone = requests[0].hashes
    assert requests[1].hashes == requests[4].hashes == alone != requests[2].hashes


def test_which_group_limited_a_hit_is_told() -> None:
    """A window's early pages are given back while their request runs, so others get them before those of full attention."""
    device = Device((FULL, SlidingWindow(4)), 32)
    prompt = list(range(100, 148))
    first = device.start(prompt)
    assert first is not None
    device.kv.grow(first, 49)  # its window has moved on
    other = device.start([7] * 26)
    assert other is not None
    again = request_of([*prompt[:24], 1, 2])
    hit = device.kv.match(again)
    assert device.kv.limited == {"sliding-1": 24 - hit}
    assert device.kv.missed(again) == {"kv_group": 24 - hit, "last_block": 2}
    assert hit < 24


def test_where_memory_is_short_others_give_back_what_they_no_longer_see() -> None:
    """Blocks that decodes leave are given back eight at once; while they are kept nobody is short of them."""
    device = Device((FULL, SlidingWindow(4), SlidingWindow(4)), 40)
    first = device.start([1, 2, 3, 4], chunk=4)
    assert first is not None
    while first.num_computed < 32:
        first.tokens.append(5)
        assert device.go_on(first, 1, first.num_computed)
    kept = device.kv.pool.num_free
    assert kept == 40 - 8 * 3, "nothing was given back yet"
    other = request_of([7] * 36)
    assert device.kv.grow(other, 36) is None, "nine blocks, of three pages each"
    assert device.kv.grow(other, 36, [first]) is not None
    assert device.kv.pool.num_free == kept - 9 * 3 + 2 * 7, "the last block is in sight"
    device.running.append(other)
    device.check()


def test_a_hit_at_the_end_of_a_chunk_needs_none_of_its_blocks() -> None:
    """And one within a chunk needs those of that chunk alone. Blocks are of four tokens, chunks of eight."""
    device = Device((FULL, ChunkedAttention(8)), 40)
    first = device.start(list(range(22)), chunk=8)
    assert first is not None
    device.go_on(first, 8, 16)
    device.go_on(first, 6, 22)
    keys = [device.kv.pool._key[page] for page in first.blocks[1::2][:5]]
    assert None not in keys
    device.end(first)
    whole = request_of([*range(16), 90, 91])
    assert device.kv.match(whole) == 16
    assert whole.num_freed == [0, 4]
    assert whole.blocks[1:8:2] == [-1] * 4 or len(set(whole.blocks[1:8:2])) == 1, "no page of the chunks before"
    within = request_of([*range(20), 90, 91])
    assert device.kv.match(within) == 20
    assert within.num_freed == [0, 4]
    device.kv.free(whole)
    device.kv.free(within)
    assert keys[4] is not None
    device.kv.pool._evict(keys[4])  # the first block of the third chunk
    late = request_of([*range(20), 90, 91])
    assert device.kv.match(late) == 16


def test_blocks_of_earlier_chunks_are_given_back_while_a_request_runs() -> None:
    device = Device((ChunkedAttention(8),), 8)
    request = device.start([0] * 3)
    assert request is not None
    most = 0
    for _ in range(90):
        request.tokens.append(1)
        assert device.go_on(request, 1, 200)
        most = max(most, len(device.kv._held(request)))
    assert most <= 8
