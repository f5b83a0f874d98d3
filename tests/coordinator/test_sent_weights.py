"""Tensors that a trainer sends: received by all, checked and taken at the end; the first that fails ends it for all."""

from coordinator_bench import F0, F1, S0, S1
from weights_bench import START, Mesh, actions, errors

from meshlm.protocol import operations as ops
from meshlm.protocol.operations import CheckWeights, EndTransfer, OperationDone, ReceiveWeights, UseWeights
from meshlm.protocol.weights import WeightsVersion

RECEIVED = "/memory"


def mesh_of_two() -> Mesh:
    mesh = Mesh(S0, S1)
    mesh.core.weights._received = RECEIVED
    return mesh


def receive(mesh: Mesh, number: int = 0) -> list[tuple[object, object]]:
    asked = mesh.ask(ops.StageTensors(b"{}"), f"t{number}")
    assert actions(asked) == [(rank, ReceiveWeights(f"{RECEIVED}/b", number, b"{}", START)) for rank in (S0, S1)]
    assert errors(mesh.answer(asked)) == [""]
    return []


def test_pieces_are_checked_and_taken_at_the_end() -> None:
    mesh = mesh_of_two()
    begun = mesh.ask(ops.BeginUpdate(), "b")
    assert actions(begun) == [(S0, EndTransfer()), (S1, EndTransfer())], "what a trainer before has left is forgotten"
    for number in range(3):
        receive(mesh, number)
    assert mesh.core.weights.current.number == 0
    checks = mesh.ask(ops.FinishUpdate("one"), "f")
    assert actions(checks) == [(rank, CheckWeights(f"{RECEIVED}/b")) for rank in (S0, S1)]
    uses = mesh.answer(checks)
    version = WeightsVersion(1, "one", f"{RECEIVED}/b", "of b")
    assert [one for one in actions(uses) if isinstance(one[1], UseWeights)] == [
        (rank, UseWeights(version)) for rank in (S0, S1)
    ]
    done = mesh.answer(uses)
    assert errors(done) == [""]
    assert (S0, EndTransfer(f"{RECEIVED}/b")) in actions(done), "those from before are forgotten"


def test_weights_that_one_cannot_have_change_nothing() -> None:
    mesh = mesh_of_two()
    mesh.ask(ops.BeginUpdate(), "b")
    receive(mesh)
    done = mesh.answer(mesh.ask(ops.FinishUpdate("one"), "f"), "1 tensor missing")
    assert errors(done) == ["1 tensor missing"]
    assert actions(done) == [(S0, EndTransfer()), (S1, EndTransfer())]
    assert mesh.core.weights.current.number == 0
    assert errors(mesh.ask(ops.BeginUpdate(), "c")) == [""], "the trainer's turn is over"


def test_the_first_that_fails_or_dies_ends_it_for_all() -> None:
    for dies in (False, True):
        mesh = mesh_of_two()
        mesh.ask(ops.BeginUpdate(), "b")
        asked = mesh.ask(ops.StageTensors(b"{}"), "t")
        (first, second) = (send for send in asked if isinstance(send.message, ops.Operation))
        assert isinstance(second.message, ops.Operation)
        told = mesh.lost(S1) if dies else mesh.says(S1, OperationDone(second.message.id, "no room"))
        assert errors(told) == [f"{S1} died before it answered" if dies else "no room"]
        assert (S0, EndTransfer()) in actions(told), "the others wait for what will not come"
        assert isinstance(first.message, ops.Operation)
        assert errors(mesh.says(S0, OperationDone(first.message.id, "ended"))) == []
        (error,) = errors(mesh.ask(ops.FinishUpdate("one"), "f"))
        assert "comes first" in error


def test_a_trainer_that_hangs_is_ended_by_another() -> None:
    mesh = mesh_of_two()
    mesh.ask(ops.BeginUpdate(), "b")
    mesh.ask(ops.StageTensors(b"{}"), "t")
    assert mesh.core.weights.updating == f"receiving weights of {RECEIVED}/b"
    (error,) = errors(mesh.ask(ops.BeginUpdate(), "c", F1))
    assert "receiving weights" in error
    told = mesh.ask(ops.FinishUpdate(drop=True), "d", F1)
    assert [(send.to, send.message.error) for send in told if isinstance(send.message, OperationDone)] == [
        (F0, "the weight update was dropped"), (F1, "")
    ]  # fmt: skip
    assert (S0, EndTransfer()) in actions(told)
    assert errors(mesh.ask(ops.BeginUpdate(), "c", F1)) == [""]


def test_an_update_is_of_a_folder_or_of_tensors() -> None:
    mesh = mesh_of_two()
    mesh.ask(ops.BeginUpdate(), "b")
    mesh.answer(mesh.ask(ops.StageWeights("/b"), "s"))
    (error,) = errors(mesh.ask(ops.StageTensors(b"{}"), "t"))
    assert "of a folder already" in error
