"""What LLM and AsyncLLM ask of the mesh in this program: sleep and waking up, as POST /sleep and /wake_up do, profiles, an empty prefix
cache, and calls of methods of workers (--worker-extension-cls, and reload_weights)."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from meshlm.protocol import operations as edge
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.sleeping import AWAKE, TAGS, after
from meshlm.supervisor.api.weights import TrainerCalls

SCHEDULING = "scheduling"  # the tag of what a pause withholds


class Operated(Protocol):
    """The mesh's supervisor."""

    async def operate(self, action: edge.Action) -> edge.OperationDone: ...


class Operator:
    """Of one mesh. ValueError where it cannot be done, with the reason."""

    def __init__(self, config: MeshConfig, mesh: Operated) -> None:
        self._config, self._mesh = config, mesh
        self._state, self._paused = AWAKE, False
        self.weights = TrainerCalls(config, self._ask)

    @property
    def is_sleeping(self) -> bool:
        return self._paused or bool(self._state.tags)

    async def sleep(self, level: int, mode: str) -> None:
        """level 0: pause alone; 1: weights go to the host's memory; 2: they are dropped. mode: abort or keep what runs."""
        if level != 0 and not self._config.worker.enable_sleep_mode:
            raise ValueError("enable_sleep_mode: make the model with enable_sleep_mode=True to let it sleep")
        if level not in (0, 1, 2):
            raise ValueError("level: must be 0, 1 or 2")
        if mode not in ("abort", "keep"):
            raise ValueError("mode: must be 'abort' or 'keep'; what is to end by itself is awaited before")
        await self._ask(edge.Pause(abort=mode == "abort"))
        self._paused = True
        if level == 0:
            await self._ask(edge.ResetPrefixCache(preempt=True))
            return
        await self._ask(action := edge.Sleep(level))
        self._state = after(self._state, action)

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        """Have the memory of these tags again, or all of it; then steps are computed."""
        for tag in tags or ():
            if tag not in (*TAGS, SCHEDULING):
                raise ValueError(f"tags: must be {', '.join(TAGS)} or {SCHEDULING}")
        wanted = tuple(tag for tag in tags or () if tag != SCHEDULING)
        if wanted or not tags:
            await self._ask(action := edge.WakeUp(wanted))
            self._state = after(self._state, action)
        if SCHEDULING in (tags or ()) or not self._state.tags:
            await self._ask(edge.Resume())
            self._paused = False

    async def profile(self, start: bool) -> tuple[str, ...]:
        """Begin a trace in every worker, or end it: the files that were written then."""
        return (await self._ask(edge.Profile(start))).paths

    async def reset_prefix_cache(self, preempt: bool) -> bool:
        """False where requests run that are not to be computed anew."""
        return not (await self._mesh.operate(edge.ResetPrefixCache(preempt))).error

    async def call_workers(
        self, method: str, timeout: float | None, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> list[Any]:
        """What the method gives, in the order of the workers; of reload_weights None for each."""
        if not isinstance(method, str):
            raise ValueError("method: must be the name of a method of worker_extension_cls; functions are not sent")
        arguments = msgspec.json.encode({"args": list(args), "kwargs": dict(kwargs or {})})
        limit = {} if timeout is None else {"limit_s": timeout}
        if method == "reload_weights":  # of the folder, or of where they were read before
            await self._ask(edge.UpdateWeights(_source(args, dict(kwargs or {}))))
            parallel = self._config.parallel
            return [None] * (parallel.workers_per_rank * parallel.data_parallel_size)
        answer = await self._ask(edge.CallWorkers(method, arguments, **limit))
        return [msgspec.json.decode(result) for result in answer.results]

    async def _ask(self, action: edge.Action) -> edge.OperationDone:
        answer = await self._mesh.operate(action)
        if answer.error:
            raise ValueError(answer.error)
        return answer


def _source(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """What vLLM's reload_weights was called with. ValueError."""
    source = kwargs.pop("weights_path", None) or ""
    if args or kwargs or not isinstance(source, str):
        raise ValueError("kwargs: reload_weights takes weights_path, the path of a folder")
    return source
