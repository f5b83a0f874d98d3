"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share: pre-norm attention and gated MLP, or a mixture of experts.

`ForwardContext` says all that the layers of a step share, `Shard` which heads, columns and layers are here. Query,
key and value projections are one product, gate and up projections another; a layer has two sums over the tensor-parallel ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.attention.backend import StepAttention
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.distributed.communicator import SINGLE_RANK, Communicator
from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.distributed.shard import WHOLE, Shard
from meshlm.workers.formats.format import WeightedLayer
from meshlm.workers.forward_context import ForwardContext
from meshlm.workers.layers.elements import MLP, Embedding, LayerNorm, Linear, RMSNorm
from meshlm.workers.layers.moe import MoE
from meshlm.workers.layers.ops import AttentionShape, LayerStep, Ops, TorchOps, make_invariant_ops, make_ops
from meshlm.workers.layers.rope import axes_of, rope_table, turned_table
from meshlm.workers.layers.summing_ops import SummingOps
from meshlm.workers.lora.step_adapters import LineAdapters, StepAdapters
from meshlm.workers.models.classifier import Classifier
from meshlm.workers.models.rope_tables import use_tables
from meshlm.workers.moe.registry import group_dispatch, no_dispatch
from meshlm.workers.partial_sum import Kind, PartialSum

KVScale = tuple[float | None, float | None]
"""The scales of keys and values in an FP8 cache; None where the checkpoint has none."""


class Attention(nn.Module):
    """Grouped-query self-attention over the paged cache."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self._spec, record = spec, spec.layers[layer]
        self.window, self.chunk, self.rotates, self.head_dim, self.kv_heads = 0, 0, True, 0, 0
        if (attention := record.attention) is not None:
            self.window, self.chunk = attention.sliding_window, attention.attention_chunk_size
            self.rotates = attention.rotates
            self.head_dim, self.kv_heads = attention.head_dim, attention.num_key_value_heads
        self.table: Tensor | None = None  # of a layer that rotates otherwise than the model
        self._clip = spec.clip_qkv
        self.kv_scale: KVScale = (None, None)
        self.make(spec, record)

    def make(self, spec: ModelSpec, layer: LayerSpec) -> None:
        """Makes the layers. `qkv` is the product behind the norm, `o` the last one."""
        dim, heads = self.head_dim, spec.num_attention_heads
        self.scale = (spec.query_pre_attn_scalar or dim) ** -0.5
        self.qkv = Linear(spec.hidden_size, (heads + 2 * self.kv_heads) * dim, bias=spec.attention_bias)
        self.o = Linear(heads * dim, spec.hidden_size, bias=spec.output_bias)
        self.q_norm = RMSNorm(dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.sinks: nn.Parameter | None = None
        if spec.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(spec.num_attention_heads), requires_grad=False)
        self._heads: AttentionShape | None = None

    def prepare(self, ops: Ops) -> None:
        """Computes what depends on the loaded layers; called after theirs."""
        spec, norms, slopes = self._spec, None, None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.weight, self.k_norm.weight
        if spec.alibi_slopes:
            slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=self.o.weight.device)
        heads, sinks = spec.num_attention_heads, None if self.sinks is None else self.sinks.data
        self._heads = AttentionShape(
            heads, self.kv_heads, self.head_dim, norms, spec.rms_norm_eps, spec.attn_logit_softcapping, sinks,
            self.chunk, slopes,
        )  # fmt: skip

    def forward(
        self, x: PartialSum, norm: RMSNorm, cache: LayerCache, context: ForwardContext, normed: Tensor | None = None
    ) -> PartialSum:
        """Computes what attention adds to the residual, which has x in it then. normed: norm(x), where that is known (first
        layer)."""
        if normed is None:
            qkv, residual = self.qkv.after_norm(x, norm, context.ops)
        else:
            qkv, residual = self.qkv(normed, context.ops), x.value
        return self.o.row_parallel(self.attend(qkv, cache, context), residual, context.ops)

    def attend(self, qkv: Tensor, cache: LayerCache, context: ForwardContext) -> Tensor:
        assert self._heads is not None
        step = LayerStep(context.ops, context.batch, context.rope if self.table is None else self.table, cache)
        qkv = qkv.clamp_(-self._clip, self._clip) if self._clip else qkv
        out = context.attention.attend(qkv, step, self._heads, self.scale, self.window)
        return out.flatten(1)


class DecoderLayer(nn.Module):
    """Attention, and an MLP or a mixture of experts. Each begins with a norm, which first adds to the residual what came before."""

    def __init__(self, spec: ModelSpec, layer: int, classes: "LayerClasses") -> None:
        super().__init__()
        self.attention = classes.attention(spec, layer)
        self.make_norms(spec)
        mlp = spec.layers[layer].mlp
        self.mlp: MLP | MoE = classes.experts(spec) if mlp is None else classes.mlp(spec, mlp.intermediate_size)

    def make_norms(self, spec: ModelSpec) -> None:
        """Makes the norms of the layer; another kind of layer has others."""
        self.input_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self, x: PartialSum, cache: LayerCache, context: ForwardContext, normed: Tensor | None = None
    ) -> PartialSum:
        """Computes what the MLP adds to the residual, which has the rest in it then. normed: see `Attention.forward`."""
        x = self.attention(x, self.input_norm, cache, context, normed)
        found: PartialSum = self.mlp(x, self.post_norm, context.batch, context.ops)
        return found


class LayerClasses(NamedTuple):
    layer: type[DecoderLayer] = DecoderLayer
    attention: type[Attention] = Attention
    state: type[Attention] = Attention  # in the place of attention, where a layer keeps a recurrent state
    mlp: type[MLP] = MLP
    experts: type[MoE] = MoE


class LayerExecutor(Protocol):
    """Another way to compute what stands between the attention calls (compiled.py)."""

    def run(
        self, model: "Decoder", batch: StepInputs, caches: list[LayerCache], attention: StepAttention
    ) -> Tensor: ...


class Decoder(nn.Module):
    """Embedding, layers, norm, head: those that this shard has. A family that computes otherwise names the classes of its layers,
    and what it does differently around them (gemma.py)."""

    classes: ClassVar[LayerClasses] = LayerClasses()
    deterministic = False  # --deterministic, which is said before `prepare`

    def __init__(self, spec: ModelSpec, max_len: int, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.spec, self.shard, self.local = spec, shard, shard.local(spec)
        begin, end, rows = shard.vocab(spec.vocab_size)
        tied = spec.tie_word_embeddings
        self.embed = (
            Embedding(rows, spec.hidden_size, begin, end) if shard.is_first or (tied and shard.is_last) else None
        )
        self.layers = nn.ModuleList(
            self.classes.layer(self.local, layer, self.classes) for layer in range(self.local.num_hidden_layers)
        )
        self.norm: RMSNorm | LayerNorm | None = RMSNorm(spec.hidden_size, spec.rms_norm_eps) if shard.is_last else None
        self.head = Linear(spec.hidden_size, rows, bias=False) if shard.is_last and not tied else None
        self.embedding_size = spec.hidden_size
        self.ops: Ops = TorchOps()
        self.executor: LayerExecutor | None = None
        self.classifier = Classifier(spec, spec.head) if spec.head is not None and shard.is_last else None
        self.rope = torch.empty(0)
        self.comm: Communicator = SINGLE_RANK
        self._max_len, self._head_rows, self._head_weight, self.tapped = max_len, rows, torch.empty(0), torch.empty(0)
        self._taps: tuple[int, ...] = ()
        self._axes = torch.empty(0)  # of M-RoPE (layers/rope.py: axes_of)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Computes, after loading, what is computed once."""
        self.ops = (make_invariant_ops if self.deterministic else make_ops)(device, dtype)
        if self.classifier is not None and self.spec.head is not None and self.spec.head.token_ids:
            if self.head is not None:
                self.classifier.take(self.head.format.values(self.head))
            elif self.embed is not None:  # tied
                self.classifier.take(self.embed.weight.data)
        is_timed = self.spec.media is not None and self.spec.media.is_timed
        self.rope = rope_table(self.spec, self._max_len * (1 + is_timed)).to(device=device)
        self._axes = axes_of(self.spec, self.rope)
        self.prepare_weights(self)
        attentions = [layer.attention for layer in self.layers if isinstance(layer, DecoderLayer)]
        use_tables(attentions, self.spec, self._max_len, self.rope)
        self._use_dispatcher()
        if self.head is not None:
            self._head_weight = self.head.weight.data
        elif self.shard.is_last and self.embed is not None:
            self._head_weight = self.embed.weight.data

    def prepare_weights(self, root: nn.Module) -> None:
        """Brings the weights of a module of it, or of all, into the form that computes."""
        for module in root.modules():
            if isinstance(module, WeightedLayer):
                module.prepare(self.ops)
            elif isinstance(module, MoE):
                module.router.prepare(self.ops)
            elif module is self.embed and self.head is None and self.shard.is_last:
                module.prepare(self.ops)
        for module in root.modules():
            if isinstance(module, DecoderLayer):
                module.attention.prepare(self.ops)

    def join(self, comm: Communicator) -> None:
        """Tells the model, before the first step, how to reach the other ranks."""
        self.comm = comm
        if self.shard.tp_size > 1:
            self.ops = SummingOps(self.ops, comm, whole=self.shard.pp_size == 1)
            if self.embed is not None:
                self.embed.several = True
            self._use_dispatcher()

    def _use_dispatcher(self) -> None:
        for module in self.mixtures():
            module.use(no_dispatch(module.moe, self.shard.tp_size), deterministic=self.deterministic)

    def share_experts(self, group: ExpertGroup, backend: str, *, slots: bool = False) -> None:
        """Before the first step, after `join`: each member of the group has some of the experts. backend: --all2all-backend. slots:
        which these are changes (workers/moe/placement)."""
        for module in self.mixtures():
            module.use(group_dispatch(module.moe, self.shard, group, backend, slots=slots))

    def use_slots(self) -> None:
        """After `join`, of tensor-parallel ranks: which experts each of them has changes."""
        for module in self.mixtures():
            module.use(no_dispatch(module.moe, self.shard.tp_size, slots_of=self.shard.tp_rank))

    def mixtures(self) -> list[MoE]:
        return [module for module in self.modules() if isinstance(module, MoE)]

    def forward(
        self, batch: StepInputs, caches: list[LayerCache], attention: StepAttention, residual: Tensor | None = None
    ) -> Tensor:
        """Hidden states [t, hidden] after the last norm. In a pipeline: the residual of the stage before goes in (it may be
        changed), what the next stage takes comes out."""
        if (
            self.executor is not None
            and batch.adapters is None
            and batch.rope_shift is None
            and batch.deepstack is None
        ):
            return self.executor.run(self, batch, caches, attention)
        ops = self.ops
        x: PartialSum
        normed: Tensor | None = None
        if self.shard.is_first:
            x, normed = self.embedded(batch.known_ids, batch.adapters)
            if batch.vectors is not None:
                own = x.value if x.kind is Kind.WHOLE else ops.finish_sum(x, x.value.dtype)
                x, normed = PartialSum(batch.with_vectors(own)), None
            x = self.entered(x, batch)
        else:
            assert residual is not None
            x = PartialSum(residual)
        context = self.context(batch, attention)
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True), 1):
            assert isinstance(layer, DecoderLayer)
            x = layer(x, cache, context, normed)
            normed = None
            if batch.deepstack is not None and number <= len(batch.deepstack):
                x = PartialSum(self.state(x) + batch.deepstack[number - 1])
            if number in self._taps:
                x = self._leave(x, number)
        return self.normed(x) if self.norm is not None else self.state(x)

    def context(self, batch: StepInputs, attention: StepAttention) -> ForwardContext:
        """What all layers of a step are given."""
        table = self.rope
        if batch.rope_shift is not None:
            table, lines = turned_table(table, batch.positions + batch.rope_shift, self._axes)
            batch = replace(batch, turned_by=lines)
        return ForwardContext.of(batch, table, attention, self.ops)

    def state(self, x: PartialSum) -> Tensor:
        """[t, hidden]: the residual with all that is added to it, in the residual's memory."""
        return x.value if x.residual is None else x.residual.add_(self.ops.finish_sum(x, x.residual.dtype))

    def tap(self, layers: tuple[int, ...], most: int) -> None:
        """Once, after `prepare` and before the first step of at most so many tokens: from then on `forward` leaves in the first rows of
        `tapped` [most, layers * hidden] the states behind its first layers[0] layers, its first layers[1], and so on. Layers are
        computed one by one then, no two micro-batches at once. ProcessFatal: it does not compute as most models do."""
        if type(self).forward is not Decoder.forward or not all(0 < one <= len(self.layers) for one in layers):
            raise ProcessFatal(f"{self.spec.architecture} does not give the states behind its layers {layers}")
        size, like = len(layers) * self.spec.hidden_size, self.tapped
        self.tapped = torch.empty(most, size, dtype=like.dtype, device=self.rope.device)
        self._taps, self.executor = layers, None

    def _leave(self, x: PartialSum, behind: int) -> PartialSum:
        state = self.state(x)
        places = self.tapped[: len(state)].unflatten(1, (len(self._taps), -1))
        for place, layers in enumerate(self._taps):
            if layers == behind:
                places[:, place].copy_(state)
        return PartialSum(state)

    def normed(self, x: PartialSum) -> Tensor:
        assert self.norm is not None
        return self.ops.norm(x, (self.norm.weight, self.norm.eps))[0]

    def encode_audio(self, samples: Tensor, pages: Sequence[int], caches: list[LayerCache]) -> None:
        """Encodes a request's audio, float32 [n], into its pages, which stand by group; for models with an audio encoder."""
        raise AssertionError(f"{self.spec.architecture} has no audio encoder")

    def token_projection(self) -> Tensor | None:
        """[any, hidden], where the model projects the states that embeddings are made of."""
        return None

    def idle(self) -> None:
        """Compute a step without tokens: what other ranks send to the experts here."""
        for module in self.mixtures():
            module.idle()

    def embedded(self, ids: Tensor, adapters: StepAdapters | None = None) -> tuple[PartialSum, Tensor | None]:
        """The hidden states that the first layer gets; see `Embedding.forward`."""
        if adapters is not None and adapters.in_embedding():
            return PartialSum(self.embedding(ids, adapters)), None
        first = self.layers[0]
        assert self.embed is not None and isinstance(first, DecoderLayer)  # noqa: PT018
        norm = first.input_norm.weight, first.input_norm.eps
        return self.embed.forward(ids, norm, first.attention.qkv.weight, self.ops)

    def entered(self, x: PartialSum, batch: StepInputs) -> PartialSum:
        """The first layer's input, made of embeddings, whether they were looked up or came with prompts."""
        return x

    def embedding(self, ids: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """Rows [t, hidden] of the table, whole on each rank: where no norm follows at once, as `embedded` has it."""
        assert self.embed is not None
        rows, total = (self.embed.begin, self.embed.end), self.comm.all_reduce
        if not self.embed.several:
            own = self.ops.rows(ids, self.embed.weight, self.embedding_size)
        else:
            assert isinstance(self.ops, SummingOps)
            size = torch.empty(self.embedding_size, device="meta")  # all that is asked of a norm here
            own = self.ops.base.embed_part(ids, self.embed.weight, rows, (size, 0.0))[0].value
        changes = adapters is not None and adapters.in_embedding()
        return adapters.embedded(ids, own, rows, total, self.ops) if adapters is not None and changes else total(own)

    @contextmanager
    def shortened(self) -> Iterator[int]:
        """Inside it has only so many of its first layers as run all kernels: the first finds no residual, windows and MLPs differ."""
        layers = self.layers
        kinds = self.kinds()
        self.layers = layers[: max([2, *(kinds.index(kind) + 1 for kind in kinds)])]
        try:
            yield len(self.layers)
        finally:
            self.layers = layers

    def kinds(self) -> list[tuple[object, ...]]:
        """By layer, what makes its kernels others than those of a layer before it."""
        return [
            (
                *(type(layer.attention), layer.attention.window, layer.attention.chunk, type(layer.mlp)),
                *(linear.format.variant() for linear in linears_of(layer)),
            )
            for layer in self.layers
            if isinstance(layer, DecoderLayer)
        ]

    def kv_scales(self) -> list[KVScale]:
        """The checkpoint's, by layer."""
        return [layer.attention.kv_scale for layer in self.layers if isinstance(layer, DecoderLayer)]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[l, hidden] -> [l, vocab]; with `out` (GPU: weights are not packed) into that. Of any model, scaled and capped as it says."""
        return self.scaled(self.projected(hidden, out))

    def scaled(self, found: Tensor) -> Tensor:
        scale, cap = self.spec.logit_scale, self.spec.final_logit_softcapping
        if scale != 1:
            found.mul_(scale)
        return found.div_(cap).tanh_().mul_(cap) if cap else found

    def projected(self, hidden: Tensor, out: Tensor | None, adapters: LineAdapters | None = None) -> Tensor:
        plain = self.head is None or self.head.is_fusible
        if adapters is not None:
            product = adapters.change(hidden, self._head_product(hidden, plain=plain), self.ops)
            return self.comm.gather(product, self.spec.vocab_size) if self.shard.tp_size > 1 else product
        if self.shard.tp_size > 1:
            if self.comm.one_row is not None and plain:
                whole = self.comm.one_row.logits(hidden, self._head_weight, self.spec.vocab_size, out)
                if whole is not None:
                    return whole
            return self.comm.gather(self._head_product(hidden, plain=plain), self.spec.vocab_size, out)
        if out is not None and plain:
            return self.ops.linear_into(hidden, self._head_weight, out)
        found = self._head_product(hidden, plain=plain)
        return found if out is None else out.copy_(found)

    def _head_product(self, hidden: Tensor, *, plain: bool) -> Tensor:
        """[l, hidden] -> this rank's columns of the logits, with padding. plain: the weight is no quantised head's."""
        if plain:
            return self.ops.linear(hidden, self._head_weight, None, self._head_rows)
        assert self.head is not None
        return self.head.forward(hidden, self.ops)


def linears_of(module: nn.Module) -> list[Linear]:
    return [found for found in module.modules() if isinstance(found, Linear)]
