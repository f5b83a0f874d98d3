"""What a worker receives from a trainer and keeps, and what it refuses."""

import base64
import ctypes
import os
import threading
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from waiting import free_port

from meshlm.protocol.weight_transfer import (
    Bucket,
    JoinInfo,
    TensorInfo,
    UpdateInfo,
    Wrong,
    checked_update,
    joined,
    packed,
    tensors_of,
)
from meshlm.runtime.model_files import received
from meshlm.runtime.model_files.digest import digest_of
from meshlm.workers.weights.transfer import cuda_handles
from meshlm.workers.weights.transfer.groups import Broadcasts, GlooGroup
from meshlm.workers.weights.transfer.kept import KeptFile
from meshlm.workers.weights.transfer.memory import HostMemory
from meshlm.workers.weights.transfer.nccl import KEY, NcclGroup, id_of
from meshlm.workers.weights.transfer.source import TransferFailed


def dumps(value: Any, protocol: int | None = None) -> bytes:
    """What a trainer does."""
    return bytes(ForkingPickler.dumps(value, protocol))


CPU = torch.device("cpu")
GIVEN = {
    "a": torch.arange(3, dtype=torch.uint8),
    "b": torch.randn(2, 3),
    "c": torch.randn(4).bfloat16(),
    "d": torch.empty(0),
    "e": torch.tensor(2.5, dtype=torch.float64),
}


def told(given: dict[str, torch.Tensor]) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in given.items()
    )


def flat(given: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([one.reshape(-1).view(torch.uint8) for one in given.values()])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of an update; the model lies in tmp_path / model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors.index.json").write_text("{}")
    monkeypatch.setattr(received, "MEMORY", tmp_path)
    return received.folder_of(tmp_path / "run") / "one"


def test_what_is_kept_reads_as_a_model(folder: Path, tmp_path: Path) -> None:
    file = KeptFile(folder, 0, told(GIVEN), str(tmp_path / "model"))
    file.take(list(told(GIVEN)[:2]), flat({name: GIVEN[name] for name in "ab"}))
    file.take(list(told(GIVEN)[2:]), flat({name: GIVEN[name] for name in "cde"}))
    assert not list(folder.glob("*.safetensors")), "it is not whole yet"
    file.finish()
    found = load_file(folder / "received-00000.safetensors")
    assert found.keys() == GIVEN.keys()
    assert all(torch.equal(found[name], GIVEN[name]) for name in GIVEN)
    assert sorted(one.name for one in folder.iterdir()) == ["config.json", "received-00000.safetensors"]
    digest = digest_of(str(folder))
    second = folder.parent / "two"
    again = KeptFile(second, 0, told(GIVEN), str(tmp_path / "model"))
    again.take(list(told(GIVEN)), flat(GIVEN))
    again.finish()
    assert digest_of(str(second)) != digest, "another update is another version"
    received.remove_others(folder.parent, str(second))
    assert [one.name for one in folder.parent.iterdir()] == ["two"]
    received.remove(tmp_path / "run")
    assert not folder.parent.exists()


def test_a_host_without_room_says_so(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = (TensorInfo("x", "float32", (1 << 40,)),)
    with pytest.raises(TransferFailed, match=r"4,398,046,511,1.. bytes of memory are needed"):
        KeptFile(folder, 0, large, str(tmp_path / "model"))

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(TransferFailed, match=r"No space left on device: .* bytes are needed in memory"):
            KeptFile(folder, 0, told(GIVEN), str(tmp_path / "model"))
    assert not list(folder.glob("*.part")), "nothing of it stays"
    with pytest.raises(TransferFailed, match="are one file"):
        KeptFile(folder, 0, told(GIVEN), str(tmp_path / "model.gguf"))
    folder.parent.chmod(0o755)
    with pytest.raises(TransferFailed, match="mode 0700"):
        KeptFile(folder, 0, told(GIVEN), str(tmp_path / "model"))


def test_memory_of_the_host(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "first").write_bytes(flat({name: GIVEN[name] for name in "abc"}).numpy().tobytes() + b"more")
    (tmp_path / "second").write_bytes(flat({name: GIVEN[name] for name in "de"}).numpy().tobytes())
    info = UpdateInfo(buckets=[Bucket(name="first", count=3), Bucket(name="second", count=2)])
    parts = list(HostMemory(CPU).receive(info, told(GIVEN)))
    assert [[one.name for one in own] for own, _ in parts] == [["a", "b", "c"], ["d", "e"]]
    assert torch.equal(torch.cat([data for _, data in parts]), flat(GIVEN))
    os.truncate(tmp_path / "second", 7)
    os.symlink(tmp_path / "first", tmp_path / "link")
    os.mkfifo(tmp_path / "fifo")
    for name, why in (
        ("second", "it has 7 bytes"),
        ("nothing", "No such file"),
        ("link", "symbolic"),
        ("fifo", "no file"),
    ):
        with pytest.raises(TransferFailed, match=f"{name}: .*{why}"):
            list(HostMemory(CPU).receive(UpdateInfo(buckets=[Bucket(name=name, count=5)]), told(GIVEN)))
    for name in ("../first", ".first", "", "a/b", "a\0"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"buckets": [{"name": name, "count": 1}]}, UpdateInfo)


class Group:
    """What the trainer sends, piece by piece."""

    device = CPU

    def __init__(self, pieces: list[torch.Tensor]) -> None:
        self._pieces = pieces

    def broadcast(self, data: torch.Tensor) -> None:
        sent = self._pieces.pop(0)
        assert (data.shape, data.dtype) == (sent.shape, sent.dtype)
        data.copy_(sent)

    def has_trainer(self) -> bool:
        return True

    def abort(self) -> None:
        raise AssertionError


@pytest.mark.parametrize("is_packed", [True, False])
def test_broadcasts_are_cut_as_the_trainer_cuts_them(is_packed: bool) -> None:
    names = ["ab", "c", "de"] if is_packed else list("abcde")
    sent = [flat({name: GIVEN[name] for name in part}) for part in names]
    if not is_packed:
        sent = [one.reshape(-1) for one in GIVEN.values()]
    group = Group(list(sent))
    if is_packed:  # a buffer is sent once it has more than 7 bytes
        assert [[one.name for one in own] for own in packed(told(GIVEN), 7)] == [["a", "b"], ["c"], ["d", "e"]]
    info = UpdateInfo(packed=is_packed, packed_buffer_size_bytes=7)
    parts = list(Broadcasts(group, JoinInfo()).receive(info, told(GIVEN)))
    assert torch.equal(torch.cat([data for _, data in parts]), flat(GIVEN))


def test_a_worker_that_is_to_join_another_trainer_waits_for_this_one_no_more() -> None:
    asked: list[bool] = []

    def is_wanted() -> bool:
        asked.append(True)
        return len(asked) < 4

    info = JoinInfo(master_address="127.0.0.1", master_port=free_port(), rank_offset=1, world_size=2)
    with pytest.raises(TransferFailed, match="another call of a trainer followed"):
        GlooGroup(info, 1, is_wanted)
    assert len(asked) == 4


def test_gloo_ranks_meet_and_one_that_waits_is_ended() -> None:
    address, port = "127.0.0.1", free_port()
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        address, port, 2, True, timedelta(seconds=60), wait_for_workers=False, use_libuv=False
    )
    info = JoinInfo(master_address=address, master_port=port, rank_offset=1, world_size=2)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(GlooGroup(info, 1, lambda: True)))
    thread.start()
    trainer = GlooGroup(info, 0, lambda: True)
    thread.join(60)
    worker: GlooGroup = found[0]
    data = torch.zeros(5)
    receives = threading.Thread(target=lambda: worker.broadcast(data))
    receives.start()
    trainer.broadcast(torch.arange(5.0))
    receives.join(60)
    assert data.tolist() == [0, 1, 2, 3, 4]
    failed: list[str] = []

    def waits() -> None:
        try:
            worker.broadcast(data)
        except TransferFailed as error:
            failed.append(str(error))

    waiting = threading.Thread(target=waits)
    waiting.start()
    worker.abort()  # from another thread
    waiting.join(60)
    assert failed == ["the weight update was ended"]
    assert worker.has_trainer()
    trainer.abort()
    del store, trainer._store
    assert not worker.has_trainer()


class ncclUniqueId(ctypes.Structure):  # the trainer's name
    _fields_ = (("internal", ctypes.c_byte * 128),)


def test_the_id_of_an_nccl_group_is_read_and_not_run() -> None:
    told_id = bytes(range(128))
    assert id_of(dumps(ncclUniqueId.from_buffer_copy(told_id))) == told_id
    for wrong in (b"", dumps(told_id), dumps(ctypes.c_int(3)), dumps(os.abort), dumps((ncclUniqueId, told_id))):
        with pytest.raises(TransferFailed, match="id of the NCCL group"):
            id_of(wrong)


@pytest.mark.gpu
def test_nccl_alone() -> None:
    """A group of one: the calls into the library are right."""
    from meshlm.workers.weights.transfer.nccl import _call, _Id

    made = _Id()
    _call("ncclGetUniqueId", ctypes.byref(made))
    port = free_port()
    store = torch.distributed.TCPStore("127.0.0.1", port, 1, True, wait_for_workers=False)  # type: ignore[attr-defined]
    store.set(KEY, dumps(ncclUniqueId.from_buffer_copy(bytes(made))))  # type: ignore[arg-type]
    info = JoinInfo(master_address="127.0.0.1", master_port=port, rank_offset=0, world_size=1)
    group = NcclGroup(info, 0, torch.device("cuda", 0), lambda: True)
    data = torch.arange(8, device="cuda", dtype=torch.bfloat16)
    group.broadcast(data)
    assert data.tolist() == list(range(8))
    group.abort()
    with pytest.raises(TransferFailed, match="ended"):
        group.broadcast(data)


def handle(tensor: TensorInfo, **other: Any) -> tuple[Any, ...]:
    """As torch's reduce_tensor writes it."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = {
        "cls": torch.Tensor, "size": torch.Size(tensor.shape), "stride": (3, 1), "offset": 0, "storage": torch.UntypedStorage,
        "dtype": torch.float32, "device": 3, "handle": b"h" * 64, "bytes": 24, "begin": 512, "grad": False, "counter": b"c" * 30,
        "counter_at": 0, "event": b"e" * 64, "waits": True,
    }  # fmt: skip
    return other.pop("function", rebuild_cuda_tensor), tuple((arguments | other).values())


def test_handles_of_cuda_are_read_and_not_run() -> None:
    (tensor,) = told({"b": GIVEN["b"]})

    def sent(value: Any) -> str:
        return base64.b64encode(dumps(value)).decode()

    found = cuda_handles.parsed(sent([{"GPU-1": handle(tensor)}]), (tensor,))
    assert found[0]["GPU-1"] == ((2, 3), (3, 1), 0, 24, 512, b"h" * 64, b"c" * 30, 0, b"e" * 64, True)
    wrong = [
        "!", sent(3), sent([]), sent([{}]), sent([{1: handle(tensor)}]), sent([{"GPU-1": handle(tensor, function=os.abort)}]),
        sent([{"GPU-1": handle(tensor, size=torch.Size((3, 3)))}]), sent([{"GPU-1": handle(tensor, dtype=torch.float16)}]),
        sent([{"GPU-1": handle(tensor, offset=-1)}]), sent([{"GPU-1": handle(tensor, handle="h")}]),
        sent([{"GPU-1": handle(tensor, cls=os.abort)}]), sent([{"GPU-1": handle(tensor, more=1)}]), sent([os.abort]),
    ]  # fmt: skip
    for text in wrong:
        with pytest.raises(TransferFailed, match=r"update_info\.ipc_handles_pickled"):
            cuda_handles.parsed(text, (tensor,))
    info = UpdateInfo(ipc_handles_pickled=sent([{"GPU-1": handle(tensor)}]))
    with pytest.raises(TransferFailed, match="need --device cuda"):
        list(HostMemory(CPU).receive(info, (tensor,)))


JOIN = JoinInfo(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=3)


@pytest.mark.parametrize(
    ("info", "backend", "field"),
    [
        (msgspec.structs.replace(JOIN, backend="gloo"), "nccl", "backend"),
        (msgspec.structs.replace(JOIN, backend="disk"), "nccl", "master_address"),
        (JOIN, "disk", "master_address"),
        (JOIN, "ipc", "master_address"),
        (msgspec.structs.replace(JOIN, world_size=None), "nccl", "world_size"),
        (msgspec.structs.replace(JOIN, rank_offset=0), "gloo", "rank_offset"),
        (msgspec.structs.replace(JOIN, world_size=2), "gloo", "world_size"),
    ],
)
def test_who_cannot_join(info: JoinInfo, backend: str, field: str) -> None:
    with pytest.raises(Wrong, match=f"^init_info.{field}: "):
        joined(info, backend, 2)


def test_who_can_join() -> None:
    assert joined(JOIN, "nccl", 2).backend == "nccl"
    assert joined(JoinInfo(), "ipc", 2).backend == "ipc"
    assert joined(JoinInfo(backend="disk"), "nccl", 2).backend == "disk"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"names": None}, "names"),
        ({"names": ["x", "x"], "dtype_names": ["int8"] * 2, "shapes": [[1]] * 2}, "names"),
        ({"dtype_names": ["complex64"]}, "dtype_names"),
        ({"dtype_names": []}, "dtype_names"),
        ({"shapes": [[1], [2]]}, "shapes"),
        ({"shapes": [[1 << 30, 1 << 30]]}, "shapes"),
        ({}, "buckets"),
        ({"buckets": [Bucket(name="x", count=2)]}, "buckets"),
        ({"ipc_handles": [1]}, "ipc_handles"),
    ],
)
def test_updates_that_name_what_cannot_come(more: dict[str, Any], field: str) -> None:
    info = UpdateInfo(**{"names": ["x"], "dtype_names": ["float32"], "shapes": [[1]], **more})
    with pytest.raises(Wrong, match=f"^update_info.{field}: "):
        checked_update(info, "ipc")


def test_tensors_of_an_update() -> None:
    info = UpdateInfo(names=["x", "y"], dtype_names=["torch.bfloat16", "int8"], shapes=[[2, 3], []])
    assert tensors_of(info) == (TensorInfo("x", "bfloat16", (2, 3)), TensorInfo("y", "int8", ()))
    assert [one.num_bytes for one in checked_update(info, "gloo")] == [12, 1]
