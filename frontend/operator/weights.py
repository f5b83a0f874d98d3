"""What trainers ask of the mesh: other weights, under vLLM's names. Called by weight_routes.py.

Weights come from a folder that all workers can read. What vLLM's routes have beyond that is refused by name.
"""

from typing import Any

import msgspec
from msgspec import Struct

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.schema import CollectiveRpcRequest
from meshlm.frontend.openai.weights_schema import DiskUpdate, FinishRequest, InitRequest, StartRequest, UpdateRequest
from meshlm.frontend.operator import mesh_operations
from meshlm.frontend.operator.mesh_operations import MeshOperations
from meshlm.protocol import operations as ops
from meshlm.protocol.operations import Action

DISK = "disk"
NO_TENSORS = "tensors are not sent here; write the weights to a folder and give update_info.path"


def init(asked: InitRequest) -> dict[str, Any]:
    """Nothing is made ready for folders; other ways are refused."""
    info = asked.init_info
    other = next((name for name in _given(info) if name != "backend"), "" if info.backend == DISK else "backend")
    if other:
        raise HttpError(
            409, f"init_info.{other}: weights are read from a folder here; the backend is {DISK!r}", "init_info"
        )
    return {"message": "Weight transfer initialized"}


async def start(backend: MeshOperations, asked: StartRequest) -> dict[str, Any]:
    if not asked.is_checkpoint_format:
        raise HttpError(409, "is_checkpoint_format: weights come as a checkpoint has them", "is_checkpoint_format")
    await _done(backend, ops.BeginUpdate())
    return {"message": "Weight update started"}


async def update(backend: MeshOperations, asked: UpdateRequest) -> dict[str, Any]:
    """All workers find out whether they can have these weights."""
    info = asked.update_info
    if tensors := next((name for name in _given(info) if name != "path"), ""):
        raise HttpError(409, f"update_info.{tensors}: {NO_TENSORS}", "update_info")
    if not info.path:
        raise HttpError(409, f"update_info.path: it is missing; {NO_TENSORS}", "update_info")
    await _done(backend, ops.StageWeights(info.path))
    return {"message": "Weights checked"}


def _given(info: Struct) -> list[str]:
    return [name for name, value in msgspec.structs.asdict(info).items() if value is not None]


async def finish(backend: MeshOperations, asked: FinishRequest) -> dict[str, Any]:
    """All workers take what was checked, under this name."""
    if asked.abort:
        await _done(backend, ops.FinishUpdate(drop=True))
        return {"message": "Weight update dropped"}
    await _changed(backend, ops.FinishUpdate(asked.weight_version, asked.keep_kv), asked.mode)
    return {"message": "Weight update finished"}


async def from_disk(backend: MeshOperations, asked: DiskUpdate) -> dict[str, Any]:
    await _changed(
        backend, ops.UpdateWeights(asked.model_path, asked.weight_version, not asked.flush_cache), asked.mode
    )
    return {"success": True, "message": "Weights updated"}


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
    if pauses:
        await mesh_operations.pause(backend, {"mode": mode, "clear_cache": "false"})
    try:
        await _done(backend, action)
    finally:
        if pauses:
            await mesh_operations.resume(backend)


async def _done(backend: MeshOperations, action: Action) -> ops.OperationDone:
    answer = await backend.operate(action)
    if answer.error:
        raise HttpError(409, answer.error)
    return answer
