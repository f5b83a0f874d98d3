"""Attention in two steps: queries and keys are rotated, keys and values stored; then it reads the cache alone."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.attention.seen import Seen
from meshlm.workers.attention.sparse_latent import Choice, Chosen, LastChoice, attend_choice, choose
from meshlm.workers.batch import CrossCache, LayerCache, StepInputs
from meshlm.workers.layers.ops import AttentionShape, LatentShape, LayerStep
from meshlm.workers.states.torch_states import TorchStates


class RotatedAttention(ABC):
    def __init__(self, batch: StepInputs, block_size: int) -> None:
        self._batch, self._block_size = batch, block_size
        self._states: dict[int, TorchStates] = {}
        self._choice: Choice | None = None  # of the last index

    def states(self, group: int) -> TorchStates:
        found = self._states.get(group)
        if found is None:
            found = self._states[group] = TorchStates(self._batch, group, self._block_size)
        return found

    def attend(
        self, qkv: Tensor, step: LayerStep, heads: AttentionShape, scale: float, sliding_window: int = 0
    ) -> Tensor:
        query = step.ops.rope_cache(qkv, step.batch, step.table, step.cache, heads)
        seen = Seen(scale, sliding_window, heads.softcap, heads.chunk, heads.sinks, heads.slopes)
        return self.run(query, step.cache, seen)

    def attend_latent(
        self,
        query: Tensor,
        latent: Tensor,
        step: LayerStep,
        heads: LatentShape,
        scale: float,
        chosen: Chosen | LastChoice | None = None,
    ) -> Tensor:
        """Absorbed: all heads over one, whose keys are the cache's lines, and whose values are the latents in them."""
        ops, batch, table, cache = step
        ops.latent_cache(query, latent, batch, table, cache, heads)
        absorbed = torch.cat((heads.absorb(query), query[..., heads.nope :]), dim=-1)
        if chosen is not None:
            if isinstance(chosen, Chosen):
                behind = cache.keys.flatten(0, 1)[..., latent.shape[1] :]
                behind.index_copy_(0, batch.slot_mapping[cache.group], chosen.key[:, None])
                self._choice = choose(chosen, cache, batch)
            assert self._choice is not None
            return heads.values(attend_choice(absorbed, self._choice, cache, heads.rank, scale))
        return heads.values(self.run(absorbed, cache, Seen(scale))[..., : heads.rank])

    def attend_cross(self, query: Tensor, cache: CrossCache, scale: float) -> Tensor:
        """In plain torch, one request after the other, over its page as it lies there."""
        batch, length = self._batch, cache.length
        assert batch.lens is not None
        counts = [1] * batch.num_decodes + list(batch.lens.query_lens)
        out, begin = torch.empty_like(query), 0
        for page, count in zip(batch.block_tables[cache.group][:, 0].tolist(), counts, strict=True):
            lines = query[begin : begin + count], cache.keys[page, :length], cache.values[page, :length]
            q, k, v = (one.transpose(0, 1)[None] for one in lines)
            found = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
            out[begin : begin + count] = found[0].transpose(0, 1)
            begin += count
        return out

    @abstractmethod
    def run(self, query: Tensor, cache: LayerCache, seen: Seen) -> Tensor:
        """query [t, q_heads, head_dim] -> [t, q_heads, head_dim]. This step's keys and values are in the cache."""
