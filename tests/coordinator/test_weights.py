"""The version of the weights: which the mesh is to have, who may change it, and which ranks get requests."""

import msgspec
from coordinator_bench import F0, F1, LIFE, S0, S1, admit, assigned, stats
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_bench import FIRST, START, Mesh, actions, errors

from meshlm.coordinator.weights import ASK_AGAIN_S
from meshlm.protocol import operations as ops
from meshlm.protocol.operations import CheckWeights, Operation, UseWeights
from meshlm.runtime.process.events import Send


def test_all_check_before_any_takes_them() -> None:
    mesh = Mesh(S0, S1)
    asked = mesh.ask(ops.UpdateWeights("/b", "one"))
    assert actions(asked) == [(S0, CheckWeights("/b")), (S1, CheckWeights("/b"))]
    assert assigned(mesh, admit("a")) is not None, "the old ones serve"
    taken = mesh.answer(asked)
    assert [one for one in actions(taken) if isinstance(one[1], UseWeights)] == [
        (S0, UseWeights(FIRST)),
        (S1, UseWeights(FIRST)),
    ]
    assert assigned(mesh, admit("b", handle=2)) is None, "no rank has them yet"
    assert mesh.core.weights.updating
    done = mesh.answer([send for send in taken if isinstance(send.message, Operation)])
    assert errors([send for send in done if send.to == F0]) == [""]
    assert mesh.core.weights.current == FIRST
    assert "b" in mesh.core.owner
    assert stats(mesh.tick())[0].weights == FIRST


def test_what_one_cannot_have_nobody_takes() -> None:
    mesh = Mesh(S0, S1)
    asked = mesh.ask(ops.UpdateWeights("/b"))
    mesh.answer(asked[:1])
    assert errors(mesh.answer(asked[1:], "tensors are missing")) == ["tensors are missing"]
    assert mesh.core.weights.current == START
    asked = mesh.ask(ops.UpdateWeights("/b"), "v")
    mesh.answer(asked[:1])
    (error,) = errors(mesh.answer(asked[1:], digest="of other files"))
    assert "hosts see different files" in error


def test_what_cannot_be_taken_all_the_same_is_undone_everywhere() -> None:
    mesh = Mesh(S0, S1)
    taken = mesh.answer(mesh.ask(ops.UpdateWeights("/b", "one")))
    uses = [send for send in taken if isinstance(send.message, Operation)]
    mesh.answer(uses[:1])
    assert errors(mesh.answer(uses[1:], "its files are no longer those"))[-1:] == ["its files are no longer those"]
    back = msgspec.structs.replace(START, number=2)
    assert mesh.core.weights.current == back
    asked = mesh.tick(ASK_AGAIN_S + 1)
    assert dict(actions(asked)) == {S0: UseWeights(back), S1: UseWeights(back)}
    mesh.answer(asked)
    assert assigned(mesh, admit("a")) is not None


def test_a_rank_of_another_version_gets_no_request_until_it_has_caught_up() -> None:
    mesh = Mesh(S0, S1)
    mesh.answer([send for send in mesh.answer(mesh.ask(ops.UpdateWeights("/b", "one"))) if send.to != F0])
    mesh.lost(S1)
    mesh.join(S1, 2)
    mesh.has[S1] = START
    asked = mesh.report(S1, 2)
    assert actions(asked) == [(S1, UseWeights(FIRST))]
    assert {assigned(mesh, admit(f"r{number}", handle=number)) for number in range(4)} == {S0}
    assert actions(mesh.tick()) == [], "it was asked"
    assert actions(mesh.tick(ASK_AGAIN_S)) == [(S1, UseWeights(FIRST))]
    mesh.has[S1] = FIRST
    mesh.report(S1, 2)
    assert assigned(mesh, admit("more", handle=9)) == S1


def test_what_a_call_changed_at_one_rank_is_the_mesh_s_and_the_other_stays_out() -> None:
    mesh = Mesh(S0, S1)
    mesh.has[S0] = changed = START.after_call("call")
    assert actions(mesh.report(S0)) == []
    assert mesh.core.weights.current == changed
    assert actions(mesh.report(S1)) == [(S1, UseWeights(changed))]
    mesh.report(S1, serving=False, behind="only in memory")
    assert {assigned(mesh, admit(f"r{number}", handle=number)) for number in range(3)} == {S0}
    (error,) = errors(mesh.ask(ops.CallWorkers("scale", b"{}")))
    assert "scheduler/1 has other weights than the mesh; only in memory" in error
    mesh.lost(S0)
    assert "only in memory" in stats(mesh.tick())[0].reason


def test_trainers_take_turns() -> None:
    mesh = Mesh(S0)
    early: tuple[ops.Action, ...] = (ops.StageWeights("/b"), ops.FinishUpdate())
    for action in early:
        (error,) = errors(mesh.ask(action))
        assert "comes first" in error
    assert errors(mesh.ask(ops.BeginUpdate())) == [""]
    late: tuple[ops.Action, ...] = (ops.BeginUpdate(), ops.UpdateWeights("/b"))
    for number, action in enumerate(late):
        (error,) = errors(mesh.ask(action, f"x{number}", F1))
        assert "another trainer updates the weights since 0 s" in error
    asked = mesh.ask(ops.StageWeights("/b"), "s")
    assert mesh.ask(ops.StageWeights("/b"), "s") == [], "it is under way"
    (error,) = errors(mesh.ask(ops.NameWeights("n"), "n", F1))
    assert "another update of the weights is under way: checking weights of /b" in error
    assert errors(mesh.answer(asked)) == [""]
    assert mesh.core.weights.current == START, "staged"
    uses = mesh.ask(ops.FinishUpdate("one"), "f")
    assert actions(uses) == [(S0, UseWeights(FIRST))]
    assert errors(mesh.answer(uses)) == [""]
    assert errors(mesh.ask(ops.NameWeights("other"), "o")) == [""]
    renamed = msgspec.structs.replace(FIRST, name="other")
    assert actions(mesh.tick()) == [(S0, UseWeights(renamed))]
    assert mesh.core.ranks[S0].serving, "they are the same"
    mesh.ask(ops.BeginUpdate(), "b")
    assert errors(mesh.ask(ops.FinishUpdate(drop=True), "d", F1)) == [""], "anybody may end it"
    assert errors(mesh.ask(ops.BeginUpdate(), "c", F1)) == [""]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["update", "answer", "fail", "die", "call", "tick"]), st.integers(0, 1))))
def test_any_history_ends_with_one_version(history: list[tuple[str, int]]) -> None:
    """Requests go to ranks of the mesh's version alone; when all answer, all have it."""
    mesh, ranks, lives = Mesh(S0, S1), (S0, S1), {S0: LIFE, S1: LIFE}
    asked: list[Send] = []
    number = 0
    for what, which in history:
        rank, number = ranks[which], number + 1
        before = [send for send in asked if send.to == rank]
        if what == "update":
            asked += mesh.ask(ops.UpdateWeights(f"/{number}"), f"u{number}")
        elif what in ("answer", "fail") and before:
            asked.remove(before[0])
            asked += mesh.answer(before[:1], "no" if what == "fail" else "", "digest")
        elif what == "die":
            asked = [send for send in asked if send.to != rank]
            asked += mesh.lost(rank, lives[rank])
            lives[rank] = type(LIFE)(lives[rank] + 1)
            mesh.has[rank] = START
            asked += mesh.join(rank, lives[rank])
        elif what == "call" and not mesh.core.weights.not_now(ops.CallWorkers("f", b"{}"), mesh.core.ranks.values()):
            mesh.has[rank] = mesh.has[rank].after_call(str(number))
        asked += mesh.report(rank, lives[rank]) + mesh.tick()
        asked = [send for send in asked if isinstance(send.message, Operation)]
        current = mesh.core.weights.current
        for one in mesh.core.ranks.values():
            assert not one.serving or (one.load is not None and current.is_same(one.load.weights or START))
    for _ in range(40):
        if not asked and all(has.is_same(mesh.core.weights.current) for has in mesh.has.values()):
            break
        again: list[Send] = []
        for send in asked:
            again += mesh.answer([send], digest="digest")
        asked = [send for send in [*again, *mesh.tick(ASK_AGAIN_S + 1)] if isinstance(send.message, Operation)]
    assert all(has.is_same(mesh.core.weights.current) for has in mesh.has.values())
    assert not mesh.core.weights.updating
