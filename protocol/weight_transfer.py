"""How a trainer sends weights: the bodies of vLLM's routes for it, checked. They go through the mesh as JSON, as the trainer sent them.

`nccl` and `gloo`: the trainer is rank 0 of a group that all workers join, and broadcasts. `ipc`: it writes into memory of the same
host, which is told by name. `disk`: a folder, which needs none of this.
"""

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

BACKENDS = ("disk", "gloo", "ipc", "nccl")
SPARSE = "sparse_nccl"  # vLLM's name of nccl where changes are sent; here nccl takes both
GROUPS = ("gloo", "nccl")  # those for which workers join the trainer
BUFFER_BYTES = 1 << 30  # of a packed buffer, as vLLM's trainers have it
MAX_TENSORS = 1_000_000
MAX_DIMS = 8
MOST_PLACES = 2**31  # that int32 can name
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""The types that tensors may have, by torch's names, and the bytes of one number."""
OF_FILES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""What safetensors calls them."""

Size = Annotated[int, Meta(ge=0, le=1 << 48)]
Text = Annotated[str, Meta(max_length=4096)]


class Wrong(Exception):
    """A field of a body that cannot be honoured: its name, and why."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


class JoinInfo(Struct, frozen=True, kw_only=True):
    """`init_info` of POST /init_weight_transfer_engine. Worker n is rank `rank_offset` + n of the group of `world_size`."""

    backend: Annotated[str, Meta(max_length=64)] = ""  # that of --weight-transfer-config
    master_address: Text | None = None
    master_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    rank_offset: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    world_size: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    packed: bool | None = None
    packed_buffer_size_bytes: Annotated[int, Meta(ge=1, le=1 << 40)] | None = None
    packed_num_buffers: Annotated[int, Meta(ge=1, le=64)] | None = None  # of the trainer's; here two alternate


class Bucket(Struct, frozen=True, kw_only=True):
    """A file below /dev/shm that holds tensors one after the other. `count` of `names` are in it."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}$")]
    count: Annotated[int, Meta(ge=1)]


class UpdateInfo(Struct, frozen=True, kw_only=True):
    """`update_info` of POST /update_weights: a folder, or tensors by the checkpoint's names, in the order in which they come."""

    path: Text = ""
    names: Annotated[list[Annotated[str, Meta(min_length=1, max_length=512)]], Meta(max_length=MAX_TENSORS)] | None = (
        None
    )
    dtype_names: Annotated[list[str], Meta(max_length=MAX_TENSORS)] | None = None
    shapes: Annotated[list[Annotated[list[Size], Meta(max_length=MAX_DIMS)]], Meta(max_length=MAX_TENSORS)] | None = (
        None
    )
    packed: bool | None = None  # several tensors in each broadcast; None: as the init said
    packed_buffer_size_bytes: Annotated[int, Meta(ge=1, le=1 << 40)] | None = None
    packed_num_buffers: Annotated[int, Meta(ge=1, le=64)] | None = None
    num_updates_list: Annotated[list[Size], Meta(max_length=MAX_TENSORS)] | None = (
        None  # changes: so many numbers of each
    )
    buckets: Annotated[list[Bucket], Meta(max_length=100_000)] | None = None  # of ipc
    ipc_handles: Any = None  # refused: JSON has no bytes
    ipc_handles_pickled: Annotated[str, Meta(max_length=64 << 20)] | None = None  # of ipc, as vLLM's trainers send them


class TensorInfo(Struct, frozen=True):
    """One tensor that is to come."""

    name: str
    dtype: str  # torch's name
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class TransferConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """--weight-transfer-config."""

    backend: Literal["disk", "gloo", "ipc", "nccl", "sparse_nccl"]


def joined(info: JoinInfo, backend: str, num_workers: int) -> JoinInfo:
    """The same with the mesh's backend. Wrong, where nobody can join so."""
    given = [name for name in info.__struct_fields__ if name != "backend" and getattr(info, name) is not None]
    if info.backend not in ("", backend, "disk"):
        raise Wrong("init_info.backend", f"--weight-transfer-config says {backend!r}")
    if info.backend == "disk" or backend == "disk":
        if given:
            raise Wrong(f"init_info.{given[0]}", "weights are read from a folder here; the backend is 'disk'")
        return msgspec.structs.replace(info, backend="disk")
    if backend == "ipc":
        other = next((name for name in given if not name.startswith("packed")), "")
        if other:
            raise Wrong(f"init_info.{other}", "memory of this host is told with each update; nobody is joined for it")
        return msgspec.structs.replace(info, backend=backend)
    missing = next(
        (name for name in ("master_address", "master_port", "rank_offset", "world_size") if name not in given), ""
    )
    if missing:
        raise Wrong(f"init_info.{missing}", f"it is missing; workers join the trainer's group with it ({backend})")
    assert info.rank_offset is not None
    assert info.world_size is not None
    if info.rank_offset < 1:
        raise Wrong("init_info.rank_offset", "it must be 1 or more: rank 0 is the trainer's")
    if info.rank_offset + num_workers > info.world_size:
        text = f"{info.world_size} ranks from {info.rank_offset} on have no place for the {num_workers} workers here"
        raise Wrong("init_info.world_size", text)
    return msgspec.structs.replace(info, backend=backend)


def tensors_of(info: UpdateInfo) -> tuple[TensorInfo, ...]:
    """What is to come, in order. Wrong names the field."""
    names, dtypes, shapes = info.names or [], info.dtype_names or [], info.shapes or []
    if not names:
        raise Wrong("update_info.names", "it is missing")
    for field, values in (("dtype_names", dtypes), ("shapes", shapes)):
        if len(values) != len(names):
            raise Wrong(f"update_info.{field}", f"it has {len(values)} entries, and names has {len(names)}")
    found = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        dtype = dtype.removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise Wrong("update_info.dtype_names", f"{dtype!r} of {name} is none of {', '.join(ITEM_BYTES)}")
        found.append(TensorInfo(name, dtype, tuple(shape)))
        if found[-1].num_bytes > 1 << 48:
            raise Wrong("update_info.shapes", f"{name} is too large")
    if len(set(names)) < len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise Wrong("update_info.names", f"{twice} is there twice")
    return tuple(found)


def packed(tensors: tuple[TensorInfo, ...], buffer_bytes: int) -> list[list[TensorInfo]]:
    """The tensors of each broadcast: a buffer is sent as soon as it has more than so many bytes, as vLLM's trainers do it."""
    found: list[list[TensorInfo]] = []
    size = buffer_bytes + 1
    for tensor in tensors:
        if size > buffer_bytes:
            found.append([])
            size = 0
        found[-1].append(tensor)
        size += tensor.num_bytes
    return found


def _check_changes(info: UpdateInfo, counts: list[int], tensors: tuple[TensorInfo, ...], backend: str) -> None:
    field = "update_info.num_updates_list"
    if backend not in GROUPS:
        raise Wrong(
            field, f"changes are broadcast ({', '.join(GROUPS)}), and --weight-transfer-config says {backend!r}"
        )
    if info.packed:
        raise Wrong(
            "update_info.packed", "changes are not packed: of each tensor come its places, and the numbers there"
        )
    if len(counts) != len(tensors):
        raise Wrong(field, f"it has {len(counts)} entries, and names has {len(tensors)}")
    for tensor, count in zip(tensors, counts, strict=True):
        if count > math.prod(tensor.shape) or math.prod(tensor.shape) > MOST_PLACES:
            raise Wrong(
                field, f"{tensor.name} has {math.prod(tensor.shape):,} numbers; {count:,} of them cannot change"
            )


def checked_update(info: UpdateInfo, backend: str) -> tuple[TensorInfo, ...]:
    """The tensors that this update sends by this backend. Wrong, before anybody waits for one."""
    of_ipc = [name for name in ("buckets", "ipc_handles_pickled") if getattr(info, name) is not None]
    if info.ipc_handles is not None:
        raise Wrong("update_info.ipc_handles", "JSON has no bytes; give ipc_handles_pickled, or buckets")
    if backend in GROUPS and of_ipc:
        raise Wrong(
            f"update_info.{of_ipc[0]}", f"it is of the backend ipc, and --weight-transfer-config says {backend!r}"
        )
    tensors = tensors_of(info)
    if info.num_updates_list is not None:
        _check_changes(info, info.num_updates_list, tensors, backend)
    elif backend == "ipc":
        if len(of_ipc) != 1:
            raise Wrong("update_info.buckets", "give one of buckets and ipc_handles_pickled")
        count = sum(bucket.count for bucket in info.buckets or ())
        if info.buckets is not None and count != len(tensors):
            raise Wrong("update_info.buckets", f"they hold {count} tensors, and names has {len(tensors)}")
    return tensors
