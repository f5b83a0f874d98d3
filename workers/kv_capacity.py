"""Whether the longest request has room in the KV cache, and where states leave checkpoints. No torch: every engine asks, the fake one
too."""

from collections.abc import Sequence

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.engine import CacheConfig
from meshlm.protocol.config.model import AUTO_LEN
from meshlm.protocol.kv import FullAttention, KVSpec, RecurrentState, longest_request, pages_of, step_tokens
from meshlm.runtime.errors import ContextTooLong, ProcessFatal

CHECKPOINT_TOKENS = 512  # between checkpoints of states, at least, where nobody says


def num_blocks(
    config: MeshConfig,
    budget: int,
    block_bytes: int,
    specs: Sequence[KVSpec] = (FullAttention(),),
    max_drafts: int = 0,
    block_size: int = 0,
) -> int:
    """Blocks within `budget` bytes, or as many as --num-gpu-blocks-override says, of block tables with these groups. ProcessFatal when
    the longest request would not fit, with the one that would; with --max-model-len auto ContextTooLong, if there is one.

    block_size: tokens of a block, where they are not the configured ones."""
    resolved = config.require_resolved()
    block_size, longest = block_size or config.cache.block_size, resolved.max_model_len
    at_once = step_tokens(resolved.max_num_batched_tokens, config.scheduler.async_depth, max_drafts)
    wanted = config.cache.num_gpu_blocks_override
    count = budget // block_bytes if wanted is None else wanted
    needed = pages_of(specs, block_size, longest, at_once)
    if count >= needed:
        return count
    most = longest_request(specs, block_size, count, longest, at_once)
    fits = f"--max-model-len {most} would fit" if most > 0 else "not even one block fits"
    text = (
        f"one request of --max-model-len {longest} tokens needs {size_text(needed * block_bytes)} of KV cache "
        f"and {size_text(max(budget, 0))} are there; with this memory {fits}"
        if wanted is None
        else f"--num-gpu-blocks-override {wanted}: one request of --max-model-len {longest} tokens needs {needed} KV blocks; "
        f"with {wanted} {fits}"
    )
    if config.model.max_model_len == AUTO_LEN and most > 0:
        raise ContextTooLong(text, most)
    raise ProcessFatal(text)


def state_spec(cache: CacheConfig, block_size: int) -> RecurrentState:
    """The policy of recurrent states with blocks of so many tokens. ProcessFatal where these do not divide --mamba-block-size."""
    mode = cache.mamba_cache_mode
    if mode == "auto":
        mode = "align" if cache.enable_prefix_caching else "none"
    if mode == "none" or not cache.enable_prefix_caching:
        return RecurrentState("none")
    size = cache.mamba_block_size or -(-CHECKPOINT_TOKENS // block_size) * block_size
    if size % block_size:
        raise ProcessFatal(
            f"--mamba-block-size {size}: no multiple of this model's KV block of {block_size} tokens; "
            f"{-(-size // block_size) * block_size} would do"
        )
    return RecurrentState(mode, size // block_size)


def size_text(count: int) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << size:
            return f"{count / 2**size:.2f} {unit}"
    return f"{count} bytes"
