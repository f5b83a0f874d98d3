"""Attention on a GPU with --deterministic: one kernel for decodes, prompts and their chunks (kernels/batch_invariant)."""

import torch
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.batch_invariant.attention import LARGEST_DIM, Workspace, attention
from meshlm.protocol.model import ModelSpec
from meshlm.workers.attention.sparse_latent import ToChoose
from meshlm.workers.batch import CrossCache, StepInputs
from meshlm.workers.layers.ops import AttentionShape, LatentShape, LayerStep
from meshlm.workers.states.torch_states import StepStates


class InvariantAttention:
    """One step. Needs `batch.columns`."""

    def __init__(self, batch: StepInputs, block_size: int, workspace: Workspace) -> None:
        assert batch.columns is not None
        columns = batch.columns
        self._batch, self._workspace = batch, workspace
        self._longest = columns.blocks.shape[1] * block_size
        self._decodes = batch.num_decodes == columns.n
        shared = (columns.rows, columns.starts, columns.ends, columns.n)
        self._columns = [Columns(*shared, blocks) for blocks in batch.block_tables]  # by group

    def attend(
        self, qkv: Tensor, step: LayerStep, heads: AttentionShape, scale: float, sliding_window: int = 0
    ) -> Tensor:
        ops, batch, table, cache = step
        query = ops.rope_cache(qkv, batch, table, cache, heads)
        out = torch.empty_like(query)
        attention(
            query, cache.keys, cache.values, self._columns[cache.group], scale, out, self._workspace,
            longest=self._longest, decodes=self._decodes, window=sliding_window,
        )  # fmt: skip
        return out

    def attend_latent(
        self, query: Tensor, latent: Tensor, step: LayerStep, heads: LatentShape, scale: float, chosen: ToChoose = None
    ) -> Tensor:
        raise AssertionError(REFUSED)

    def attend_cross(self, query: Tensor, cache: CrossCache, scale: float) -> Tensor:
        raise AssertionError(REFUSED)

    def states(self, group: int) -> StepStates:
        raise AssertionError(REFUSED)


REFUSED = "the settings refuse models with such layers"


class InvariantBackend:
    name, graphs, fp8 = "invariant", True, False

    def __init__(self) -> None:
        self._workspaces: dict[torch.device, Workspace] = {}

    def unsupported(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, block_size: int) -> str:
        if device.type != "cuda":
            return "it needs a CUDA device"
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            return f"not proven for a GPU of compute capability {capability[0]}.{capability[1]}, but for 9.0"
        for dim in {one.head_dim for one in spec.attentions}:
            if not 16 <= dim <= LARGEST_DIM:
                return f"not proven for heads of {dim}, but for those of 16 to {LARGEST_DIM}"
        if block_size & (block_size - 1) or block_size < 8:
            return f"--block-size {block_size} is not a power of two from 8 up"
        return ""

    def step(self, batch: StepInputs, block_size: int) -> InvariantAttention:
        workspace = self._workspaces.get(batch.device)
        if workspace is None:
            workspace = self._workspaces[batch.device] = Workspace(batch.device)
        return InvariantAttention(batch, block_size, workspace)
