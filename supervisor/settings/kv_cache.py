"""Flags of an FP8 KV cache, held against the model and one another. Called by resolve.py."""

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.platforms import Platform
from meshlm.supervisor.errors import UsageError


def check(config: MeshConfig, spec: ModelSpec, platform: Platform) -> None:
    """UsageError for flags that cannot be honoured."""
    wanted = config.cache.kv_cache_dtype
    flag = f"--kv-cache-dtype {wanted}"
    if wanted != "auto" and not platform.stores_fp8:
        raise UsageError(f"{flag}: --device {platform.name} keeps no keys and values in 8 bits; use auto")
    if wanted != "auto" and spec.mla is not None:
        raise UsageError(f"{flag}: the latents of {spec.architecture} are not kept in 8 bits; use auto")
    if not config.cache.calculate_kv_scales:
        return
    why = ""
    if wanted == "auto":
        why = "it needs --kv-cache-dtype fp8 or fp8_e5m2"
    elif spec.state is not None:
        why = f"it is not there for models with recurrent states ({spec.architecture})"
    elif config.lockstep:
        why = "experts of other ranks cannot be asked before the first step; take a checkpoint with scales, or leave it out"
    if why:
        raise UsageError(f"--calculate-kv-scales: {why}")
