"""Attention on the CPU: decodes by the compiled kernel, prompt chunks by torch."""

import torch
from torch import Tensor

from meshlm.kernels.cpu import kernel
from meshlm.protocol.model import ModelSpec
from meshlm.workers.attention.torch_backend import TorchAttention
from meshlm.workers.batch import ForwardBatch, LayerCache


class _CpuAttention(TorchAttention):
    def _decode(self, query: Tensor, cache: LayerCache, scale: float, window: int) -> Tensor:
        batch = self._batch
        return kernel.paged_decode(query, cache.keys, cache.values, batch.block_tables, batch.seq_lens, scale, window)


class CpuBackend:
    """See `meshlm.workers.attention.backend.Backend`."""

    name, graphs, fp8 = "cpu", False, False

    def unsupported(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, block_size: int) -> str:
        if device.type != "cpu":
            return "it computes on the CPU"
        if dtype != torch.float32:
            return "it computes in float32"
        return "" if kernel.library() is not None else "its kernels cannot be compiled here"

    def step(self, batch: ForwardBatch, block_size: int) -> _CpuAttention:
        return _CpuAttention(batch, block_size)
