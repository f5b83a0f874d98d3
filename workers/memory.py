"""How many KV blocks fit."""

import os

import torch

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ProcessFatal

CPU_SHARE = 0.25  # of the memory that is free now
CPU_MOST = 4 << 30


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block's keys and values over all layers."""
    return 2 * spec.num_hidden_layers * block_size * spec.num_key_value_heads * spec.head_dim * dtype.itemsize


def cpu_budget() -> int:
    """Bytes for the KV cache of a CPU worker that was not told."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(free * CPU_SHARE), CPU_MOST)


def _size(count: int) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << size:
            return f"{count / 2**size:.2f} {unit}"
    return f"{count} bytes"


def num_blocks(config: MeshConfig, budget: int, dtype: torch.dtype) -> int:
    """Blocks within `budget` bytes. ProcessFatal when the longest request would not fit, with the one that would."""
    resolved = config.resolved
    assert resolved is not None
    block_size = config.cache.block_size
    each = block_bytes(resolved.spec, block_size, dtype)
    count = budget // each
    needed = -(-resolved.max_model_len // block_size)
    if count < needed:
        fits = f"--max-model-len {count * block_size} would fit" if count > 0 else "not even one block fits"
        raise ProcessFatal(
            f"one request of --max-model-len {resolved.max_model_len} tokens needs {_size(needed * each)} of KV cache "
            f"and {_size(max(budget, 0))} are there; with this memory {fits}"
        )
    return min(count, -(-resolved.max_num_seqs * resolved.max_model_len // block_size))
