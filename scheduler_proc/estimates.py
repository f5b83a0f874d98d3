"""Estimates of what a step computes and moves, from the model's shape: for /metrics (--enable-mfu-metrics).

They count the products of linear layers and of attention, the weights that a step reads, and the keys and values that it reads and
writes; norms, activations between layers and communication are left out, as they are small beside these. Pure; used by core.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

from meshlm.protocol.edges.step import StepPlan
from meshlm.protocol.layers import Attention, LayerSpec
from meshlm.protocol.model import ModelSpec
from meshlm.protocol.wire.columns import ints
from meshlm.runtime.process.counts import Counts

_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}


class Estimate(NamedTuple):
    """What one step asks of one device."""

    flops: float
    read_bytes: float
    write_bytes: float


class _Layer(NamedTuple):
    """Weights of one layer, in numbers. A token meets `dense` and `each` times the chosen experts."""

    dense: int
    expert: int
    attends: bool
    window: int  # 0: it sees all tokens
    products: int  # of a token's heads with each that it sees


class Estimates:
    """`num_devices` share a rank's work evenly. `kv_bytes` are those of a number in the KV cache; 0: as the weights' type."""

    def __init__(self, spec: ModelSpec, num_devices: int, kv_bytes: float = 0.0) -> None:
        self._spec, self._num_devices = spec, num_devices
        type_bytes = _BYTES.get(spec.dtype, 2.0)
        schemes = spec.quantization.schemes if spec.quantization is not None else ()
        self._weight_bytes = min([scheme.bits / 8 for scheme in schemes], default=type_bytes)
        kinds = [self._layer(layer) for layer in spec.layers.kinds]
        self._layers = [kinds[number] for number in spec.layers.order]
        per_token = spec.kv_bytes_per_token_f32 / 4 * (kv_bytes or type_bytes)
        self._kv_bytes = per_token / max(1, sum(layer.attends for layer in self._layers))  # of a layer that attends
        self._head = spec.vocab_size * spec.hidden_size

    def _layer(self, layer: LayerSpec) -> _Layer:
        hidden, state, experts, attention = self._spec.hidden_size, layer.state, layer.experts, layer.attention
        dense, expert = 3 * hidden * layer.intermediate_size, 0
        if state is not None:
            dense += hidden * (2 * state.inner + state.conv_dim) + state.inner * hidden
        if experts is not None:
            dense += 3 * hidden * experts.shared_intermediate_size + hidden * experts.num_experts
            expert = 3 * hidden * experts.moe_intermediate_size
        if attention is None:
            return _Layer(dense, expert, attends=False, window=0, products=0)
        dense += self._attention_weights(attention)
        # A token sees half a chunk, so all of it is the most.
        window, mla = attention.sliding_window or attention.attention_chunk_size, attention.mla
        sizes = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim if mla else 2 * attention.head_dim
        return _Layer(dense, expert, attends=True, window=window, products=2 * self._spec.num_attention_heads * sizes)

    def _attention_weights(self, attention: Attention) -> int:
        hidden, heads = self._spec.hidden_size, self._spec.num_attention_heads
        if (mla := attention.mla) is None:
            return hidden * attention.head_dim * 2 * (heads + attention.num_key_value_heads)
        query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        down = hidden * mla.q_lora_rank + mla.q_lora_rank * query if mla.q_lora_rank else hidden * query
        up = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        index = (mla.q_lora_rank * mla.index_n_heads + hidden) * mla.index_head_dim + hidden * mla.index_n_heads
        return down + index + hidden * mla.down + up + heads * mla.v_head_dim * hidden

    def count(self, plan: StepPlan, counts: Counts) -> None:
        """Adds what a step that has requests asks of one device."""
        starts = ints(plan.starts)
        tokens = ints(plan.counts) if plan.counts else [1] * len(starts)
        samples = sum(plan.samples) if plan.samples else len(starts)
        for name, amount in self.of_step(starts, tokens, samples)._asdict().items():
            counts.add(f"estimated_{name}_per_gpu", amount=amount)

    def of_step(self, starts: Sequence[int], counts: Sequence[int], num_samples: int) -> Estimate:
        """The step computes, of each request, so many tokens from its start on."""
        tokens = sum(counts)
        flops = 2.0 * num_samples * self._head
        read = self._head * self._weight_bytes
        by_window = {window: _context(starts, counts, window) for window in {layer.window for layer in self._layers}}
        chosen = self._spec.moe.num_experts_per_tok if self._spec.moe is not None else 0
        experts = min(self._spec.moe.num_experts, chosen * tokens) if self._spec.moe is not None else 0
        for layer in self._layers:
            flops += 2.0 * tokens * (layer.dense + chosen * layer.expert)
            read += (layer.dense + experts * layer.expert) * self._weight_bytes
            if layer.attends:
                pairs, seen = by_window[layer.window]
                flops += layer.products * pairs
                read += seen * self._kv_bytes
        write = tokens * self._kv_bytes * sum(layer.attends for layer in self._layers)
        return Estimate(flops / self._num_devices, read / self._num_devices, write / self._num_devices)


def _context(starts: Sequence[int], counts: Sequence[int], window: int) -> tuple[float, float]:
    """Pairs of a token and one that it sees, and tokens whose keys and values are read."""
    pairs = seen = 0.0
    for start, count in zip(starts, counts, strict=True):
        before = min(start, window) if window else start
        inside = count * (count + 1) / 2
        if window and count > window:
            inside = window * (window + 1) / 2 + (count - window) * window
        pairs += count * before + inside
        seen += before + count
    return pairs, seen
