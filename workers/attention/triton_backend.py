"""Attention by the Triton kernels: decodes split over the GPU, everything else by tiles of queries."""

import torch
import triton
from torch import Tensor

from meshlm.kernels.attention import kernel
from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import ForwardBatch, LayerCache

MAX_SPLITS = 32
PROGRAMS_PER_SM = 2.0


def num_splits(programs: int, device: torch.device) -> int:
    """Parts of each context, so that a decode of `programs` (requests x kv heads) fills the GPU. A power of two."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = PROGRAMS_PER_SM * sms / programs
    return min(MAX_SPLITS, triton.next_power_of_2(int(wanted))) if wanted >= 2 else 1


class Workspace:
    """Room for the parts of split contexts, shared by all layers and steps (they run one after the other)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat = torch.empty(0, device=device)

    def of(self, requests: int, heads: int, splits: int, dim: int) -> tuple[Tensor, Tensor]:
        need = requests * heads * splits
        if self._flat.numel() < need * (dim + 2):
            self._flat = torch.empty(need * (dim + 2), device=self._device)
        return self._flat[: need * dim], self._flat[need * dim :]


class TritonAttention:
    """One step. Needs `batch.columns`."""

    def __init__(self, batch: ForwardBatch, workspace: Workspace) -> None:
        assert batch.columns is not None
        self._batch, self._columns, self._workspace = batch, batch.columns, workspace
        columns = batch.columns
        self._decodes = kernel.Columns(columns.rows, columns.starts, columns.ends, batch.num_decodes, columns.blocks)

    def run(self, query: Tensor, cache: LayerCache, scale: float, sliding_window: int = 0) -> Tensor:
        out = torch.empty_like(query)
        extras = kernel.PLAIN if not sliding_window else kernel.Extras(window=sliding_window)
        decodes, columns = self._batch.num_decodes, self._columns
        if decodes:
            _, heads, dim = query.shape
            splits = num_splits(decodes * cache.keys.shape[2], query.device)
            room = self._workspace.of(decodes, heads, splits, dim) if splits > 1 else (query, query)
            kernel.decode(query, cache.keys, cache.values, self._decodes, scale, out, room, splits, extras)
        if columns.n > decodes:
            kernel.prefill(query, cache.keys, cache.values, columns, scale, out, decodes, extras)
        return out


class TritonBackend:
    """See `meshlm.workers.attention.backend.Backend`."""

    name, graphs = "triton", True

    def __init__(self) -> None:
        self._workspaces: dict[torch.device, Workspace] = {}

    def unsupported(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, block_size: int) -> str:
        if device.type != "cuda":
            return "it needs a CUDA device"
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"it needs compute capability 8.0, this GPU has {major}.{minor}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it computes in float16 or bfloat16, not {dtype}"
        if spec.head_dim > 256:
            return f"it supports head sizes up to 256, this model has {spec.head_dim}"
        if block_size & (block_size - 1) or block_size < 8:
            return f"--block-size {block_size} is not a power of two from 8 up"
        return ""

    def step(self, batch: ForwardBatch, block_size: int) -> TritonAttention:
        workspace = self._workspaces.get(batch.device)
        if workspace is None:
            workspace = self._workspaces[batch.device] = Workspace(batch.device)
        return TritonAttention(batch, workspace)
