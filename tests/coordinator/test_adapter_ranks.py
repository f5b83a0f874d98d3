"""Requests for an adapter go to ranks that had it of late, unless these have much more to do."""

from meshlm.coordinator.adapter_ranks import AdapterRanks
from meshlm.coordinator.ledger import Rank
from meshlm.coordinator.routing import Policy, Router
from meshlm.protocol.adapters import Adapter
from meshlm.protocol.edges.admit import EngineRequest, Load
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Handle, Identity, Incarnation, RequestId, Role

LIFE = Incarnation(1)


def work(number: int, name: str, num_tokens: int = 40) -> EngineRequest:
    extras = (Adapter(name, f"/{name}", name.encode() * 32),) if name else ()
    prompt = pack_i32([number + at for at in range(num_tokens)])
    params = SamplingParams(max_tokens=10)
    return EngineRequest(RequestId(f"r{number}"), Handle(number), prompt, params, extras=extras)


def router(num_ranks: int, policy: Policy = "cache-aware") -> Router:
    found = Router(policy, prefix_caching=True, adapters_kept=2)
    for number in range(num_ranks):
        rank = Rank(Identity(Role.SCHEDULER, number), LIFE)
        found.add(rank)
        found.load(rank, Load(0, 0, 100_000, 100_000, 0))
    return found


def send(where: Router, request: EngineRequest) -> int:
    choice = where.choose(request)
    assert choice is not None
    where.dispatch(choice, request, LIFE, False)
    where.check()
    return choice.rank.number


def test_a_rank_that_had_it_of_late_is_preferred() -> None:
    where = router(4)
    first = {name: send(where, work(nth * 1000, name)) for nth, name in enumerate("abcd")}
    assert sorted(first.values()) == [0, 1, 2, 3], "each where there is least to do"
    for nth in range(5, 13):
        assert send(where, work(nth * 1000, "abcd"[nth % 4])) == first["abcd"[nth % 4]]


def test_not_at_any_price() -> None:
    where = router(2)
    first = send(where, work(0, "a"))
    ranks = [send(where, work(1000 * nth, "a", num_tokens=400)) for nth in range(1, 12)]
    assert ranks[0] == first
    assert 1 - first in ranks, "it had so much to do that reading the adapter again is less"


def test_one_that_lost_its_workers_has_none() -> None:
    where = router(2)
    first = send(where, work(0, "a"))
    lost = where.ranks[Identity(Role.SCHEDULER, first)]
    where.load(lost, Load(0, 0, 100_000, 100_000, 0, serving=False))
    assert send(where, work(1000, "a")) != first
    where.remove(lost.identity)
    assert send(where, work(2000, "a")) != first


def test_as_many_are_known_as_workers_keep() -> None:
    known = AdapterRanks(kept=2)
    for key in (b"a", b"b", b"a", b"c"):
        known.used(3, key)
    assert known.preferred([], b"b") == []
    assert known.preferred([(100, 0b1001)], b"a") == [(612, 0b1000), (100, 0b0001)]
    assert known.preferred([(100, 0b0001)], b"c") == [(512, 0b1000), (100, 0b0001)]
