"""Flags of recurrent states, held against the model and one another. Called by resolve.py."""

from meshlm.protocol.config.engine import CacheConfig
from meshlm.protocol.model import ModelSpec
from meshlm.supervisor.errors import UsageError


def check(cache: CacheConfig, spec: ModelSpec) -> None:
    """UsageError for flags that cannot be honoured."""
    given = {
        "--mamba-cache-mode": (cache.mamba_cache_mode, ("auto", "none")),
        "--mamba-block-size": (cache.mamba_block_size, (None,)),
        "--mamba-cache-dtype": (cache.mamba_cache_dtype, ("auto",)),
        "--mamba-ssm-cache-dtype": (cache.mamba_ssm_cache_dtype, ("auto",)),
    }
    for flag, (value, plain) in given.items():
        if value in plain:
            continue
        if spec.state is None:
            raise UsageError(f"{flag} {value}: {spec.architecture} has no state-space layers; leave it out")
        if flag in ("--mamba-cache-mode", "--mamba-block-size") and not cache.enable_prefix_caching:
            raise UsageError(f"{flag} {value}: it needs --enable-prefix-caching")
    if cache.mamba_block_size and cache.mamba_cache_mode == "none":
        raise UsageError(
            f"--mamba-block-size {cache.mamba_block_size}: there are no checkpoints with --mamba-cache-mode none"
        )
