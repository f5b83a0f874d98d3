"""What operators ask of the mesh: operations of all workers, ranks' figures, changes that the supervisor makes. Owned by io.py.

Called by routes.py and gRPC's servicer. While ranks are added or removed the mesh serves: a request waits for its own change alone.
"""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from meshlm.frontend.http.errors import HttpError, field_error
from meshlm.frontend.openai.schema import CollectiveRpcRequest, ScaleRequest, Settings
from meshlm.protocol import operations as ops
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.changing import CHANGING, checked
from meshlm.protocol.edges.control import ChangeSettings, MeshStats, RanksScaled, ScaleRanks
from meshlm.protocol.operations import Action, CallWorkers, OperationDone, ResetPrefixCache
from meshlm.protocol.sleeping import TAGS
from meshlm.protocol.wire.ids import COORDINATOR, ErrorKind
from meshlm.runtime.client.mesh_client import MeshClient
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.mesh.operations import AskedOperations
from meshlm.runtime.process.figures import Figures

CERTAIN_S = 20.0  # how long an operation waits for figures while the coordinator is replaced
ANSWER_S = 10.0  # the supervisor is alive, and says at once what it does
LOAD_S = 1800.0  # a new rank may load a large model, as in protocol/operations.py
SCHEDULING = "scheduling"  # what a pause withholds, as a tag of /wake_up
DRAIN_POLL_S = 0.05  # how often a pause looks whether requests run
SWITCH = {"true": True, "1": True, "on": True, "yes": True, "false": False, "0": False, "off": False, "no": False}


class AskedRanks:
    """Questions to the supervisor that are not answered yet. `tell`: sends it a message."""

    def __init__(self, tell: Callable[[Struct], None]) -> None:
        self._tell = tell
        self._waiting: dict[str, asyncio.Future[RanksScaled]] = {}

    async def scale(self, num_ranks: int, drain_s: float | None) -> RanksScaled:
        """Have so many ranks; the answer comes when they are there, or why they are not. HttpError when it takes too long."""
        return await self._ask(ScaleRanks(uuid.uuid4().hex, num_ranks, drain_s), LOAD_S + (drain_s or 0.0))

    async def now(self) -> RanksScaled:
        """How many there are, and what is being changed."""
        return await self._ask(ScaleRanks(uuid.uuid4().hex), ANSWER_S)

    def answered(self, answer: RanksScaled) -> None:
        """An answer that nobody waits for is dropped."""
        future = self._waiting.get(answer.id)
        if future is not None and not future.done():
            future.set_result(answer)

    async def _ask(self, question: ScaleRanks, limit_s: float) -> RanksScaled:
        future: asyncio.Future[RanksScaled] = asyncio.get_running_loop().create_future()
        self._waiting[question.id] = future
        try:
            self._tell(question)
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError:
            text = f"the supervisor did not answer in {limit_s:.0f} s"
            raise HttpError(504, text) from None
        finally:
            del self._waiting[question.id]


class MeshOperations:
    def __init__(self, client: MeshClient, figures: Figures) -> None:
        self._client, self._figures = client, figures
        self.asked = AskedOperations(lambda peer, message: self._mesh.send(peer, message))
        self.ranks = AskedRanks(self.tell_supervisor)

    @property
    def _mesh(self) -> Mesh:
        assert self._client.mesh is not None
        return self._client.mesh

    @property
    def config(self) -> MeshConfig:
        return self._mesh.config

    async def operate(self, action: Action) -> OperationDone:
        """Have it done in every worker."""
        try:
            return await self.asked.ask(action)
        except TimeoutError:
            raise HttpError(504, "the coordinator did not answer") from None

    def change(self, values: dict[str, str | int | float]) -> None:
        """Ask the supervisor to have these settings, which were checked, in all processes."""
        self.tell_supervisor(ChangeSettings(values))

    def tell_coordinator(self, message: Struct) -> None:
        """LinkDown while there is none."""
        self._mesh.send(COORDINATOR, message)

    def tell_supervisor(self, message: Struct) -> None:
        self._mesh.tell_supervisor(message)

    async def fresh_stats(self) -> MeshStats:
        """The figures of each rank as of now, as far as the mesh tells them."""
        return await self._figures.fresh(partial(self._mesh.send, COORDINATOR))

    async def certain_stats(self) -> MeshStats:
        """Of this moment, for what is decided by them. HttpError where the coordinator does not come back in time."""
        try:
            return await self._figures.certain(partial(self._mesh.send, COORDINATOR), CERTAIN_S)
        except TimeoutError:
            raise HttpError.of_kind(ErrorKind.OVERLOADED, "the coordinator does not tell what the ranks do") from None


async def profile(backend: MeshOperations, *, start: bool) -> dict[str, Any]:
    if not backend.config.worker.profiler_dir:
        raise HttpError(404, "start the server with --profiler-dir to take traces")
    return {"paths": list((await _done(backend, ops.Profile(start))).paths)}


async def reset_prefix_cache(backend: MeshOperations, query: Mapping[str, str]) -> dict[str, Any]:
    """Later requests find nothing of what is computed now."""
    preempt = _switch(query, "reset_running_requests")
    if _switch(query, "reset_external"):
        raise HttpError(400, "there is no other prefix cache than the workers'", "reset_external")
    return await _success(backend, ResetPrefixCache(preempt))


async def rebalance_experts(backend: MeshOperations) -> dict[str, Any]:
    """Experts move before the next step that all ranks take."""
    return await _success(backend, ops.RebalanceExperts())


async def _success(backend: MeshOperations, action: Action) -> dict[str, Any]:
    answer = await backend.operate(action)
    return {"success": False, "error": answer.error} if answer.error else {"success": True}


async def pause(backend: MeshOperations, query: Mapping[str, str]) -> dict[str, Any]:
    """No step until `resume`: with mode abort, the default, what runs and waits ends; with wait what runs ends by itself before this
    answers, and the others wait; with keep all go on then."""
    mode, clears = query.get("mode", "abort"), _switch(query, "clear_cache", "true")
    if mode not in ("abort", "wait", "keep"):
        raise field_error("mode", "must be 'abort', 'wait' or 'keep'")
    if _switch(query, "wait_for_inflight_requests"):  # its older name
        mode = "wait"
    await _done(backend, ops.Pause(abort=mode == "abort", wait=mode == "wait"))
    if mode == "wait":
        await _drained(backend)
    if mode != "keep" and clears:
        await _done(backend, ResetPrefixCache())
    return {"status": "paused"}


async def _drained(backend: MeshOperations) -> None:
    """Waits until nothing runs in the paused mesh: requests that had begun have ended."""
    while True:
        stats = await backend.certain_stats()
        if not any(rank.num_running for rank in stats.ranks):
            return
        if not stats.paused:
            raise HttpError(409, "the mesh was resumed before all requests had ended")
        await asyncio.sleep(DRAIN_POLL_S)


def world_size(config: MeshConfig, query: Mapping[str, str]) -> dict[str, Any]:
    """The number of workers, of all ranks or of one."""
    parallel = config.parallel
    size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return {"world_size": size * parallel.data_parallel_size if _switch(query, "include_dp", "true") else size}


async def scale(backend: MeshOperations, asked: ScaleRequest) -> dict[str, Any]:
    answer = await backend.ranks.scale(asked.new_data_parallel_size, asked.drain_timeout)
    if answer.refused:
        raise HttpError(409, answer.refused.removeprefix("--dp: "), "new_data_parallel_size")
    if answer.failed:
        text = f"scaling failed, the ranks are as before ({answer.num_ranks}): {answer.failed}"
        raise HttpError(500, text, "new_data_parallel_size")
    return {"message": f"Scaled to {answer.num_ranks} data parallel engines"}


async def is_scaling(backend: MeshOperations) -> dict[str, Any]:
    return {"is_scaling_elastic_ep": bool((await backend.ranks.now()).doing)}


async def sleep(backend: MeshOperations, query: Mapping[str, str]) -> None:
    """Pauses as `pause` does. Level 1 and 2: workers give their devices' memory back then."""
    _needs_sleep_mode(backend)
    level = query.get("level", "1")
    if level not in ("0", "1", "2"):
        raise field_error("level", "must be 0, 1 or 2")
    await pause(backend, {"mode": query.get("mode", "abort"), "clear_cache": "false" if level != "0" else "true"})
    if level != "0":
        await _done(backend, ops.Sleep(int(level)))


async def wake_up(backend: MeshOperations, tags: list[str]) -> None:
    """Workers have their memory again, or that of `tags`. With all of it steps are computed; the tag scheduling means these alone."""
    _needs_sleep_mode(backend)
    for tag in tags:
        if tag not in (*TAGS, SCHEDULING):
            raise field_error("tags", f"must be {', '.join(TAGS)} or {SCHEDULING}")
    wanted = tuple(tag for tag in tags if tag != SCHEDULING)
    if wanted or not tags:
        await _done(backend, ops.WakeUp(wanted))
    if SCHEDULING in tags or not _sleeping(await backend.certain_stats()):
        await resume(backend)


async def is_sleeping(backend: MeshOperations) -> dict[str, Any]:
    """Whether any memory of a worker is given back, or the mesh is paused."""
    _needs_sleep_mode(backend)
    stats = await backend.fresh_stats()
    return {"is_sleeping": stats.paused or _sleeping(stats)}


def _sleeping(stats: MeshStats) -> bool:
    return any(rank.sleeping.tags for rank in stats.ranks)


def _needs_sleep_mode(backend: MeshOperations) -> None:
    if not backend.config.worker.enable_sleep_mode:
        raise HttpError(404, "start the server with --enable-sleep-mode to let it sleep")


async def resume(backend: MeshOperations) -> dict[str, Any]:
    await _done(backend, ops.Resume())
    return {"status": "resumed"}


async def abort_requests(backend: MeshOperations, request_ids: tuple[str, ...]) -> dict[str, Any]:
    """Ends the requests of these names, or all that run or wait at a rank."""
    answer = await _done(backend, ops.AbortRunning(request_ids))
    return {"status": "aborted", "aborted": answer.count}


async def collective_rpc(backend: MeshOperations, asked: CollectiveRpcRequest) -> dict[str, Any]:
    """What a method of the worker extension gives, in the order of the workers."""
    if not backend.config.worker.worker_extension_cls:
        text = "start the server with --worker-extension-cls to call into workers"
        raise HttpError(404, text)
    arguments = msgspec.json.encode({"args": asked.args, "kwargs": asked.kwargs})
    limit = {} if asked.timeout is None else {"limit_s": asked.timeout}
    answer = await backend.operate(CallWorkers(asked.method, arguments, **limit))
    if answer.error:
        raise HttpError(400, answer.error, "method")
    results = [msgspec.json.decode(result) for result in answer.results]
    return {"results": [one if one is None or isinstance(one, dict | list) else str(one) for one in results]}


def settings(config: MeshConfig) -> dict[str, Any]:
    """The settings that may change, as they are."""
    return {name: getattr(getattr(config, section), name) for name, section in CHANGING.items()}


def change_settings(backend: MeshOperations, asked: Settings) -> dict[str, Any]:
    """Have them in all processes of the mesh, soon. They hold until the mesh ends."""
    values = {name: value for name, value in msgspec.structs.asdict(asked).items() if value is not None}
    try:
        after = checked(backend.config, values)
    except ValueError as error:
        raise HttpError(400, str(error), next(iter(values))) from None
    backend.change(values)
    return settings(after)


async def _done(backend: MeshOperations, action: Action) -> OperationDone:
    answer = await backend.operate(action)
    if answer.error:
        raise HttpError(409, answer.error)
    return answer


def _switch(query: Mapping[str, str], name: str, default: str = "false") -> bool:
    text = query.get(name, default)
    if text.lower() not in SWITCH:
        raise HttpError(400, f"{name} must be true or false", name)
    return SWITCH[text.lower()]
