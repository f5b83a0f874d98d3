"""What a pause asks of the mesh, and what it waits for."""

from typing import Any

import msgspec
import pytest
from openai_client import SERVER
from scripted import Scripted

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.schema import CollectiveRpcRequest
from meshlm.frontend.operator import mesh_operations as operations
from meshlm.frontend.operator.mesh_operations import MeshOperations
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.control import MeshStats, RankStats
from meshlm.protocol.operations import (
    Action,
    CallWorkers,
    OperationDone,
    OperationId,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    WakeUp,
)
from meshlm.runtime.client.mesh_client import MeshClient
from meshlm.runtime.process.figures import Figures


class Mesh(MeshOperations):
    """One in which fewer requests run each time that it is asked; `resumes`: somebody else resumes it."""

    def __init__(self, num_running: int = 0, *, resumes: bool = False) -> None:
        super().__init__(MeshClient(), Figures())
        self.settings: MeshConfig = Scripted(SERVER).config
        self.actions: list[Action | int] = []
        self.error, self.results = "", tuple[bytes, ...]()
        self._num_running, self._resumes = num_running, resumes

    @property
    def config(self) -> MeshConfig:
        return self.settings

    async def operate(self, action: Action) -> OperationDone:
        self.actions.append(action)
        return OperationDone(OperationId("o"), self.error, results=self.results)

    async def certain_stats(self) -> MeshStats:
        return await self.fresh_stats()

    async def fresh_stats(self) -> MeshStats:
        self.actions.append(self._num_running)
        self._num_running -= 1
        ranks = (RankStats(0, self._num_running + 1, 5, 0.0, 0, 0, 0, 0, 0),)
        return MeshStats(True, ranks=ranks, paused=not self._resumes)

    def change(self, values: dict[str, str | int | float]) -> None:
        raise AssertionError(values)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "DRAIN_POLL_S", 0.0)


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ({}, [Pause(abort=True), ResetPrefixCache()]),
        ({"clear_cache": "false"}, [Pause(abort=True)]),
        ({"mode": "keep"}, [Pause()]),
        ({"mode": "wait"}, [Pause(wait=True), 2, 1, 0, ResetPrefixCache()]),
        ({"wait_for_inflight_requests": "true", "clear_cache": "false"}, [Pause(wait=True), 2, 1, 0]),
    ],
)
async def test_modes(query: dict[str, str], asked: list[Any]) -> None:
    mesh = Mesh(2)
    assert await operations.pause(mesh, query) == {"status": "paused"}
    assert mesh.actions == asked


async def test_what_is_no_mode_and_who_resumes_meanwhile() -> None:
    with pytest.raises(HttpError, match="mode: must be"):
        await operations.pause(Mesh(), {"mode": "now"})
    with pytest.raises(HttpError, match="resumed before") as caught:
        await operations.pause(Mesh(2, resumes=True), {"mode": "wait"})
    assert caught.value.status == 409


def test_the_world_has_all_ranks_workers() -> None:
    parallel = msgspec.structs.replace(
        Mesh().config.parallel, tensor_parallel_size=2, pipeline_parallel_size=3, data_parallel_size=4
    )
    config = msgspec.structs.replace(Mesh().config, parallel=parallel)
    assert operations.world_size(config, {}) == {"world_size": 24}
    assert operations.world_size(config, {"include_dp": "false"}) == {"world_size": 6}


async def test_sleep_pauses_first_and_wakes_up_before_it_resumes() -> None:
    mesh = Mesh(1)
    with pytest.raises(HttpError, match="--enable-sleep-mode"):
        await operations.sleep(mesh, {})
    worker = msgspec.structs.replace(mesh.config.worker, enable_sleep_mode=True)
    mesh.settings = msgspec.structs.replace(mesh.config, worker=worker)
    await operations.sleep(mesh, {"level": "2", "mode": "wait"})
    assert mesh.actions == [Pause(wait=True), 1, 0, Sleep(2)]
    mesh.actions.clear()
    await operations.wake_up(mesh, ["scheduling", "weights"])
    assert mesh.actions[:1] + mesh.actions[-1:] == [WakeUp(("weights",)), Resume()]
    assert (await operations.is_sleeping(mesh))["is_sleeping"]


async def test_a_call_into_workers_needs_an_extension() -> None:
    mesh, asked = Mesh(), CollectiveRpcRequest(method="scale", args=[1], timeout=5.0)
    with pytest.raises(HttpError, match="--worker-extension-cls"):
        await operations.collective_rpc(mesh, asked)
    worker = msgspec.structs.replace(mesh.config.worker, worker_extension_cls="mine.Mine")
    mesh.settings = msgspec.structs.replace(mesh.config, worker=worker)
    mesh.results = (b"null", b"[1]", b"2.5")
    assert await operations.collective_rpc(mesh, asked) == {"results": [None, [1], "2.5"]}
    assert mesh.actions == [CallWorkers("scale", b'{"args":[1],"kwargs":{}}', 5.0)]
    mesh.error = "method: Mine has no 'scale'"
    with pytest.raises(HttpError, match="Mine has no 'scale'"):
        await operations.collective_rpc(mesh, asked)
