"""Seeded random histories of a whole mesh: processes die, connections break, links crawl, clients hang up.

In every history each client gets what an undisturbed run gives, once, in order, with one end; every core's check() holds after
every event; and when the faults are over the mesh is whole again, and empty.

    MESHLM_SIM_SEED=N         play history N alone and print its story when it goes wrong
    MESHLM_SIM_HISTORIES=N    play N histories instead of a minute's worth (MESHLM_SIM_FIRST: the first seed)
    MESHLM_SIM_ALL=1          with the faults that are known to be too much (scenario.py: OFF)
"""

import gc
import os
import time
from collections.abc import Iterator
from itertools import count

import pytest
from history import History, shrunk, violation
from scenario import OFF, Kind, make
from world import simulated

BUDGET_S = 60.0
AT_LEAST = 200  # histories, however slow the machine
FIRST = int(os.environ.get("MESHLM_SIM_FIRST", "0"))


def seeds() -> Iterator[int]:
    if wanted := os.environ.get("MESHLM_SIM_SEED"):
        yield int(wanted)
    elif number := os.environ.get("MESHLM_SIM_HISTORIES"):
        yield from range(FIRST, FIRST + int(number))
    else:
        end = time.monotonic() + BUDGET_S
        for seed in count(FIRST):
            if seed >= FIRST + AT_LEAST and time.monotonic() > end:
                return
            yield seed


@pytest.fixture
def rare_collections() -> Iterator[None]:
    """Each world is one big cycle; looking for it a thousand times costs a fifth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 100)
    yield
    gc.set_threshold(*before)


@pytest.mark.timeout(0)
@pytest.mark.usefixtures("rare_collections")
def test_any_history_gives_every_client_its_tokens_and_leaves_nothing_behind() -> None:
    played = 0
    for seed in seeds():
        if violation(make(seed)):
            tell(seed)
        played += 1
    print(f"{played} histories, without: {', '.join(kind.name for kind in OFF) or 'nothing'}")


def tell(seed: int) -> None:
    """Fail with the shortest story that goes wrong like this seed's."""
    scenario = shrunk(make(seed))
    story: list[str] = []
    reason = violation(scenario, story)
    again = f"MESHLM_SIM_SEED={seed} .venv/bin/pytest {os.path.relpath(__file__)}"
    pytest.fail("\n".join([reason, f"Again: {again}", repr(scenario), *story, reason]), pytrace=False)


def test_clients_with_a_key_get_their_answers_although_their_frontend_dies() -> None:
    """In the middle of a stream too: they go on where it broke."""
    answered = resumed = 0
    for seed in range(FIRST, FIRST + 150):
        with simulated():
            history = History(make(seed, (Kind.KILL_FRONTEND,)))
            history.play()
        answered += sum(client.num_retries > 0 and all(got.end for got in client.got) for client in history.clients)
        resumed += sum(had > 0 for had in history.broken)
    assert answered > 10
    assert resumed > 5


def test_a_seed_replays_the_same_story() -> None:
    told: list[str] = []
    for seed in range(FIRST, FIRST + 20):
        first: list[str] = []
        second: list[str] = []
        assert violation(make(seed), first) == violation(make(seed), second)
        assert first == second
        told += first
    assert any(" kills " in line for line in told)
