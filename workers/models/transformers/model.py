"""A decoder of the transformers library, computed by its own modules: only what attention does is ours.

A step's tokens are one flat row with their positions. Queries and keys come rotated, so ours turns them by an angle of zero.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.attention.backend import StepAttention
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.distributed.communicator import SINGLE_RANK, Communicator
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.layers.ops import AttentionShape, LayerStep, Ops, TorchOps, make_ops
from meshlm.workers.models.decoder import Decoder, DecoderLayer, KVScale, LayerClasses, LayerExecutor
from meshlm.workers.models.transformers import interface
from meshlm.workers.models.transformers.look import SHORTEST, attending
from meshlm.workers.models.transformers.parallel import Stage
from meshlm.workers.models.transformers.self_test import why_unequal


class _Step(NamedTuple):
    """The step that is being computed, as layers need it."""

    batch: StepInputs
    caches: list[LayerCache]
    attention: StepAttention


class _Layer:
    """Attention of one layer; see interface.py."""

    def __init__(self, owner: "TransformersModel", layer: int) -> None:
        spec, attention = owner.local, owner.local.layers[layer].attention
        assert attention is not None
        self._owner, self._layer, self._window = owner, layer, attention.sliding_window
        heads = (spec.num_attention_heads, attention.num_key_value_heads, attention.head_dim)
        self._shape = AttentionShape(*heads, None, 0.0, spec.attn_logit_softcapping)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        step, size, wide = self._owner.step, self._shape.head_dim, value.shape[3]
        assert step is not None
        self._shape.sinks = sinks
        if wide < size:  # latent attention that is projected up: values are shorter than keys
            value = F.pad(value, (0, size - wide))
        qkv = torch.cat((query, key, value), dim=1)[0].transpose(0, 1).flatten(1)  # [t, (heads + 2 kv_heads) d]
        scale = size**-0.5 if scaling is None else scaling
        ours = LayerStep(self._owner.ops, step.batch, self._owner.rope, step.caches[self._layer])
        out = step.attention.attend(qkv, ours, self._shape, scale, self._window)  # [t, heads, d]
        return out[None, ..., :wide]


class _NoLayer(DecoderLayer):
    """A marker that tells others that no layer here is of ours."""


class TransformersModel(Decoder):
    """The engine knows it as a `Decoder`."""

    classes = LayerClasses(_NoLayer)

    def __init__(self, spec: ModelSpec, max_len: int, shard: Shard, model: Any, modules: tuple[str, ...]) -> None:
        """model: transformers' own, whole or this rank's part of each layer. modules: the names of those that attend, layer by layer of
        this stage."""
        nn.Module.__init__(self)
        self.spec, self.shard, self.local = spec, shard, shard.local(spec)
        self.comm: Communicator = SINGLE_RANK
        self.ops: Ops = TorchOps()
        self.executor: LayerExecutor | None = None
        self.classifier = None
        self.layers = nn.ModuleList()
        self.rope = torch.empty(0)
        self.step: _Step | None = None
        self._max_len = max(max_len, SHORTEST)
        for layer, module in enumerate(attending(model, modules)):
            setattr(module, interface.LAYER, _Layer(self, layer))
        self._stage = Stage(model, shard) if shard.pp_size > 1 else None
        self.base = model.base_model
        self.config = model.config
        if shard.is_last:
            interface.give(model)
            self.head_model = model

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        self.ops = make_ops(device, dtype)
        size = self.spec.head_dim
        self.rope = torch.ones(self._max_len, size, dtype=torch.float32, device=device)
        self.rope[:, size // 2 :] = 0

    def join(self, comm: Communicator) -> None:
        """See `Decoder.join`. The model is held against transformers' own attention here, where ranks can meet."""
        self.comm = comm
        if reason := why_unequal(self):
            assert self.spec.transformers is not None
            raise ProcessFatal(
                f"--model-impl transformers: {self.spec.transformers.architecture} gives with our attention other states than "
                f"with transformers' own ({reason})"
            )

    def forward(
        self, batch: StepInputs, caches: list[LayerCache], attention: StepAttention, residual: Tensor | None = None
    ) -> Tensor:
        ids, positions = batch.known_ids, batch.positions
        # while kernels are compiled ahead, nobody has written them, and torch would stop at what stands there
        if ids.is_cuda:
            ids, positions = ids.clamp(0, self.spec.vocab_size - 1), positions.clamp(0, self._max_len - 1)
        own: Tensor | None = None
        if batch.vectors is not None and self.shard.is_first:
            own = batch.with_vectors(self.base.get_input_embeddings()(ids))
        self.step = _Step(batch, caches, attention)
        try:
            return self.states(ids, positions, own if self.shard.is_first else residual)
        finally:
            self.step = None

    def states(self, ids: Tensor, positions: Tensor, vectors: Tensor | None) -> Tensor:
        """Computes the layers that are here for tokens [t]: [t, hidden], normed behind the last stage. vectors [t, hidden]: instead of
        the tokens' own, or what the stage before gives."""
        tokens = {"input_ids": ids[None]} if vectors is None else {"inputs_embeds": vectors[None]}
        if self._stage is not None and vectors is not None:
            self._stage.given = vectors[None]
        found: Tensor = self.base(**tokens, position_ids=positions[None], use_cache=False).last_hidden_state
        return (found if self._stage is None or self.shard.is_last else self._stage.take())[0]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Decoder.logits`; each rank computes all of them."""
        found = interface.logits_of(self.head_model, hidden)
        return found if out is None else out.copy_(found)

    @contextmanager
    def shortened(self) -> Iterator[int]:
        yield self.local.num_hidden_layers

    def active_parameters(self) -> int:
        """See `Decoder.active_parameters`: all that are here."""
        return sum(parameter.numel() for parameter in self.parameters())

    def warm_rows(self, most: int) -> set[int]:
        """No kernel of ours has variants by the number of rows."""
        return set()

    def kv_scales(self) -> list[KVScale]:
        return [(None, None)] * self.local.num_hidden_layers
