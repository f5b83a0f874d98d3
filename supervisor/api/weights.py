"""Weights that a trainer sends to the mesh of this program, as LLM's methods of vLLM's names have it. Owned by operations.py.

What a trainer in the same program broadcasts must come from another thread: `update_weights` returns when all workers have it.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from meshlm.protocol import operations as edge
from meshlm.protocol import weight_transfer as transfer
from meshlm.protocol.config import MeshConfig
from meshlm.supervisor.errors import raised_as

T = TypeVar("T")
NO_FUNCTIONS = (
    "apply_model: functions are not sent to workers, where they would have to come as pickles; write a class with a method that does "
    "it with self.model, start with worker_extension_cls='module.Class', and call collective_rpc('method')"
)


class TrainerCalls:
    """`ask` has an operation done, or raises ValueError."""

    def __init__(self, config: MeshConfig, ask: Callable[[edge.Action], Awaitable[edge.OperationDone]]) -> None:
        self._config, self._ask = config, ask

    async def join(self, request: Any) -> None:
        """request: {"init_info": {...}}, or an object with that attribute."""
        info = _decoded(request, "init_info", transfer.JoinInfo)
        parallel, backend = self._config.parallel, self._config.worker.weight_transfer or "disk"
        with raised_as(ValueError, transfer.Wrong):
            info = transfer.joined(info, backend, parallel.workers_per_rank * parallel.data_parallel_size)
        if info.backend in transfer.GROUPS:
            await self._ask(edge.JoinTrainer(msgspec.json.encode(info)))

    async def begin(self, is_checkpoint_format: bool) -> None:
        if not is_checkpoint_format:
            raise ValueError("is_checkpoint_format: weights come as a checkpoint has them")
        await self._ask(edge.BeginUpdate())

    async def update(self, request: Any) -> None:
        """request: {"update_info": {...}}, or an object with that attribute."""
        info = _decoded(request, "update_info", transfer.UpdateInfo)
        if info.path:
            await self._ask(edge.StageWeights(info.path))
            return
        worker = self._config.worker
        if not worker.receives_weights:
            raise ValueError("update_info.names: make the model with weight_transfer_config to send it tensors")
        with raised_as(ValueError, transfer.Wrong):
            transfer.checked_update(info, worker.weight_transfer)
        await self._ask(edge.StageTensors(msgspec.json.encode(info)))

    async def finish(self, name: str, keep_kv: bool, abort: bool) -> None:
        await self._ask(edge.FinishUpdate(name, keep_kv, abort))


def _decoded(request: Any, field: str, kind: type[T]) -> T:
    """What the caller has given under this name, which may be a dataclass of vLLM's. ValueError."""
    given = request.get(field) if isinstance(request, dict) else getattr(request, field, None)
    if given is None:
        raise ValueError(f"{field}: it is missing")
    with raised_as(ValueError, msgspec.ValidationError, of=field):
        return msgspec.convert(given, kind, from_attributes=True)
