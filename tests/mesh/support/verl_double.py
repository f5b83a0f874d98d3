"""What examples/verl_rollout.py takes of verl 0.9 and of Ray, in one process: signatures of verl's classes, and actors that are
objects. Neither is among the packages of the tests."""

import abc
import asyncio
import enum
import importlib
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

EXAMPLES = Path(__file__).parents[3] / "examples"
actors: dict[str, "Handle"] = {}


class Method:
    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def remote(self, *given: Any, **named: Any) -> "asyncio.Future[Any]":
        async def done() -> Any:
            found = self._call(*given, **named)
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.ensure_future(done())


class Handle:
    """Of an actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Method:
        if name == "__ray_call__":
            return Method(lambda call: call(self._actor))
        return Method(getattr(self._actor, name))


class ActorClass:
    def __init__(self, kind: type, name: str = "") -> None:
        self._kind, self._name = kind, name

    def options(self, name: str, scheduling_strategy: Any, max_concurrency: int) -> "ActorClass":
        assert scheduling_strategy["node_id"] == "node"
        assert max_concurrency > 0
        return ActorClass(self._kind, name)

    def remote(self, *given: Any, **named: Any) -> Handle:
        actors[self._name] = found = Handle(self._kind(*given, **named))
        return found


class TokenOutput(NamedTuple):
    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: Mapping[str, Any] = types.MappingProxyType({})


class RolloutMode(enum.Enum):
    HYBRID = "hybrid"
    COLOCATED = "colocated"
    STANDALONE = "standalone"


class RolloutReplica(abc.ABC):
    def __init__(
        self, replica_rank: int, config: Any, model_config: Any, gpus_per_node: int = 8, is_reward_model: bool = False,
        is_teacher_model: bool = False, name_suffix: str = "",
    ) -> None:  # fmt: skip
        self.replica_rank, self.config, self.model_config = replica_rank, config, model_config
        sizes = config.tensor_model_parallel_size, config.data_parallel_size, config.pipeline_model_parallel_size
        self.world_size = sizes[0] * sizes[1] * sizes[2]
        self.nnodes = -(-self.world_size // gpus_per_node)
        self.max_concurrency = 1000
        self.workers: list[Handle] = []
        self.servers: list[Handle] = []
        self._server_address, self._server_handle = "", None
        self.rollout_mode: RolloutMode | None = None

    async def init_hybrid(self, worker_group: Any) -> None:
        self.rollout_mode = RolloutMode.HYBRID
        first = self.world_size * self.replica_rank
        self.workers = worker_group.workers[first : first + self.world_size]
        await self.launch_servers()

    @abc.abstractmethod
    async def launch_servers(self) -> None: ...

    async def sleep(self) -> None:
        await asyncio.gather(*[server.sleep.remote() for server in self.servers])

    async def wake_up(self) -> None:
        await asyncio.gather(*[server.wake_up.remote() for server in self.servers])

    async def resume_generation(self) -> None:
        await asyncio.gather(*[server.resume_generation.remote() for server in self.servers])

    async def clear_kv_cache(self) -> None:
        await asyncio.gather(*[server.clear_kv_cache.remote() for server in self.servers])


class RolloutReplicaRegistry:
    known: ClassVar[dict[str, Callable[[], type[RolloutReplica]]]] = {}

    @classmethod
    def register(cls, name: str, loader: Callable[[], type[RolloutReplica]]) -> None:
        cls.known[name] = loader


class BaseRollout(abc.ABC):
    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any) -> None:
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh

    @abc.abstractmethod
    async def resume(self, tags: list[str]) -> None: ...

    @abc.abstractmethod
    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **kwargs: Any) -> None: ...

    @abc.abstractmethod
    async def release(self) -> None: ...


ROLLOUTS: dict[tuple[str, str], str] = {}


def _module(name: str, **fields: Any) -> types.ModuleType:
    sys.modules[name] = found = types.ModuleType(name)
    for field, value in fields.items():
        setattr(found, field, value)
    return found


def example() -> Any:
    """examples/verl_rollout.py, which finds these in the places of verl and Ray."""
    context = types.SimpleNamespace(get_node_id=lambda: "node", get_accelerator_ids=dict)
    strategies = types.SimpleNamespace(NodeAffinitySchedulingStrategy=dict)
    util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1", scheduling_strategies=strategies)
    _module("ray", remote=ActorClass, get_actor=actors.__getitem__, get_runtime_context=lambda: context, util=util)
    for name in ("verl", "verl.workers", "verl.workers.rollout"):
        _module(name)
    _module("verl.workers.rollout.base", BaseRollout=BaseRollout, _ROLLOUT_REGISTRY=ROLLOUTS)
    kinds = (RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput)
    _module("verl.workers.rollout.replica", **{kind.__name__: kind for kind in kinds})
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module("verl_rollout")
