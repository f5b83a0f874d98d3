"""Workers of ranks that step together: each step is agreed on by all, and one that is gone lets no other wait for ever."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from meshlm.protocol.lockstep import StepAgreement, StepGroup
from meshlm.protocol.wire.ids import Epoch
from meshlm.workers.distributed.lockstep import SocketExchange, StepAborted

LIMIT_S = 20
GROUP = StepGroup(Epoch(7), 3)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as threads:
        yield threads


def proposal(step: int, num_tokens: int = 1, graph: bool = True, uniform: bool = True, n: int = 1) -> StepAgreement:
    return StepAgreement(step, num_tokens, graph, True, uniform, n, 2)


def test_what_is_agreed() -> None:
    own, other = proposal(4, 3), proposal(4, 8, graph=False)
    assert StepAgreement.of([own.columns(), other.columns()]) == proposal(4, 8, graph=False)
    assert StepAgreement.of([own.columns()]) == own, "an agreement is a proposal of one"
    mixed = proposal(4, uniform=False, n=5)
    assert StepAgreement.of([own.columns(), mixed.columns()]) == proposal(4, 3, uniform=False, n=5)
    asks = replace(own, rebalance=True)
    assert StepAgreement.of([asks.columns(), asks.columns()]) == asks, "all were asked to move experts"
    assert StepAgreement.of([asks.columns(), own.columns()]) == own, "one was not yet"
    with pytest.raises(ValueError, match="at step 4 and at step 5"):
        StepAgreement.of([own.columns(), proposal(5).columns()])


def together(pool: ThreadPoolExecutor, what: list[Callable[[], object]]) -> list[Future[object]]:
    return [pool.submit(one) for one in what]


def connected(folder: Path, pool: ThreadPoolExecutor) -> list[SocketExchange]:
    exchanges = [SocketExchange(str(folder), GROUP, member) for member in range(3)]
    for done in together(pool, [one.connect for one in exchanges]):
        done.result(LIMIT_S)
    return exchanges


def test_all_get_the_same(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    exchanges = connected(tmp_path, pool)
    assert list(tmp_path.iterdir()) == [], "nothing of the meeting is left"
    for step in range(1, 50):
        steps = [
            pool.submit(one.agree, proposal(step, num_tokens=step * member)) for member, one in enumerate(exchanges)
        ]
        assert {done.result(LIMIT_S) for done in steps} == {proposal(step, num_tokens=2 * step)}
    for one in exchanges:
        one.close()


@pytest.mark.parametrize("gone", [0, 1])
def test_none_waits_for_one_that_is_gone(tmp_path: Path, pool: ThreadPoolExecutor, gone: int) -> None:
    exchanges = connected(tmp_path, pool)
    waiting = [pool.submit(one.agree, proposal(1)) for member, one in enumerate(exchanges) if member != gone]
    exchanges[gone].close()  # as its process's end does
    for done in waiting:
        with pytest.raises(StepAborted):
            done.result(LIMIT_S)
    for one in exchanges:
        with pytest.raises(StepAborted):
            one.agree(proposal(2))


@pytest.mark.parametrize("member", [0, 1])
def test_an_abort_ends_who_waits_for_others(tmp_path: Path, pool: ThreadPoolExecutor, member: int) -> None:
    alone = SocketExchange(str(tmp_path), GROUP, member)
    begun = threading.Event()

    def connect() -> None:
        begun.set()
        alone.connect()

    waiting = pool.submit(connect)
    assert begun.wait(LIMIT_S)
    alone.abort()
    with pytest.raises(StepAborted):
        waiting.result(LIMIT_S)
    exchanges = connected(tmp_path, pool)
    waiting_too = pool.submit(exchanges[member].agree, proposal(1))
    exchanges[member].abort()
    with pytest.raises(StepAborted):
        waiting_too.result(LIMIT_S)
    for one in exchanges:
        one.close()


def test_ranks_at_different_steps_do_not_go_on(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    exchanges = connected(tmp_path, pool)
    steps = [pool.submit(one.agree, proposal(1 + (member == 2))) for member, one in enumerate(exchanges)]
    for done in steps:
        with pytest.raises(StepAborted):
            done.result(LIMIT_S)
