"""Ranks that take a version one after another: who has a turn, where requests go, and what deaths leave of it."""

from coordinator_bench import D0, F0, S0, S1, S2
from hypothesis import given, settings
from hypothesis import strategies as st
from rolling_world import RANKS, World

from meshlm.coordinator.rolling import Turn
from meshlm.protocol.operations import CheckWeights, Operation, OperationId, Sleep, UseWeights
from meshlm.protocol.wire.ids import Identity


def asked(world: World) -> dict[Identity, list[type]]:
    return {identity: [type(one.action) for one in rank.asked] for identity, rank in world.ranks.items() if rank.asked}


def run_out(world: World) -> None:
    """All processes are there and do what they are asked for, until nothing is left."""
    for _ in range(60):
        world.start_detokenizer()
        for identity in RANKS:
            world.start_scheduler(identity)
            if not world.ranks[identity].is_up:
                world.start_worker(identity)
            while world.ranks[identity].asked:
                world.answer(identity)
        world.give_back()
        for identity in RANKS:
            world.step(identity)
            for _ in range(len(world.ranks[identity].started)):
                world.finish(identity)
        world.tick(4.0)
        if not world.open and not world.core.weights.updating:
            break


def test_one_rank_checks_and_each_takes_them_when_its_requests_have_ended() -> None:
    world = World()
    for _ in range(3):
        world.new()
    for identity in RANKS:
        world.step(identity)
    assert [len(world.ranks[one].started) for one in RANKS] == [1, 1, 1]
    world.update("wait")
    assert asked(world) == {}, "what runs there ends first"
    assert "scheduler/0: its requests end" in world.core.weights.updating
    world.new()
    assert "r4" not in world.ranks[S0].requests, "it gets no new ones"
    world.finish(S0)
    assert asked(world) == {S0: [CheckWeights]}
    world.answer(S0)
    assert asked(world) == {S0: [UseWeights]}
    assert [rank.serving for rank in world.core.ranks.values()] == [True] * 3
    world.answer(S0)
    assert world.core.turns.at == S1
    assert world.core.weights.current.label == "v1"
    world.new()
    world.step(S0)
    assert world.open["r5"].labels == ["v1"], "the one that has them takes requests again"
    run_out(world)
    assert set(world.over["r2"]) == {"0"}
    assert world.errors == [""]
    assert not world.core.weights.updating
    assert all(rank.version.label == "v1" for rank in world.ranks.values())


def test_a_request_stays_with_its_version_and_goes_back_to_the_rank_that_leaves_it() -> None:
    world = World()
    world.new()
    world.step(S0)
    world.update("wait")
    assert asked(world) == {}, "the others have nothing to do, but it is not their turn"
    world.finish(S0)
    world.new()
    world.step(S1)
    world.answer(S0)
    world.answer(S0)
    assert world.core.turns.at == S1
    assert world.core.turns.turn is Turn.DRAINING
    world.kill_scheduler(S1)
    assert world.ranks[S2].requests, "the other rank that has the old weights"
    world.start_scheduler(S1)
    while world.ranks[S1].asked:
        world.answer(S1)
    assert world.core.turns.at == S2
    world.step(S2)
    world.kill_scheduler(S2)
    assert "r2" in world.core.held, "no rank has the old ones just now"
    world.start_scheduler(S2)
    assert "r2" in world.ranks[S2].requests, "though it is this rank's turn"
    run_out(world)
    assert set(world.over["r2"]) == {"0"}


def test_where_nobody_has_the_old_weights_any_more_the_request_is_refused_and_not_mixed() -> None:
    world = World()
    for mode, is_refused in (("keep", False), ("wait", True)):
        for _ in range(3):
            world.new()
        names = list(world.open)
        for identity in RANKS:
            world.step(identity)
        world.update("keep" if mode == "keep" else "wait")
        for name in names[:2]:
            (there,) = (one for one in RANKS if name in world.ranks[one].requests)
            if mode == "wait":
                world.finish(there)
        while any(rank.asked for rank in world.ranks.values()):
            for identity in RANKS:
                world.answer(identity)
        if is_refused:
            assert world.core.turns.turn is Turn.DRAINING
            last = world.core.turns.at
            assert last is not None
            world.kill_scheduler(last, with_worker=True)
            world.start_scheduler(last)
        run_out(world)
        assert (names[2] in world.refused) is is_refused
    (text,) = world.refused.values()
    assert "no rank has the weights" in text


def test_a_rank_that_cannot_have_them_sends_all_back_under_the_old_name() -> None:
    world = World()
    world.update("wait")
    world.answer(S0)
    world.answer(S0)
    assert world.core.turns.at == S1
    world.answer(S1, fails=True)
    assert world.errors == ["its files are gone"]
    assert world.core.weights.current.label == "0"
    world.new()
    run_out(world)
    assert not world.core.weights.updating
    assert {rank.version.number for rank in world.ranks.values()} == {2}


def test_what_is_checked_in_vain_changes_nothing() -> None:
    world = World()
    world.update("wait")
    world.update("wait")
    assert "another update of the weights is under way: checking weights of /v1" in world.errors[0]
    sleep = Operation(OperationId("s"), Sleep())
    world.says(F0, sleep)
    assert "the weights are being updated" in world.errors[1]
    world.answer(S0, fails=True)
    assert world.errors[2:] == ["no such folder"]
    assert not world.core.weights.updating
    assert all(rank.open for rank in world.core.ranks.values())


def test_the_requests_of_a_detokenizer_that_died_are_waited_for() -> None:
    world = World()
    world.new()
    world.step(S0)
    world.update("wait")
    world.kill_detokenizer()
    world.tick()
    assert asked(world) == {}, "the rank has nothing to do, but its request will come again"
    world.start_detokenizer()
    assert world.ranks[S1].requests or world.ranks[S2].requests
    run_out(world)
    assert set(world.over["r1"]) == {"0"}
    assert D0 in world.core.members


ACTIONS = ["new", "new", "step", "step", "step", "finish", "answer", "answer", "answer", "give back", "tick", "update"]
DEATHS = ["scheduler", "worker", "coordinator", "detokenizer", "start", "start"]
HARM = ["fail", "both"]


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_history_ends_with_one_version_and_no_answer_mixes_two(data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(["wait", "wait", "keep", "abort"]))
    harm = data.draw(st.booleans())
    world = World()
    for _ in range(data.draw(st.integers(5, 60))):
        what = data.draw(st.sampled_from(ACTIONS + DEATHS + (HARM if harm else [])))
        identity = data.draw(st.sampled_from(RANKS))
        match what:
            case "new" if world.detokenizer:
                world.new()
            case "step":
                world.step(identity)
            case "finish":
                world.finish(identity)
            case "answer":
                world.answer(identity)
            case "fail":
                world.answer(identity, fails=True)
            case "give back":
                world.give_back()
            case "tick":
                world.tick()
            case "update":
                world.update(mode)  # type: ignore[arg-type]
            case "scheduler" | "both":
                world.kill_scheduler(identity, with_worker=what == "both")
            case "worker":
                world.kill_worker(identity)
            case "coordinator":
                world.kill_coordinator()
            case "detokenizer":
                world.kill_detokenizer()
            case "start":
                world.start_detokenizer()
                world.start_scheduler(identity)
                world.start_worker(identity)
    run_out(world)
    assert not world.core.weights.updating
    assert all(rank.version.is_same(world.core.weights.current) for rank in world.ranks.values())
    assert not world.open, "each request has its end"
    assert mode == "keep" or all(len(set(labels)) <= 1 for labels in world.over.values())
    if not harm:
        assert not world.refused
