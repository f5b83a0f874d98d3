"""Leases that a rank gives: to ranks that read its pages, and for prompts that go on elsewhere."""

from array import array
from typing import Any, TypeVar

from page_world import World, expected

from meshlm.protocol.edges.kv import KEY_BYTES, NOT_HERE, EndLease, FindPages, LeaseEnded, PagesFound
from meshlm.protocol.wire.columns import ints
from meshlm.protocol.wire.ids import Identity, RequestId, Role
from meshlm.runtime.process.events import PeerLost, Received
from meshlm.scheduler_proc.kv.hashes import ExtraKeys, extend

PROMPT = [n % 5 for n in range(26)]  # six full blocks
ME, PEER = (Identity(Role.SCHEDULER, rank) for rank in (0, 1))
NAMESPACE = b"v" * 16


def keys_of(prompt: list[int], salt: str = "", weights: bytes = b"") -> bytes:
    hashes: list[bytes] = []
    extend(hashes, ExtraKeys(salt, weights=weights), array("i", prompt), 4, len(prompt))
    return b"".join(hashes)


def ask(world: World, number: int, keys: bytes, namespace: bytes = NAMESPACE) -> PagesFound:
    asked = FindPages(number, namespace, keys, bytes([1]) * (len(keys) // KEY_BYTES))
    world.event(0, Received(PEER, world.life(PEER), asked))
    return last(world, PagesFound)


def end(world: World, number: int) -> bool:
    world.event(0, Received(PEER, world.life(PEER), EndLease(number)))
    return last(world, LeaseEnded).valid


Kind = TypeVar("Kind")


def last(world: World, kind: type[Kind]) -> Kind:
    message = world.links[ME, PEER].pop()
    assert isinstance(message, kind)
    return message


def computed(**more: Any) -> World:
    world = World(2, **more)
    world.ask(PROMPT)
    world.settle()
    return world


def test_pages_that_are_read_stay_until_the_lease_ends() -> None:
    world = computed(num_workers=2)
    pool = world.cores[0].batching.kv.pool
    found = ask(world, 7, keys_of(PROMPT))
    assert NOT_HERE not in ints(found.pages)
    assert [memory.path for memory in found.memory] == ["worker/0 1", "worker/1 1"]
    pool.reset_prefix_cache()
    for _ in range(4):
        world.ask([4, 3] * 20)
    world.settle()
    (lease,) = pool.leases
    assert lease.pages == ints(found.pages)
    assert end(world, 7), "nobody has written to them"
    assert not end(world, 7)
    world.finish()


def test_what_it_does_not_have_it_says() -> None:
    world = computed()
    assert ask(world, 1, keys_of(PROMPT), namespace=b"w" * 16) == PagesFound(1, b"")
    assert ask(world, 2, keys_of(PROMPT, "salt")) == PagesFound(2, b"")
    assert not end(world, 2)
    mixed = ask(world, 3, keys_of(PROMPT[:8]) + keys_of([9] * 4))
    assert [page == NOT_HERE for page in ints(mixed.pages)] == [False, False, True]
    assert ask(world, 3, keys_of(PROMPT)) == mixed, "a question that is doubled"
    assert end(world, 3)
    world.finish()


def test_what_a_step_in_flight_writes_is_not_given_away() -> None:
    world = World(2)
    world.ask(PROMPT)
    assert world.cores[0].inflight
    assert ask(world, 1, keys_of(PROMPT)) == PagesFound(1, b"")
    world.settle()
    assert ask(world, 2, keys_of(PROMPT)).pages
    assert end(world, 2)
    world.finish()


def test_leases_end_with_their_reader_and_with_time() -> None:
    world = computed()
    pool = world.cores[0].batching.kv.pool
    ask(world, 1, keys_of(PROMPT))
    world.event(0, PeerLost(PEER, world.life(PEER)))
    assert not pool.leases
    ask(world, 2, keys_of(PROMPT))
    world.tick(29.0)
    assert pool.leases
    world.tick(2.0)
    assert not pool.leases
    assert not end(world, 2)
    world.finish()


def test_a_rank_whose_workers_are_lost_has_held_nothing() -> None:
    world = computed()
    ask(world, 1, keys_of(PROMPT))
    world.kill_worker(0, 0)
    assert not end(world, 1)
    assert ask(world, 2, keys_of(PROMPT)) == PagesFound(2, b"")
    world.settle()
    assert ask(world, 3, keys_of(PROMPT)) == PagesFound(3, b"")
    world.finish()


def test_weights_that_change_have_another_namespace() -> None:
    world = computed()
    world.operate(0, "o1", calls=True)
    world.settle()
    world.ask(PROMPT)
    world.settle()
    assert ask(world, 1, keys_of(PROMPT)) == PagesFound(1, b""), "computed with other weights"
    changed = world.workers[0][0]
    assert ask(world, 2, keys_of(PROMPT), changed.version) == PagesFound(2, b""), "their keys are others, too"
    assert ask(world, 2, keys_of(PROMPT, weights=changed.weights.key), changed.version).pages
    assert end(world, 2)
    world.finish()


def test_a_prompt_is_handed_off_with_its_first_token_and_kept_until_it_is_taken() -> None:
    world = World(2)
    name = world.ask(PROMPT, hands_off=True, max_tokens=9)
    pool = world.cores[0].batching.kv.pool
    while not world.handed_off:
        if links := world.waiting_links():
            world.deliver(links[0])
        else:
            world.work(0)
    assert world.asks[name].tokens == expected(PROMPT, 1)
    assert RequestId(name) not in world.cores[0].requests
    (kept,) = pool.leases
    assert len(kept.pages) == 6
    world.settle()
    assert not pool.leases, "the rank that decodes has them now"
    assert world.asks[name].tokens == expected(PROMPT, 9)
    assert world.cores[1].load.prompt_tokens == 3, "the end of the prompt, and the first token"
    world.finish()


def test_a_prompt_that_nobody_takes_is_kept_for_a_while() -> None:
    world = World(2)
    world.ask(PROMPT, hands_off=True, max_tokens=9)
    while not world.handed_off:
        if links := world.waiting_links():
            world.deliver(links[0])
        else:
            world.work(0)
    world.links[PEER, ME].clear()
    for _ in range(29):
        world.tick(1.0)
    assert world.cores[0].batching.kv.pool.leases
    world.tick(2.0)
    assert not world.cores[0].batching.kv.pool.leases
    world.finish()


def test_a_request_that_ends_with_its_first_token_is_not_handed_off() -> None:
    world = World(2)
    name = world.ask(PROMPT, hands_off=True, max_tokens=1)
    world.settle()
    assert (world.handed_off, world.asks[name].tokens) == (0, expected(PROMPT, 1))
    assert not world.cores[0].batching.kv.pool.leases
    world.finish()
