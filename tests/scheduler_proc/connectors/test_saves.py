"""Saves: what is computed is offered once, with a bound, and only as long as it means what was offered."""

from page_world import CONNECTOR, World

from meshlm.protocol.edges.kv import MovePages, OfferPages, PagesMoved, PagesOpened, PagesStored, PagesWanted
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime.process.events import Received
from meshlm.scheduler_proc.connectors import saves

PROMPT = [n % 5 for n in range(26)]  # six full blocks
ME, STORE, WORKER = Identity(Role.SCHEDULER), Identity(Role.STORE), Identity(Role.WORKER)


def saved(world: World) -> dict[str, float]:
    return world.cores[0].batching.counts.told().counters.get("kv_saved_blocks", {})


def computing(world: World, *, steps: int = 20) -> None:
    """Steps are computed, and nothing else arrives."""
    for _ in range(steps):
        while world.links.get((ME, WORKER)):
            world.deliver((ME, WORKER))
        while world.can_work(0):
            world.work(0)
        while world.links.get((WORKER, ME)):
            world.deliver((WORKER, ME))


def test_each_block_is_saved_once_and_what_was_loaded_never() -> None:
    world = World(1, 2, store_pages=100)
    world.ask(PROMPT)
    world.settle()
    world.ask(PROMPT)
    world.settle()
    assert saved(world) == {"store": 7}, "one has the end of the prompt and its answer; the next plan tells of it"
    world.cores[0].batching.kv.pool.reset_prefix_cache()
    world.tick(0.1)
    world.ask(PROMPT)
    world.settle()
    assert world.cores[0].batching.counts.told().counters["kv_loaded_blocks"] == {"": 6}
    assert world.store is not None
    assert len(world.store.keys) == 7
    assert saved(world) == {"store": 7}
    world.finish()


def test_steps_never_wait_and_saves_hold_an_eighth_of_the_pool() -> None:
    world = World(1, num_pages=64, store_pages=200)
    for n in range(3):
        world.ask([n] * 40, max_tokens=9)
    while world.links.get((ME, STORE)):
        world.deliver((ME, STORE))
    computing(world)  # the store is slow: it answers that nothing was found, and no offer
    while world.links.get((STORE, ME)):
        world.deliver((STORE, ME))
    computing(world)
    assert all(ask.is_over for ask in world.asks.values())
    offers = [message for message in world.links[ME, STORE] if isinstance(message, OfferPages)]
    assert 0 < sum(len(offer.widths) for offer in offers) <= 64 // saves.MOST_LEASED
    world.settle()
    assert saved(world)["store"] == 3 * 12 - 1, "the last one is told of by the next plan"
    world.finish()


def test_what_a_worker_could_not_write_is_not_stored() -> None:
    world = World(1, 2, store_pages=100)
    world.ask(PROMPT, max_tokens=1)
    while not world.copying():
        if links := world.waiting_links():
            world.deliver(links[0])
        else:
            world.work(0)
    world.copy(world.copying()[-1], fails=True)
    world.settle()
    assert world.store is not None
    assert saved(world) == {"store": 5}
    assert len(world.store.keys) == 5
    world.finish()


def test_an_offer_that_was_made_before_a_reset_brings_nothing() -> None:
    world = World(1, store_pages=100)
    world.ask(PROMPT)
    while not any(isinstance(one, PagesWanted) for one in world.links.get((STORE, ME), ())):
        if links := [link for link in world.waiting_links() if not isinstance(world.links[link][0], PagesWanted)]:
            world.deliver(links[0])
        else:
            world.work(0)
    world.operate(0, "o1", calls=False)
    world.ask(PROMPT)
    computing(world)
    answers = [message for message in world.links[STORE, ME] if isinstance(message, PagesWanted)]
    world.links[STORE, ME].clear()
    for answer in answers:
        world.event(0, Received(STORE, world.life(STORE), answer))
    told = [message for message in world.links[ME, STORE] if isinstance(message, PagesStored)]
    assert [set(one.stored) for one in told] == [{0}] * len(answers)
    assert not any(isinstance(one, MovePages) for one in world.links[ME, WORKER])
    world.settle()
    world.finish()


def test_a_store_that_cannot_keep_these_pages_is_offered_none() -> None:
    world = World(1, store_pages=100)
    core = world.cores[0]
    assert core.transfers is not None
    core.transfers._num_opening += 1
    world.event(0, Received(STORE, world.life(STORE), PagesOpened(failed="a page is larger than the store")))
    world.ask(PROMPT)
    assert not world.links[ME, STORE]
    world.settle()
    assert saved(world) == {}
    world.finish()


def test_a_connector_gets_what_is_computed_with_its_keys() -> None:
    world = World(1, connector=True)
    world.ask(PROMPT, max_tokens=1)
    moves: list[MovePages] = []
    while links := world.waiting_links() or world.can_work(0) or world.copying():
        if isinstance(links, list) and world.waiting_links():
            message = world.links[world.waiting_links()[0]][0]
            moves += [message] if isinstance(message, MovePages) else []
            world.deliver(world.waiting_links()[0])
        elif world.can_work(0):
            world.work(0)
        else:
            world.copy(world.copying()[0])
    assert all(move.connector == CONNECTOR and not move.is_load and move.memory is None for move in moves)
    assert sum(len(ints(move.pages)) for move in moves) == sum(len(move.keys) // 32 for move in moves) == 6
    assert saved(world) == {CONNECTOR: 6}
    world.finish()


def test_answers_of_another_session_end_no_copy() -> None:
    world = World(1, store_pages=100)
    world.ask(PROMPT, max_tokens=1)
    while not world.copying():
        if links := world.waiting_links():
            world.deliver(links[0])
        else:
            world.work(0)
    number = world.copying()[0].copies[0].move.number
    for session, failed in ((1, b""), (1, pack_i32([0]))):
        world.event(0, Received(WORKER, world.life(WORKER), PagesMoved(session, number, failed)))
    assert world.cores[0].batching.kv.pool.leases
    world.settle()
    assert saved(world) == {"store": 6}
    world.finish()
