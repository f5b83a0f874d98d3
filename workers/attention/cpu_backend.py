"""Attention on the CPU by the compiled kernel, the same for decodes and prompt chunks: what a row gets does not depend on its step."""

import torch
from torch import Tensor

from meshlm.kernels.attention.seen import Seen
from meshlm.kernels.cpu import kernel
from meshlm.kernels.cpu.library import library
from meshlm.protocol.model import ModelSpec
from meshlm.workers.attention.torch_backend import RotatedAttention
from meshlm.workers.batch import CrossCache, LayerCache, StepInputs


class CpuAttention(RotatedAttention):
    def __init__(self, batch: StepInputs, block_size: int) -> None:
        super().__init__(batch, block_size)
        self._spans: dict[tuple[int, int], Tensor] = {}  # the same for all layers of so many heads

    def spans(self, num_heads: int, kv_heads: int) -> Tensor:
        heads = num_heads, kv_heads
        if heads not in self._spans:
            batch = self._batch
            assert batch.lens is not None
            self._spans[heads] = kernel.spans(batch.lens.query_lens, batch.num_decodes, *heads)
        return self._spans[heads]

    def attend_cross(self, query: Tensor, cache: CrossCache, scale: float) -> Tensor:
        """See `StepAttention.attend_cross`: as if each token stood behind the last of what the encoder left, in one long block."""
        spans = self.spans(query.shape[1], cache.keys.shape[2])
        behind = torch.full((len(query),), cache.length - 1)
        tables = self._batch.block_tables[cache.group]
        return kernel.attention(query, cache.keys, cache.values, tables, behind, spans, Seen(scale))

    def run(self, query: Tensor, cache: LayerCache, seen: Seen) -> Tensor:
        batch, spans = self._batch, self.spans(query.shape[1], cache.keys.shape[2])
        tables = batch.block_tables[cache.group]
        return kernel.attention(query, cache.keys, cache.values, tables, batch.positions, spans, seen)


class CpuBackend:
    name, graphs, fp8 = "cpu", False, False

    def unsupported(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, block_size: int) -> str:
        if device.type != "cpu":
            return "it computes on the CPU"
        if dtype != torch.float32:
            return "it computes in float32"
        return "" if library() is not None else "its kernels cannot be compiled here"

    def step(self, batch: StepInputs, block_size: int) -> CpuAttention:
        return CpuAttention(batch, block_size)
