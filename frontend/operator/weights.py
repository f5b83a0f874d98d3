"""What trainers ask of the mesh: other weights, under vLLM's names. Called by weight_routes.py.

Weights come from a folder that all workers can read, or as tensors where --weight-transfer-config says how (weight_transfer.py).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai import weights_schema as schema
from meshlm.frontend.openai.schema import CollectiveRpcRequest
from meshlm.frontend.openai.weights_schema import DiskUpdate, FinishRequest, InitRequest, StartRequest, UpdateRequest
from meshlm.frontend.operator import mesh_operations
from meshlm.frontend.operator.mesh_operations import MeshOperations
from meshlm.protocol import operations as ops
from meshlm.protocol import weight_transfer as transfer
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.operations import Action
from meshlm.protocol.weights import RollMode

NO_TENSORS = (
    "tensors are not sent here: start the server with --weight-transfer-config, or write the weights to a folder and give "
    "update_info.path"
)


async def init(backend: MeshOperations, asked: InitRequest) -> dict[str, Any]:
    """All workers join the trainer's group, where weights come by one."""
    config = backend.config
    num_workers = mesh_operations.world_size(config, {})["world_size"]
    with _refused():
        info = transfer.joined(asked.init_info, _backend(config, asked.init_info), num_workers)
    if info.backend in transfer.GROUPS:
        await _done(backend, ops.JoinTrainer(msgspec.json.encode(info)))
    return {"message": "Weight transfer initialized"}


def _backend(config: MeshConfig, info: transfer.JoinInfo) -> str:
    """That of --weight-transfer-config. HttpError where it is needed and missing."""
    if not (backend := config.worker.weight_transfer) and info.backend not in ("", "disk", *transfer.BACKENDS):
        raise HttpError(
            409, f"init_info.backend: {info.backend!r}: there are {', '.join(transfer.BACKENDS)}", "init_info"
        )
    if not backend and (info.backend not in ("", "disk") or info.master_address is not None):
        field = "master_address" if info.master_address is not None else "backend"
        raise HttpError(409, f"init_info.{field}: {NO_TENSORS}", "init_info")
    return backend or "disk"


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except transfer.Wrong as error:
        raise HttpError(409, str(error), error.field.partition(".")[0]) from None


async def start(backend: MeshOperations, asked: StartRequest) -> dict[str, Any]:
    if not asked.is_checkpoint_format:
        raise HttpError(409, "is_checkpoint_format: weights come as a checkpoint has them", "is_checkpoint_format")
    await _done(backend, ops.BeginUpdate(asked.rolling))
    return {"message": "Weight update started"}


async def update(backend: MeshOperations, asked: UpdateRequest) -> dict[str, Any]:
    """All workers find out whether they can have the weights of a folder, or receive tensors."""
    info, config = asked.update_info, backend.config
    tensors = next((name for name in info.__struct_fields__ if name != "path" and getattr(info, name) is not None), "")
    if info.path and tensors:
        raise HttpError(409, f"update_info.{tensors}: weights come from a folder (path) or as tensors", "update_info")
    if info.path:
        await _done(backend, ops.StageWeights(info.path))
        return {"message": "Weights checked"}
    if not config.worker.receives_weights:
        raise HttpError(409, f"update_info.{tensors or 'path'}: {NO_TENSORS}", "update_info")
    with _refused():
        transfer.checked_update(info, config.worker.weight_transfer)
    await _done(backend, ops.StageTensors(msgspec.json.encode(info)))
    return {"message": "Weights received"}


async def finish(backend: MeshOperations, asked: FinishRequest) -> dict[str, Any]:
    """All workers take what was checked, under this name."""
    if asked.abort:
        await _done(backend, ops.FinishUpdate(drop=True))
        return {"message": "Weight update dropped"}
    rolling = _rolling(asked.rolling, asked.mode, "keep_kv" if asked.keep_kv else "")
    action = ops.FinishUpdate(asked.weight_version, asked.keep_kv, rolling=rolling)
    await _changed(backend, action, "keep" if asked.rolling else asked.mode or "keep")
    return {"message": "Weight update finished"}


async def from_disk(backend: MeshOperations, asked: DiskUpdate) -> dict[str, Any]:
    rolling = _rolling(asked.rolling, asked.mode, "" if asked.flush_cache else "flush_cache")
    action = ops.UpdateWeights(asked.model_path, asked.weight_version, not asked.flush_cache, rolling)
    await _changed(backend, action, "keep" if asked.rolling else asked.mode or "keep")
    return {"success": True, "message": "Weights updated"}


def _rolling(asked: bool, mode: schema.Mode | None, keeps_kv: str) -> RollMode | None:
    """What becomes of requests in a roll; None: there is none. keeps_kv: the field that wants old KV kept, which no roll can."""
    if asked and keeps_kv:
        text = f"{keeps_kv}: rolling, no request goes on with the KV of other weights"
        raise HttpError(409, text, keeps_kv)
    return (mode or "wait") if asked else None


async def rename(backend: MeshOperations, name: str) -> dict[str, Any]:
    await _done(backend, ops.NameWeights(name))
    return {"success": True, "new_version": name}


async def info(backend: MeshOperations) -> dict[str, Any]:
    """The mesh's version, and which each rank has."""
    stats = await backend.fresh_stats()
    version = stats.weights
    return {
        "weight_version": version.label,
        "number": version.number,
        "source": version.source or None,
        "digest": version.digest or None,
        "updating": stats.updating or None,
        "ranks": [
            {
                "dp_rank": rank.dp_rank,
                "weight_version": None if rank.weights is None else rank.weights.label,
                "behind": rank.behind or None,
            }
            for rank in stats.ranks
        ],
    }


async def check(backend: MeshOperations, action: str) -> dict[str, Any]:
    """A sum over all bytes of the weights of each worker: equal shards of equal weights have equal sums."""
    if action != "checksum":
        text = f"action: {action!r} is not there; checksum gives a sum over the weights of each worker"
        raise HttpError(409, text, "action")
    answer = await _done(backend, ops.SumWeights())
    return {"success": True, "checksums": [msgspec.json.decode(one) for one in answer.results]}


async def reload(backend: MeshOperations, asked: CollectiveRpcRequest) -> dict[str, Any]:
    """As the worker's method reload_weights of vLLM: None for each worker. weights_path: a folder; else where they were read before."""
    source = asked.kwargs.get("weights_path") or ""
    if asked.args or not isinstance(source, str) or asked.kwargs.keys() - {"weights_path"}:
        raise HttpError(400, "kwargs: reload_weights takes weights_path, the path of a folder", "kwargs")
    await _done(backend, ops.UpdateWeights(source))
    return {"results": [None] * mesh_operations.world_size(backend.config, {})["world_size"]}


async def _changed(backend: MeshOperations, action: Action, mode: str) -> None:
    """What runs ends before with mode abort, or runs to its end with wait; with keep it goes on."""
    pauses = mode != "keep" and not (await backend.certain_stats()).paused
    try:
        if pauses:
            await mesh_operations.pause(backend, {"mode": mode, "clear_cache": "false"})
        await _done(backend, action)
    finally:
        if pauses:
            await mesh_operations.resume(backend)


async def _done(backend: MeshOperations, action: Action) -> ops.OperationDone:
    answer = await backend.operate(action)
    if answer.error:
        raise HttpError(409, answer.error)
    return answer
