"""Kinds of devices (--device): what is known of one before a process starts, and what makes a worker's engine on it.

`cpu`, `cuda` and `fake` are built in; an entry point of `meshlm.platforms` names another `Platform`. The supervisor asks for the
defaults and limits, so nothing here imports torch; a worker imports the platform's engine.
"""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshlm.runtime import plugins
from meshlm.runtime.process import host_memory

CPU_SHARE = 0.25  # of the memory that is available now
CPU_MOST = 4 << 30


class Platform:
    """A kind of device. Another package derives from it, and names an instance in an entry point. The attributes are defaults."""

    name = ""  # for --device, and of the entry point
    # module:function that makes a worker's engine: (config, worker, membership, report) -> meshlm.workers.engine.Engine
    engine = ""
    max_num_seqs, max_num_batched_tokens = 64, 1024  # where no flag says
    attention_backends: tuple[str, ...] = ("torch",)  # --attention-backend auto takes the first that can
    kernel_caches: tuple[str, ...] = ()  # variables of the folders in which it keeps compiled kernels
    has_weights = True  # which the ranks of a group split
    forms_groups = False  # its workers can compute one model together (-tp, -pp, --enable-expert-parallel)
    stores_fp8 = False  # --kv-cache-dtype fp8 and fp8_e5m2
    runs_inductor = False  # --compile inductor

    def default_dtype(self, of_model: str, *, float16: bool) -> str:
        """The dtype of --dtype auto, for a model whose files are `of_model`. float16: whether the model can be computed in it."""
        return "float32"

    def kv_cache_bytes(self) -> int | None:
        """The KV cache of one worker without --kv-cache-memory. None: the engine finds it, as it can on a GPU of torch.cuda."""
        return None

    def num_devices(self, environment: Mapping[str, str]) -> int | None:
        """How many workers this host has devices for. None: any number."""
        return None


class Cpu(Platform):
    name, engine = "cpu", "meshlm.workers.engine.make:worker_engine"
    attention_backends = ("cpu", "torch")
    kernel_caches = ("XDG_CACHE_HOME",)
    forms_groups = stores_fp8 = True

    def kv_cache_bytes(self) -> int | None:
        return min(int(host_memory.available() * CPU_SHARE), CPU_MOST)


class Cuda(Platform):
    """A GPU that torch.cuda knows."""

    name, engine = "cuda", "meshlm.workers.engine.make:worker_engine"
    max_num_seqs, max_num_batched_tokens = 1024, 8192
    attention_backends = ("triton", "torch")
    kernel_caches = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR")
    forms_groups = stores_fp8 = runs_inductor = True

    def default_dtype(self, of_model: str, *, float16: bool) -> str:
        other = ("float32", "float64") if float16 else ("float32", "float64", "float16")
        return "bfloat16" if of_model in other else of_model

    def num_devices(self, environment: Mapping[str, str]) -> int | None:
        """GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, else all whose device files are here. 1 when nothing says."""
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
        return len(list(Path("/dev").glob("nvidia[0-9]*"))) or 1


def with_devices(ids: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables under which a process sees these GPUs (--device-ids) alone; empty: those that it sees now. ValueError."""
    if not ids:
        return dict(environment)
    wanted = [device_id.strip() for device_id in ids.split(",")]
    numbers = [device_id.isdecimal() for device_id in wanted]
    if not all(wanted) or len(set(wanted)) < len(wanted) or any(numbers) != all(numbers):
        raise ValueError(f"--device-ids {ids}: must be numbers of GPUs or UUIDs, each once, as 2,3")
    visible = [device_id for device_id in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device_id]
    if visible and numbers[0]:
        if outside := [device_id for device_id in wanted if int(device_id) >= len(visible)]:
            raise ValueError(
                f"--device-ids {ids}: {outside[0]} is none of the {len(visible)} GPUs of CUDA_VISIBLE_DEVICES={','.join(visible)}"
            )
        wanted = [visible[int(device_id)] for device_id in wanted]
    return {**environment, "CUDA_VISIBLE_DEVICES": ",".join(wanted)}


class Fake(Platform):
    """No model at all (workers/fake/engine.py)."""

    name, engine = "fake", "meshlm.workers.fake.engine:worker_engine"
    max_num_seqs, max_num_batched_tokens = 1024, 8192
    attention_backends = ()
    has_weights, forms_groups = False, True


BUILT_IN = ("auto", "cpu", "cuda", "fake")
_platforms: dict[str, Platform] = {each.name: each for each in (Cpu(), Cuda(), Fake())}


def named(name: str) -> Platform:
    """The platform of this name; packages are asked for one that is not built in. PluginError."""
    if name not in _platforms:
        plugins.load(plugins.PLATFORMS, os.environ, _register, only=name)
    if name not in _platforms:
        raise plugins.PluginError(f"--device {name}: there are {', '.join(names())}")
    return _platforms[name]


def names() -> list[str]:
    """All that --device may say. PluginError for a package that takes a name of ours."""
    others = plugins.names(plugins.PLATFORMS, os.environ)
    for name in others:
        if name in BUILT_IN:
            raise plugins.PluginError(f"plug-in {name} (group {plugins.PLATFORMS}): --device {name} is taken already")
    return [*BUILT_IN, *others]


def engine_of(platform: Platform) -> Any:
    """The function that makes its engine; imports the engine's module, which may import torch."""
    module, _, function = platform.engine.partition(":")
    return getattr(importlib.import_module(module), function)


def _register(name: str, found: Any) -> None:
    if not isinstance(found, Platform):
        raise TypeError(f"Platform expected, got {type(found).__name__}")
    if found.name != name:
        raise ValueError(f"the platform is called {found.name!r}, and its entry point {name!r}")
    if ":" not in found.engine:
        raise ValueError(f"engine {found.engine!r}: module:function is expected")
    _platforms[name] = found
