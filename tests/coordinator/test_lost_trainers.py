"""A trainer that calls no more leaves an update and a pause: both are over after a while, and another trainer may begin."""

import pytest
from coordinator_bench import F0, F1, S0, S1
from weights_bench import Mesh, actions, errors

from meshlm.protocol import operations as ops
from meshlm.protocol.operations import EndTransfer, JoinTrainer, Operation, OperationDone

LIMIT_S = 30.0


def mesh_of_two(*, all_pauses: bool = False) -> Mesh:
    mesh = Mesh(S0, S1)
    mesh.core.weights._received = "/memory"
    mesh.core.patience.limit_s, mesh.core.patience.all_pauses = LIMIT_S, all_pauses
    return mesh


def later(mesh: Mesh, seconds: float) -> list[tuple[object, ops.Action]]:
    found = actions(mesh.tick(seconds))
    return [(rank, action) for rank, action in found if not isinstance(action, ops.Pause)]


def test_a_turn_without_calls_is_over_after_a_while() -> None:
    mesh = mesh_of_two()
    mesh.ask(ops.BeginUpdate(), "b")
    mesh.tick(LIMIT_S)
    assert errors(mesh.answer(mesh.ask(ops.StageTensors(b"{}"), "t"))) == [""], "it is patient from each call on"
    assert later(mesh, LIMIT_S) == []
    assert later(mesh, 1.0) == [(S0, EndTransfer()), (S1, EndTransfer())], "what it has sent is forgotten"
    (error,) = errors(mesh.ask(ops.FinishUpdate("one"), "f"))
    assert "begun" in error
    assert "called nothing for 30 s (--trainer-timeout), and left its update" in error
    assert errors(mesh.ask(ops.BeginUpdate(), "c", F1)) == [""]
    assert mesh.core.weights.current.number == 0


def test_what_takes_long_is_not_given_up() -> None:
    mesh = mesh_of_two()
    mesh.ask(ops.BeginUpdate(), "b")
    asked = mesh.ask(ops.StageTensors(b"{}"), "t")
    assert later(mesh, 2 * LIMIT_S) == []
    assert errors(mesh.answer(asked)) == [""]


@pytest.mark.parametrize("is_paused_first", [True, False])
def test_its_pause_goes_with_it(is_paused_first: bool) -> None:
    mesh = mesh_of_two()
    steps: list[tuple[ops.Action, str]] = [(ops.Pause(), "p"), (ops.BeginUpdate(), "b")]
    for action, name in steps if is_paused_first else reversed(steps):
        mesh.answer(mesh.ask(action, name))
    assert mesh.core.frontends.paused
    mesh.tick(1.0)
    resumes = [one for one in later(mesh, LIMIT_S + 1) if isinstance(one[1], ops.Resume)]
    assert resumes == [(S0, ops.Resume()), (S1, ops.Resume())]
    assert not mesh.core.frontends.paused


def test_a_pause_behind_its_update_goes_with_it_too() -> None:
    mesh = mesh_of_two()
    mesh.answer(mesh.ask(ops.Pause(), "p"))
    mesh.ask(ops.BeginUpdate(), "b")
    mesh.tick(1.0)
    mesh.ask(ops.FinishUpdate("one"), "f")  # it dies before /resume
    assert [one for one in later(mesh, LIMIT_S + 1) if isinstance(one[1], ops.Resume)]


@pytest.mark.parametrize("all_pauses", [True, False])
def test_an_operators_pause_lasts(all_pauses: bool) -> None:
    """Unless trainers send weights to this mesh: then it is taken for one of theirs."""
    mesh = mesh_of_two(all_pauses=all_pauses)
    mesh.answer(mesh.ask(ops.Pause(), "p"))
    found = [one for one in later(mesh, LIMIT_S + 1) if isinstance(one[1], ops.Resume)]
    assert bool(found) == all_pauses
    assert mesh.core.frontends.paused != all_pauses


def join(mesh: Mesh, name: str) -> list[Operation]:
    sends = mesh.ask(JoinTrainer(b"{}"), name, F1)
    found = [send.message for send in sends if isinstance(send.message, Operation)]
    assert {one.id for one in found} <= {name}
    return found


def test_another_trainer_joins_only_if_that_one_is_gone() -> None:
    mesh = mesh_of_two()
    assert [one.action for one in join(mesh, "i")] == [JoinTrainer(b"{}")] * 2
    mesh.ask(ops.BeginUpdate(), "b")
    first, _ = join(mesh, "j")
    assert first.action == JoinTrainer(b"{}", if_gone=True)
    assert errors(mesh.says(S0, OperationDone(first.id, "it is there"))) == ["it is there"]
    assert mesh.core.weights.has_turn, "the first one's turn goes on"
    first, second = join(mesh, "k")
    mesh.says(S0, OperationDone(first.id))
    told = mesh.says(S1, OperationDone(second.id))
    assert [(send.to, send.message) for send in told if isinstance(send.message, OperationDone)] == [
        (F1, OperationDone(first.id))
    ]
    assert (S0, EndTransfer()) in actions(told)
    (error,) = errors(mesh.ask(ops.StageTensors(b"{}"), "t", F0))
    assert "its trainer was gone, and another one joined" in error
    assert errors(mesh.ask(ops.BeginUpdate(), "c", F1)) == [""]


def test_nobody_joins_while_tensors_come() -> None:
    mesh = mesh_of_two()
    mesh.ask(ops.BeginUpdate(), "b")
    mesh.ask(ops.StageTensors(b"{}"), "t")
    (error,) = errors(mesh.ask(JoinTrainer(b"{}"), "i", F1))
    assert error.startswith("another trainer sends weights: receiving weights of /memory/b")
