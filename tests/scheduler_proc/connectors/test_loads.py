"""Loads one by one: which keys are asked for, what ends a wait, and what becomes of what came."""

from typing import Any

import pytest
from kv_device import BLOCK, FULL
from page_world import CONNECTOR, World, expected

from meshlm.protocol.edges.kv import EndLease, FindPages, LeaseEnded, MovePages, PagesFound, PagesMoved
from meshlm.protocol.edges.step import StepResult
from meshlm.protocol.kv import RecurrentState, SlidingWindow
from meshlm.protocol.kv_transfer import KVTransfer
from meshlm.protocol.wire.ids import Identity, RequestId, Role
from meshlm.runtime.process.events import PeerLost
from meshlm.scheduler_proc.states import Planning, Wait

PROMPT = [n % 5 for n in range(26)]  # six full blocks
ME, PEER = (Identity(Role.SCHEDULER, rank) for rank in (0, 1))
STORE, WORKER = Identity(Role.STORE), Identity(Role.WORKER)


def counted(world: World, name: str = "kv_loads", rank: int = 0) -> dict[str, float]:
    return world.cores[rank].batching.counts.told().counters.get(name, {})


def evict(world: World, rank: int = 0) -> None:
    """The device holds nothing of what was computed."""
    world.cores[rank].batching.kv.pool.reset_prefix_cache()
    world.tick(0.1)


def stored(num_workers: int = 1, **more: Any) -> World:
    """The store has a prompt, and the device has it no longer."""
    world = World(1, num_workers, store_pages=100, **more)
    world.ask(PROMPT)
    world.settle()
    evict(world)
    return world


def waits(world: World, name: str, rank: int = 0) -> Wait | None:
    return world.cores[rank].requests[RequestId(name)].waits


def until(world: World, kind: type, *, sent_by: Role) -> tuple[Identity, Identity]:
    """All goes on until such a message of such a process is the next of its link."""
    for _ in range(1000):
        for link in world.waiting_links():
            if link[0].role is sent_by and isinstance(world.links[link][0], kind):
                return link
        links = world.waiting_links()
        if links:
            world.deliver(links[0])
        elif world.can_work(0):
            world.work(0)
        else:
            world.copy(world.copying()[0])
    raise AssertionError("it never comes")


def computed(world: World, name: str) -> int:
    """Ends a request; the prompt tokens that were computed for it."""
    ask, core = world.asks[name], world.cores[world.asks[name].rank]
    before = core.load.prompt_tokens
    world.settle()
    assert ask.tokens == expected(ask.prompt, ask.max_tokens)
    return core.load.prompt_tokens - before


def test_others_pass_a_request_that_waits_for_its_load() -> None:
    world = stored()
    slow = world.ask(PROMPT)
    assert waits(world, slow) is Wait.KV
    held = until(world, PagesFound, sent_by=Role.STORE)
    quick = world.ask([1, 2, 3], max_tokens=1)
    messages = list(world.links[held])
    world.links[held].clear()
    world.settle()
    assert world.asks[quick].tokens, "it passed"
    assert waits(world, slow) is Wait.KV
    world.links[held].extend(messages)
    assert computed(world, slow) == 26 - 24
    world.finish()


def test_only_what_a_window_sees_is_copied() -> None:
    world = World(1, num_pages=60, specs=(FULL, SlidingWindow(5)), store_pages=100)
    world.ask(PROMPT)
    world.settle()
    evict(world)
    name = world.ask(PROMPT)
    link = until(world, MovePages, sent_by=Role.SCHEDULER)
    move = world.links[link][0]
    assert len(move.pages) // 4 == 6 + 1, "six blocks, and the last one for the window"
    assert computed(world, name) == 2
    world.finish()


def test_only_the_last_checkpoint_is_copied() -> None:
    world = World(1, num_pages=60, specs=(FULL, RecurrentState("all")), store_pages=100)
    world.ask(PROMPT)
    world.settle()
    evict(world)
    name = world.ask(PROMPT)
    move = world.links[until(world, MovePages, sent_by=Role.SCHEDULER)][0]
    assert len(move.pages) // 4 == 6 + 1
    assert computed(world, name) == 2
    world.finish()


def test_nothing_is_asked_for_that_no_hit_could_use() -> None:
    world = World(1, num_pages=60, specs=(FULL, RecurrentState("none")), store_pages=100)
    world.ask(PROMPT)
    assert not any(isinstance(message, FindPages) for messages in world.links.values() for message in messages)
    world.finish()


def test_twins_share_a_load() -> None:
    world = stored()
    twins = [world.ask(PROMPT), world.ask(PROMPT), world.ask([*PROMPT, 4])]
    assert all(waits(world, name) is Wait.KV for name in twins)
    assert sum(computed(world, name) for name in twins) <= 3 * 3
    assert counted(world) == {"nothing": 1, "loaded": 1}
    world.finish()


def test_a_holder_that_does_not_answer_has_nothing() -> None:
    world = stored()
    name = world.ask(PROMPT)
    world.links[ME, STORE].clear()
    world.tick(1.0)
    assert waits(world, name) is Wait.KV
    world.tick(1.5)
    assert computed(world, name) == 26
    world.finish()


def test_an_answer_that_is_late_is_given_back() -> None:
    world = stored()
    name = world.ask(PROMPT)
    link = until(world, PagesFound, sent_by=Role.STORE)
    for _ in range(3):
        world.tick(1.0)
    assert waits(world, name) is not Wait.KV
    world.deliver(link)
    assert isinstance(world.links[ME, STORE][0], EndLease)
    assert computed(world, name) == 26
    assert world.store is not None
    assert not world.store.leases
    world.finish()


def test_a_copy_that_takes_too_long_is_waited_for_by_nobody_and_its_pages_are_kept() -> None:
    world = stored()
    name = world.ask(PROMPT)
    until(world, MovePages, sent_by=Role.SCHEDULER)
    core = world.cores[0]
    for _ in range(32):
        world.tick(1.0)
    assert waits(world, name) is not Wait.KV
    leased = sum(len(lease.pages) for lease in core.batching.kv.pool.leases)
    assert leased == 6
    assert computed(world, name) == 26, "the deadline of the copy has passed"
    assert counted(world)["failed"] == 1
    world.finish()


def test_what_a_worker_cannot_copy_is_computed() -> None:
    world = stored(num_workers=2)
    name = world.ask(PROMPT)
    link = until(world, MovePages, sent_by=Role.SCHEDULER)
    world.deliver(link)
    world.work(0)
    worker = world.copying()[0]
    for place in range(6):
        world.copy(worker, fails=place == 3)
    assert computed(world, name) == 26 - 3 * BLOCK, "what one worker lacks counts for neither"
    assert counted(world, "kv_load_failed_blocks") == {"": 1}
    world.finish()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_lease_that_had_not_held_makes_nothing_known(policy: str) -> None:
    world = stored(load_failure_policy=policy)
    name = world.ask(PROMPT)
    link = until(world, LeaseEnded, sent_by=Role.STORE)
    world.links[link][0] = LeaseEnded(world.links[link][0].number, valid=False)
    world.settle()
    if policy == "fail":
        why = "6 of 6 blocks: store/0 has not kept its pages"
        assert world.failed[name] == f"KV was not loaded (kv_load_failure_policy is fail): {why}"
    else:
        assert world.asks[name].tokens == expected(PROMPT, 3)
    assert counted(world)["failed"] == 1
    world.finish()


@pytest.mark.parametrize("before", [PagesFound, PagesMoved, LeaseEnded])
def test_a_store_that_dies_has_nothing(before: type) -> None:
    world = stored()
    name = world.ask(PROMPT)
    until(world, before, sent_by=Role.WORKER if before is PagesMoved else Role.STORE)
    world.kill_store()
    assert waits(world, name) is not Wait.KV, "at once"
    assert computed(world, name) == 26
    world.finish()


@pytest.mark.parametrize("before", [PagesFound, MovePages, LeaseEnded])
def test_a_request_that_ends_leaves_its_load_alone(before: type) -> None:
    world = stored()
    name = world.ask(PROMPT)
    until(world, before, sent_by=Role.SCHEDULER if before is MovePages else Role.STORE)
    world.abort(name)
    world.settle()
    core = world.cores[0]
    assert not core.batching.kv.pool.leases
    again = computed(world, world.ask(PROMPT))
    assert again == 2, "what was moving is cached, and the rest is loaded"
    world.finish()


def test_what_is_loaded_is_kept_until_its_request_starts() -> None:
    world = stored()
    core = world.cores[0]
    core.workers.rank.move_planning(Planning.PAUSED)
    name = world.ask(PROMPT, max_tokens=2)
    world.settle()
    assert waits(world, name) is None
    (lease,) = core.batching.kv.pool.leases
    assert len(lease.pages) == 6
    core.workers.rank.move_planning(Planning.RUNNING)
    world.tick(0.1)
    assert not core.batching.kv.pool.leases
    assert core.batching.running
    world.settle()
    assert world.asks[name].tokens == expected(PROMPT, 2)
    world.finish()


def test_memory_that_is_short_takes_what_is_kept_for_others() -> None:
    world = stored(num_pages=17)
    core = world.cores[0]
    core.workers.rank.move_planning(Planning.PAUSED)
    late = world.ask(PROMPT, arrival_s=99.0)
    world.settle()
    assert len(core.batching.kv.pool.leases) == 1
    first = world.ask([4] * 50)
    core.workers.rank.move_planning(Planning.RUNNING)
    world.settle()
    for name in (first, late):
        assert world.asks[name].tokens == expected(world.asks[name].prompt, 3)
    assert not core.batching.num_preemptions
    world.finish()


def test_a_load_without_room_is_tried_again_once_there_is_some() -> None:
    world = stored(num_pages=17)
    first = world.ask([4] * 56, max_tokens=6)
    for _ in range(4):
        world.deliver(until(world, StepResult, sent_by=Role.WORKER))
    late = world.ask(PROMPT)
    world.settle()
    assert world.asks[first].is_over
    assert world.asks[late].tokens == expected(PROMPT, 3)
    assert counted(world) == {"nothing": 2, "no_room": 1, "loaded": 1}
    world.finish()


def test_what_computing_is_quicker_for_is_not_loaded() -> None:
    world = stored()
    core = world.cores[0]
    assert core.transfers is not None
    core.transfers._rates.learn("store", 1, 5.0)
    core.batching.budget.prompt_s = 0.5
    assert computed(world, world.ask(PROMPT)) == 26
    assert counted(world) == {"nothing": 1, "slow": 1}
    world.finish()


def test_what_another_rank_computed_for_a_request_is_loaded_whatever_it_costs() -> None:
    world = World(2)
    world.ask(PROMPT, 1)
    world.settle()
    for core in world.cores:
        assert core.transfers is not None
        core.transfers._rates.learn("rank", 1, 5.0)
        core.batching.budget.prompt_s = 0.5
    assert computed(world, world.ask(PROMPT, 0, holder=PEER)) == 2
    assert computed(world, world.ask([*PROMPT[:5], 9], 0, holder=PEER)) == 2, "one block alone, which is here"
    world.finish()


def test_a_preempted_request_is_looked_for_again() -> None:
    world = stored()
    name = world.ask(PROMPT, max_tokens=6)
    until(world, StepResult, sent_by=Role.WORKER)
    core = world.cores[0]
    core.batching.preempt(core.requests[RequestId(name)], "decode")
    evict(world)
    world.settle()
    assert world.asks[name].tokens == expected(PROMPT, 6)
    assert counted(world)["loaded"] == 2
    world.finish()


def test_all_workers_must_find_a_key_at_their_connector() -> None:
    world = World(1, num_workers=2, connector=True)
    world.ask(PROMPT)
    world.settle()
    evict(world)
    lost = next(iter(world.shelves[1]))
    del world.shelves[1][lost]
    name = world.ask(PROMPT)
    assert 2 < computed(world, name) < 26 + 1
    assert counted(world, "kv_saved_blocks")[CONNECTOR] >= 6
    world.finish()


def test_connectors_are_told_what_the_client_said_of_its_kv() -> None:
    world = World(1, connector=True)
    world.ask(PROMPT, extras=(KVTransfer(b'{"a":1}', loads=True),))
    (asked,) = [one for one in world.links[ME, WORKER] if isinstance(one, FindPages)]
    assert (asked.connector, asked.params) == (CONNECTOR, b'{"a":1}')
    world.finish()


def test_a_reset_makes_what_is_moving_count_for_nothing() -> None:
    world = stored()
    name = world.ask(PROMPT)
    until(world, PagesMoved, sent_by=Role.WORKER)
    world.operate(0, "o1", calls=False)
    world.settle()
    assert world.asks[name].tokens == expected(PROMPT, 3)
    world.finish()


def test_where_no_pages_move_there_is_nothing_of_it() -> None:
    world = World(1)
    core = world.cores[0]
    assert core.transfers is None
    assert core.batching.begun is None
    assert core.table.removed is None
    assert core.batching.kv.spare is None
    world.ask(PROMPT)
    assert core.requests[RequestId("r0")].load is None
    world.finish()


def test_a_scheduler_that_follows_trusts_no_page_that_a_copy_has_overwritten() -> None:
    """The workers' memory of the prefix cache had the page as it was when a plan last told of it."""
    world = stored(num_pages=17)
    other = [3] * 50
    world.ask(other, max_tokens=1)
    world.settle()
    name = world.ask(PROMPT)
    until(world, PagesMoved, sent_by=Role.WORKER)
    world.abort(name)
    world.kill_scheduler(0)
    world.store = None  # or it would bring the page back
    world.event(0, PeerLost(STORE, world.life(STORE)))
    world.settle()
    world.ask(other)
    world.finish()
