"""Requests wait for the life of the detokenizer that they name, and for no other."""

from meshlm.protocol.edges.admit import Assign, EngineRequest
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Handle, Identity, Incarnation, RequestId, Role
from meshlm.scheduler_proc.detokenizers import Detokenizers, Reach

ONE, OTHER = Identity(Role.DETOKENIZER, 0), Identity(Role.DETOKENIZER, 1)


def assign(name: str, life: int, detokenizer: Identity = ONE) -> Assign:
    work = EngineRequest(RequestId(name), Handle(1), bytes(4), SamplingParams())
    return Assign(work, detokenizer, Incarnation(life))


def test_a_request_waits_for_its_detokenizer() -> None:
    known = Detokenizers()
    early = assign("early", 2)
    assert known.reach_of(early) is Reach.NOT_YET
    assert known.up(ONE, Incarnation(2)) == [early]
    assert known.reach_of(early) is Reach.HERE
    assert known.up(OTHER, Incarnation(1)) == []


def test_a_life_that_is_over_is_not_waited_for() -> None:
    known = Detokenizers()
    known.up(ONE, Incarnation(3))
    assert known.reach_of(assign("late", 2)) is Reach.GONE
    known.lost(ONE, Incarnation(2))
    assert known.reach_of(assign("now", 3)) is Reach.HERE, "the end of an earlier life says nothing of this one"
    known.lost(ONE, Incarnation(3))
    assert known.reach_of(assign("next", 4)) is Reach.NOT_YET


def test_what_waits_can_be_taken_away() -> None:
    known = Detokenizers()
    a, b, c = (assign(name, 1) for name in "abc")
    for one in (a, b, c):
        known.reach_of(one)
    assert known.take_early((RequestId("b"), RequestId("unknown"))) == [b]
    assert known.take_early() == [a, c]
    assert known.up(ONE, Incarnation(1)) == []


def test_there_is_one_object_of_each_identity() -> None:
    known = Detokenizers()
    first = known.one_object(Identity(Role.DETOKENIZER, 0))
    assert known.one_object(Identity(Role.DETOKENIZER, 0)) is first
