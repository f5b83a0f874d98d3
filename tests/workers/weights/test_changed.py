"""Changes of some numbers: the folder of an update has the mesh's weights with these, and nothing that the trainer does not know."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshlm.protocol.weight_transfer import TensorInfo, UpdateInfo, Wrong, checked_update
from meshlm.protocol.weights import WeightsVersion
from meshlm.runtime.model_files import received
from meshlm.runtime.model_files.digest import digest_of
from meshlm.workers.weights.transfer.changed import ChangedFile
from meshlm.workers.weights.transfer.source import TransferFailed

GIVEN = {
    "a.weight": torch.arange(12.0).reshape(3, 4),
    "b": torch.arange(5).to(torch.bfloat16),
    "c": torch.ones(2).double(),
}
A = TensorInfo("a.weight", "float32", (3, 4))


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WeightsVersion:
    """Weights in two files."""
    monkeypatch.setattr(received, "MEMORY", tmp_path)
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({name: one for name, one in GIVEN.items() if name != "b"}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": GIVEN["b"]}, folder / "model-00002-of-00002.safetensors")
    return WeightsVersion(3, "step", str(folder), digest_of(str(folder)))


def changed(base: WeightsVersion, folder: Path, number: int = 0) -> ChangedFile:
    return ChangedFile(folder, number, base, base.source)


def places(*at: int) -> torch.Tensor:
    return torch.tensor(at, dtype=torch.int32)


def test_what_is_sent_changes_and_all_else_is_the_meshs(base: WeightsVersion, tmp_path: Path) -> None:
    folder = tmp_path / "updates" / "one"
    first = changed(base, folder)
    first.change(A, places(0, 11), torch.tensor([-1.0, -2.0], dtype=torch.float64))
    first.change(TensorInfo("b", "bfloat16", (5,)), places(), torch.empty(0))
    first.finish()
    again = changed(base, folder, 1)  # another call of the same update
    again.change(A, places(5), torch.tensor([7.5]))
    again.change(TensorInfo("c", "float64", (2,)), places(1), torch.tensor([0.25], dtype=torch.float64))
    again.finish()
    found = load_file(folder / "received-00000.safetensors")
    expected = {name: one.clone() for name, one in GIVEN.items()}
    expected["a.weight"].view(-1)[torch.tensor([0, 11, 5])] = torch.tensor([-1.0, -2.0, 7.5])
    expected["c"][1] = 0.25
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (folder / "config.json").is_file()


@pytest.mark.parametrize(
    ("tensor", "at", "values", "said"),
    [
        (TensorInfo("z", "float32", (3, 4)), (0,), torch.ones(1), "have no z"),
        (TensorInfo("a.weight", "float32", (4, 3)), (0,), torch.ones(1), r"a.weight is \(3, 4\), not \(4, 3\)"),
        (
            TensorInfo("a.weight", "int32", (3, 4)),
            (0,),
            torch.ones(1, dtype=torch.int32),
            "a.weight is float32, not int32",
        ),
        (A, (12,), torch.ones(1), "none of its 12 numbers"),
        (A, (-1,), torch.ones(1), "none of its 12 numbers"),
    ],
)
def test_what_the_mesh_has_not(
    tensor: TensorInfo, at: tuple[int, ...], values: torch.Tensor, said: str, base: WeightsVersion, tmp_path: Path
) -> None:
    with pytest.raises(TransferFailed, match=said):
        changed(base, tmp_path / "updates" / "one").change(tensor, places(*at), values)


def test_weights_that_are_not_those_that_the_trainer_knows(base: WeightsVersion, tmp_path: Path) -> None:
    (Path(base.source) / "config.json").write_text('{"other": 1}')
    with pytest.raises(TransferFailed, match="others than when the mesh read them; send all tensors"):
        changed(base, tmp_path / "updates" / "one")
    with pytest.raises(TransferFailed, match="in its workers' memory alone"):
        changed(WeightsVersion(4, digest="x"), tmp_path / "updates" / "one")


@pytest.mark.parametrize(
    ("info", "backend", "said"),
    [
        ({"num_updates_list": [1]}, "ipc", "num_updates_list: changes are broadcast"),
        ({"num_updates_list": [1], "packed": True}, "gloo", "packed: changes are not packed"),
        ({"num_updates_list": [1, 1]}, "gloo", "it has 2 entries, and names has 1"),
        ({"num_updates_list": [13]}, "gloo", "a.weight has 12 numbers; 13 of them"),
    ],
)
def test_bodies_that_cannot_be(info: dict[str, object], backend: str, said: str) -> None:
    given = UpdateInfo(names=["a.weight"], dtype_names=["float32"], shapes=[[3, 4]], **info)  # type: ignore[arg-type]
    with pytest.raises(Wrong, match=said):
        checked_update(given, backend)
