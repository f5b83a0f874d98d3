"""Whole ranks whose pages move: every token that is computed sees what its own text, salt and weights have made, whoever dies."""

from random import Random

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from kv_device import GROUPS
from msgspec.structs import replace
from page_world import World, expected

from meshlm.protocol.edges.kv import EndLease, FindPages, LeaseEnded, PagesFound, PagesMoved, PagesWanted
from meshlm.protocol.kv import ChunkedAttention, CrossAttention, KVSpec, RecurrentState
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.scheduler_proc.connectors.session import STORE

# A chunk of one block needs nothing that lies before it.
SHARED = [
    specs
    for specs in GROUPS
    if specs not in ((), (ChunkedAttention(4),)) and not any(isinstance(one, CrossAttention) for one in specs)
]
PROMPT = [n % 5 for n in range(26)]


def counts(world: World, name: str, rank: int = 0) -> dict[str, float]:
    return world.cores[rank].batching.counts.told().counters.get(name, {})


def evict(world: World, rank: int = 0) -> None:
    """The device holds nothing of what was computed."""
    world.cores[rank].batching.kv.pool.reset_prefix_cache()
    world.settle()


def run(world: World, prompt: list[int], rank: int = 0, **more: object) -> int:
    """Computes a request to its end; the prompt tokens that were computed for it."""
    before = world.cores[rank].load.prompt_tokens
    name = world.ask(prompt, rank, **more)  # type: ignore[arg-type]
    world.settle()
    assert world.asks[name].tokens == expected(prompt, 3)
    return world.cores[rank].load.prompt_tokens - before


@pytest.mark.parametrize("specs", SHARED)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_was_evicted_comes_back_from_the_store(specs: tuple[KVSpec, ...], num_workers: int) -> None:
    world = World(1, num_workers, 200, specs, store_pages=300)
    assert run(world, PROMPT) == 26
    evict(world)
    again = run(world, PROMPT)
    has_checkpoints = all(not isinstance(one, RecurrentState) or one.checkpoint_blocks for one in specs)
    assert (again < 26) is has_checkpoints
    assert counts(world, "kv_loads") == ({"nothing": 1, "loaded": 1} if has_checkpoints else {})
    assert counts(world, "external_prefix_cache_hits") == ({"": 26 - again} if has_checkpoints else {})
    assert world.cores[0].batching.cache_hits == 0, "what was loaded is counted apart"
    world.finish()


def test_what_a_dead_worker_had_is_loaded_for_the_requests_that_wait_for_the_next() -> None:
    world = World(1, 1, 200, store_pages=300)
    run(world, PROMPT)
    evict(world)
    name = world.ask(PROMPT, 0)
    world.kill_worker(0, 0)
    world.settle()
    assert world.asks[name].tokens == expected(PROMPT, 3)
    assert counts(world, "kv_loads")["loaded"] == 1, (
        "the next worker's first step was planned before the store was asked"
    )
    world.finish()


def test_a_store_that_does_not_answer_holds_the_first_step_for_two_seconds_only() -> None:
    world = World(1, 1, 200, store_pages=300)
    core = world.cores[0]
    transfers = core.transfers
    assert transfers is not None
    world.ask(PROMPT, 0)
    world.kill_worker(0, 0)
    while not core.serving:
        world.deliver(next(link for link in world.waiting_links() if STORE not in link))
        while world.can_work(0):
            world.work(0)
    assert transfers.holds_steps(int(world.now * 1e9))
    assert not core.inflight
    world.tick(3.0)
    assert core.inflight
    world.finish()


def test_workers_without_pages_are_told_of() -> None:
    world = World(1, 1, 40, store_pages=10)
    transfers = world.cores[0].transfers
    assert transfers is not None
    assert not transfers.warnings
    transfers.end()
    transfers.begin(9, [replace(world.workers[0][0].ready(), page_bytes=0)])
    assert transfers.warnings == ["the workers of this rank have no pages that can be moved, or different ones"]


@settings(max_examples=100, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 1 << 32))
@example(100903)  # a suspect is tried while all rows are taken
@example(902117)
def test_any_histories(seed: int) -> None:
    """Requests that share prefixes and little memory, steps and copies that overlap, late and doubled answers, resets and deaths."""
    play(seed)


def play(seed: int) -> World:
    random = Random(seed)
    specs = random.choice(SHARED)
    world = World(
        random.choice([1, 2, 2]),
        random.choice([1, 1, 2]),
        random.choice([17, 20, 30, 60]) * len(specs),
        specs,
        store_pages=random.choice([0, 20, 100]) * len(specs),
        connector=random.random() < 0.4,
    )
    texts = [[0]]
    for _ in range(random.randrange(1, 200) if world.config.moves else 0):
        one_event(world, random, texts)
    world.finish()
    return world


def one_event(world: World, random: Random, texts: list[list[int]]) -> None:
    rank = random.randrange(len(world.cores))
    others = [Identity(Role.SCHEDULER, other) for other in range(len(world.cores)) if other != rank]
    match random.choices(EVENTS, WEIGHTS)[0]:
        case "ask":
            text = random.choice(texts)[: random.randrange(40)] + random.choices(range(3), k=random.randrange(1, 12))
            texts.append(text)
            hands_off = random.random() < 0.4 and bool(others)
            holder = random.choice([None, *others])
            world.ask(
                text, rank, random.choice(["", "", "s"]), random.randrange(1, 7), holder=holder, hands_off=hands_off
            )
        case "arrive":
            for _ in range(random.randrange(1, 6)):
                if links := world.waiting_links():
                    world.deliver(random.choice(links))
        case "arrive twice":
            doubled = [link for link in world.waiting_links() if isinstance(world.links[link][0], MAY_COME_TWICE)]
            if doubled:
                world.deliver(random.choice(doubled), again=True)
        case "lose":
            lost = [link for link in world.waiting_links() if isinstance(world.links[link][0], MAY_BE_LOST)]
            if lost:
                world.links[random.choice(lost)].popleft()
        case "work":
            for _ in range(random.randrange(1, 4)):
                if world.can_work(rank):
                    world.work(rank)
        case "copy":
            for _ in range(random.randrange(1, 9)):
                if copying := world.copying():
                    world.copy(random.choice(copying), fails=random.random() < 0.05)
        case "tick":
            world.tick(random.choice([0.5, 1.0, 3.0, 31.0]))
        case "abort":
            if open_ones := [name for name, ask in world.asks.items() if not ask.is_over]:
                world.abort(random.choice(open_ones))
        case "operate":
            world.operate(rank, f"o{world.now}", calls=random.random() < 0.3)
        case "scheduler dies":
            world.kill_scheduler(rank)
        case "worker dies":
            world.kill_worker(rank, random.randrange(world.num_workers))
        case "store dies" if world.store is not None:
            world.kill_store()


MAY_COME_TWICE = (FindPages, PagesFound, EndLease, LeaseEnded, PagesWanted, PagesMoved)
MAY_BE_LOST = (FindPages, PagesFound, EndLease, LeaseEnded)
EVENTS = ["ask", "arrive", "arrive twice", "lose", "work", "copy", "tick", "abort", "operate"]
EVENTS += ["scheduler dies", "worker dies", "store dies"]
WEIGHTS = [14, 40, 2, 1, 25, 25, 2, 1, 3, 1, 1, 1]
