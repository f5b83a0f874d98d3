"""Memory of a worker: how many KV blocks fit, and the KV tensors themselves. Called once, while an engine is made."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.kv import pages_of
from meshlm.runtime import platforms
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers import kv_capacity
from meshlm.workers.attention.backend import Backend
from meshlm.workers.batch import LayerCache
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.kv.layout import KVLayout
from meshlm.workers.kv.pages import SharedBytes
from meshlm.workers.kv_capacity import size_text

FP8_CAPABILITY = (8, 9)
ROOM_FOR_GRAPHS = 512 << 20  # left free where others have much of the GPU
LARGE_PAGE = 2 << 20
ROOM_FOR_WEIGHTS = 0.8  # of a GPU, at most: the rest is for activations and KV cache


def num_pages(config: MeshConfig, budget: int, layout: KVLayout) -> int:
    """Pages within `budget` bytes; no more than all requests at their longest could fill. --num-gpu-blocks-override is taken as it is.

    ProcessFatal when the longest request would not fit, with the one that would."""
    resolved = config.require_resolved()
    drafts = config.speculative.num_speculative_tokens
    budget -= num_draft_pages(config, budget, layout) * layout.page_bytes
    count = kv_capacity.num_blocks(config, budget, layout.page_bytes, layout.specs, drafts, layout.block_size)
    if config.cache.num_gpu_blocks_override is not None:
        return count
    at_once = pages_of(layout.specs, layout.block_size, resolved.max_model_len)
    tokens = len(layout.specs) * -(-resolved.max_num_seqs * resolved.max_model_len // layout.block_size)
    return min(count, max(tokens, resolved.max_num_seqs * at_once))


def draft_lines(config: MeshConfig, budget: int, layout: KVLayout) -> int:
    """Lines of a step's requests with drafts for which there are states (states/drafted.py), at most: as many as fit into an eighth of
    `budget` bytes, those of one request at least; 0 where no drafts and states meet."""
    each, groups = 1 + config.speculative.num_speculative_tokens, layout.state_groups
    if each == 1 or not groups:
        return 0
    override = config.cache.num_gpu_blocks_override
    pages = budget // layout.page_bytes if override is None else override
    return max(each, min(config.require_resolved().max_num_seqs * each, pages // 8 // len(groups)))


def num_draft_pages(config: MeshConfig, budget: int, layout: KVLayout) -> int:
    return draft_lines(config, budget, layout) * len(layout.state_groups)


def layout_of(config: MeshConfig, shard: Shard, cache_dtype: torch.dtype, dtype: torch.dtype) -> KVLayout:
    """The layout of one worker's KV cache. dtype: the model's."""
    resolved, cache = config.require_resolved(), config.cache
    spec = resolved.spec.with_drafter(resolved.drafter.spec if resolved.drafter is not None else None)
    return KVLayout(spec, cache.block_size, resolved.max_model_len, cache_dtype, shard, cache, dtype)


def known_bytes(config: MeshConfig) -> int | None:
    """The KV cache's, where they are known without the weights: from --kv-cache-memory, or of a device that says so."""
    wanted = config.cache.kv_cache_memory
    return platforms.named(config.require_resolved().device).kv_cache_bytes() if wanted is None else wanted


def check_known(config: MeshConfig, layout: KVLayout) -> None:
    """Before the weights are read, which takes minutes: whether the longest request has room. ProcessFatal as of `num_pages`."""
    known = known_bytes(config)
    if known is None and config.cache.num_gpu_blocks_override is not None:
        known = 0  # its number counts, not these bytes
    if known is not None and not config.require_resolved().spec.encoder_only:
        num_pages(config, known, layout)


def taken_by_others() -> int:
    """Bytes of this GPU that are in use and not torch's: other processes and the driver's context. Before anything is loaded."""
    free, total = _gpu()
    return total - free - torch.cuda.memory_reserved()


def profile(
    utilization: float, others: int, caches: Callable[[], list[LayerCache]], run: Callable[[list[LayerCache]], None]
) -> int:
    """Bytes that the KV cache may have: the share of the GPU, less what this worker took since `others` was found (`taken_by_others`),
    and less what a full step needs beside that. So the share is this worker's own, as vLLM counts it.

    `run` computes that step in small caches, which are gone before the rest is counted. What it leaves allocated (workspaces of
    libraries) counts once, among what is taken."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    small = caches()
    before = torch.cuda.memory_allocated()
    try:
        run(small)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        raise ProcessFatal(
            f"a step of --max-num-batched-tokens does not fit: {size_text(before)} of this GPU's {size_text(_gpu()[1])} "
            "are taken "
            "by the weights and by what --max-num-seqs requests need; lower either"
        ) from None
    activations = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del small
    torch.cuda.empty_cache()
    free, total = _gpu()
    others = min(others, taken_by_others())  # a predecessor that was killed may have gone only since
    share = int(total * utilization) - (total - free - others) - activations
    return min(share, free - activations - ROOM_FOR_GRAPHS)


def _gpu() -> tuple[int, int]:
    return torch.cuda.mem_get_info()


def check_weights(needed: int, device: torch.device, redundant: int = 0, copied: int = 0) -> None:
    """ProcessFatal when the weights of this worker are larger than what its GPU has free, with what would do.

    redundant, copied: of these, bytes of redundant experts, and of decoded copies (--decoded-copy)."""
    if device.type != "cuda":
        return
    free, total = _gpu()
    if needed <= free:
        return
    if needed - redundant <= free:
        raise ProcessFatal(
            f"--eplb-config num_redundant_experts: with {size_text(redundant)} of redundant experts the weights take "
            f"{size_text(needed)}, and this GPU has {size_text(free)} free; give less"
        )
    if needed - copied <= free:
        raise ProcessFatal(
            f"--decoded-copy: with {size_text(copied)} of decoded copies the weights take {size_text(needed)}, and this GPU has "
            f"{size_text(free)} free; use never"
        )
    times = 2
    while needed / times > ROOM_FOR_WEIGHTS * total:
        times *= 2
    raise ProcessFatal(
        f"the weights take {size_text(needed)} and this GPU has {size_text(free)} free of {size_text(total)}: "
        + (
            "end what else runs on it"
            if needed <= ROOM_FOR_WEIGHTS * total
            else f"split them over {times} times as many GPUs (--tensor-parallel-size)"
        )
        + ", or serve a smaller model"
    )


def full_step(max_num_batched_tokens: int, max_model_len: int) -> list[int]:
    """Lengths of the prompts that fill a step."""
    length = min(max_num_batched_tokens, max_model_len)
    left = max_num_batched_tokens % length
    return [length] * (max_num_batched_tokens // length) + ([left] if left else [])


def cache_dtype(
    wanted: str, dtype: torch.dtype, device: torch.device, backend: Backend, *, latent: bool = False
) -> torch.dtype:
    """The dtype of the KV tensors, for --kv-cache-dtype `wanted` and a model of `dtype`. ProcessFatal where FP8 cannot be used.

    latent: the model has latent attention."""
    if wanted == "auto":
        return dtype
    if latent:
        raise ProcessFatal(f"--kv-cache-dtype {wanted}: the latents of this model are not kept in 8 bits; use auto")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < FP8_CAPABILITY:
            raise ProcessFatal(
                f"--kv-cache-dtype {wanted}: it needs compute capability 8.9, this GPU has {major}.{minor}; use auto"
            )
    if not backend.fp8:
        raise ProcessFatal(f"--kv-cache-dtype {wanted}: the attention backend {backend.name} cannot read it; use auto")
    return torch.float8_e5m2 if wanted == "fp8_e5m2" else torch.float8_e4m3fn


def make_caches(
    layout: KVLayout,
    count: int,
    device: torch.device,
    scales: list[tuple[float, float]] | None = None,
    tensors: list[Tensor] | None = None,
) -> list[LayerCache]:
    """`count` pages, all zeros, as each layer sees them. ProcessFatal when they do not fit. `scales`: of an FP8 cache, by layer.

    tensors: their memory, where it is there already."""
    if tensors is None:
        tensors, _ = kv_tensors(layout, count, device)
    if layout.dtype.itemsize > 1 or scales is None:
        scales = [(1.0, 1.0)] * layout.num_layers
    return layout.caches(tensors, scales)


def kv_tensors(
    layout: KVLayout, count: int, device: torch.device, *, shared: bool = False
) -> tuple[list[Tensor], SharedBytes | None]:
    """The tensors of `count` pages, all zeros. ProcessFatal when they do not fit.

    shared: on the host in memory that other processes can map; on a GPU in one allocation, which other processes can open."""
    shape = layout.shape(count)
    each = math.prod(shape)
    try:
        if not shared or not count:
            return [zeros(shape, torch.uint8, device) for _ in range(layout.num_tensors)], None
        if device.type != "cpu":
            flat = zeros((layout.num_tensors, *shape), torch.uint8, device)
            return list(flat.unbind()), None
        room = -(-each // LARGE_PAGE) * LARGE_PAGE
        memory = SharedBytes(layout.num_tensors * room)
    except (torch.OutOfMemoryError, MemoryError, OSError, RuntimeError) as error:
        raise ProcessFatal(f"no memory for {count} KV blocks: {str(error).splitlines()[0]}") from None
    flat = torch.from_numpy(memory.array)
    return [flat[begin : begin + each].view(shape) for begin in range(0, len(flat), room)], memory


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the CPU, pages that are not touched yet cost nothing: numpy asks for them with calloc, torch fills them."""
    if device.type == "cpu" and 0 not in shape:
        flat = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        return torch.from_numpy(flat).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)
