"""Which bodies a frontend refuses: those that two frontends died with in hand."""

import asyncio

import pytest

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.requests.admission import MAX_NAMES, PoisonBodies, name_of
from meshlm.protocol.edges.control import Died
from meshlm.protocol.wire.ids import Identity, Incarnation, Role


def died(life: int, *names: str, index: int = 0) -> Died:
    return Died(Identity(Role.FRONTEND, index), Incarnation(life), names)


async def test_the_second_death_makes_a_poison_and_the_news_of_one_counts_once() -> None:
    bodies, name = PoisonBodies(), name_of("/v1/completions", b"{}")
    for _ in range(3):
        bodies.learn(died(1, name))
        async with bodies.turn(name):
            pass
    bodies.learn(died(1, name, index=1))
    with pytest.raises(HttpError, match="processes died 2 times while they worked on this request") as told:
        async with bodies.turn(name):
            raise AssertionError("it is read")
    assert (told.value.status, told.value.kind) == (400, "poison_request_error")
    for path, body in (("/v1/completions", b"{ }"), ("/v1/chat/completions", b"{}")):
        async with bodies.turn(name_of(path, body)):
            pass


async def test_suspects_are_read_one_after_the_other_and_nobody_else_waits() -> None:
    bodies, running = PoisonBodies(), list[str]()
    bodies.learn(died(1, "a", "b"))
    go_on, both = asyncio.Event(), asyncio.Event()

    async def read(name: str) -> None:
        async with bodies.turn(name):
            running.append(name)
            if len(running) == 2:
                both.set()
            await go_on.wait()
            running.remove(name)

    tasks = [asyncio.ensure_future(read(name)) for name in ("a", "b", "c")]
    await asyncio.wait_for(both.wait(), 10)
    assert running == ["a", "c"]
    go_on.set()
    await asyncio.gather(*tasks)


async def test_what_is_remembered_has_a_limit() -> None:
    bodies = PoisonBodies()
    for life in range(3 * MAX_NAMES):
        bodies.learn(died(life, f"{life}"))
    assert len(bodies._counts) == len(bodies._deaths) == MAX_NAMES
