"""Workers of ranks on several hosts agree on each step over tcp: whatever is lost is said again, and no stranger has a word in it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq
from waiting import free_port

from meshlm.protocol.config import NetworkConfig
from meshlm.protocol.lockstep import StepAgreement, StepGroup
from meshlm.protocol.wire.ids import Epoch
from meshlm.runtime.mesh.keys import Keys
from meshlm.workers.distributed.lockstep import StepAborted
from meshlm.workers.distributed.tcp_exchange import TcpExchange

LIMIT_S = 20
KEYS, OTHERS = (Keys(*zmq.curve_keypair()) for _ in range(2))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def proposal(step: int, num_tokens: int = 1) -> StepAgreement:
    return StepAgreement(step, num_tokens, True, True)


def made(port: int, member: int, epoch: int = 7, keys: Keys = KEYS) -> TcpExchange:
    return TcpExchange(("127.0.0.1", port), StepGroup(Epoch(epoch), 3), member, keys, NetworkConfig())


def connected(pool: ThreadPoolExecutor, port: int, epoch: int = 7) -> list[TcpExchange]:
    exchanges = [made(port, member, epoch) for member in range(3)]
    for done in [pool.submit(one.connect) for one in exchanges]:
        done.result(LIMIT_S)
    return exchanges


def agree(pool: ThreadPoolExecutor, exchanges: list[TcpExchange], step: int) -> set[StepAgreement]:
    each = [pool.submit(one.agree, proposal(step, step * number)) for number, one in enumerate(exchanges)]
    return {done.result(LIMIT_S) for done in each}


def test_all_get_the_same_in_one_epoch_after_the_other(pool: ThreadPoolExecutor) -> None:
    """At the same address, also where a worker has not left the epoch before."""
    port, late = free_port(), list[TcpExchange]()
    for epoch in (7, 8):
        exchanges = connected(pool, port, epoch)
        for step in range(1, 30):
            assert agree(pool, exchanges, step) == {proposal(step, 2 * step)}
        late.append(exchanges.pop())
        for one in exchanges:
            one.close()
    for one in late:
        one.close()


def test_one_whose_connection_breaks_leaves_the_epoch(pool: ThreadPoolExecutor) -> None:
    exchanges = connected(pool, free_port())
    waiting = pool.submit(exchanges[1].agree, proposal(1))
    exchanges[0].close()
    with pytest.raises(StepAborted, match="connection"):
        waiting.result(LIMIT_S)
    for one in exchanges:
        one.close()


@pytest.mark.parametrize("member", [0, 1])
def test_an_abort_ends_who_waits_for_others(pool: ThreadPoolExecutor, member: int) -> None:
    alone = made(free_port(), member)
    waiting = pool.submit(alone.connect)
    alone.abort()
    with pytest.raises(StepAborted):
        waiting.result(LIMIT_S)
    exchanges = connected(pool, free_port())
    called: list[int] = []
    exchanges[member].when_aborted(lambda: called.append(member))
    waiting_too = pool.submit(exchanges[member].agree, proposal(1))
    exchanges[member].abort()
    with pytest.raises(StepAborted):
        waiting_too.result(LIMIT_S)
    assert called == [member]
    for one in exchanges:
        one.close()


def test_nobody_without_the_key_is_heard(pool: ThreadPoolExecutor) -> None:
    port = free_port()
    stranger = made(port, 2, keys=OTHERS)
    others = [made(port, member) for member in (0, 1)]
    waiting = [pool.submit(one.connect) for one in (*others, stranger)]
    friend = made(port, 2)
    with pytest.raises(TimeoutError):
        waiting[0].result(1.0)
    stranger.abort()
    with pytest.raises(StepAborted):
        waiting[2].result(LIMIT_S)
    friend.connect()
    for done in waiting[:2]:
        done.result(LIMIT_S)
    for one in (*others, friend):
        one.close()


def test_ranks_at_different_steps_do_not_go_on(pool: ThreadPoolExecutor) -> None:
    exchanges = connected(pool, free_port())
    steps = [pool.submit(one.agree, proposal(1 + (number == 2))) for number, one in enumerate(exchanges)]
    with pytest.raises(StepAborted, match="at step 1 and at step 2"):
        steps[0].result(LIMIT_S)
    for one in exchanges:
        one.abort()
    for done in steps[1:]:
        with pytest.raises(StepAborted):
            done.result(LIMIT_S)
    for one in exchanges:
        one.close()
