"""Whether the longest request has room in the KV cache. No torch: every engine asks, the fake one too."""

from meshlm.protocol.config import MeshConfig
from meshlm.runtime.errors import ProcessFatal


def num_blocks(config: MeshConfig, budget: int, block_bytes: int) -> int:
    """Blocks within `budget` bytes. ProcessFatal when the longest request would not fit, with the one that would."""
    resolved = config.resolved
    assert resolved is not None
    block_size = config.cache.block_size
    count = budget // block_bytes
    needed = -(-resolved.max_model_len // block_size)
    if count < needed:
        fits = f"--max-model-len {count * block_size} would fit" if count > 0 else "not even one block fits"
        raise ProcessFatal(
            f"one request of --max-model-len {resolved.max_model_len} tokens needs {size_text(needed * block_bytes)} of KV cache "
            f"and {size_text(max(budget, 0))} are there; with this memory {fits}"
        )
    return count


def size_text(count: int) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << size:
            return f"{count / 2**size:.2f} {unit}"
    return f"{count} bytes"
