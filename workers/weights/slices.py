"""Where a tensor of the model belongs in a worker's part of it, and which part of the tensor that is. Pure."""

import re
from typing import NamedTuple

from meshlm.protocol.model import ModelSpec
from meshlm.workers.distributed.shard import Shard

_RENAMES = {
    "self_attn.o_proj": "attention.o",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_norm",
    "mlp.down_proj": "mlp.down",
}


class WeightSlice(NamedTuple):
    """Indices begin to end of dimension `dim` of the tensor go to rows `row` and on of our parameter."""

    parameter: str
    shape: tuple[int, ...]  # that the whole tensor must have
    dim: int
    begin: int
    end: int
    row: int = 0


def place(name: str, spec: ModelSpec, shard: Shard) -> WeightSlice | None:
    """None: this worker does not need the tensor. KeyError: no model of this kind has it."""
    name = name.removeprefix("model.")
    hidden = (spec.hidden_size,)
    if name == "embed_tokens.weight":
        needed = shard.is_first or (shard.is_last and spec.tie_word_embeddings)
        return _vocabulary("embed.weight", spec, shard) if needed else None
    if name == "lm_head.weight":
        return _vocabulary("head.weight", spec, shard) if shard.is_last and not spec.tie_word_embeddings else None
    if name == "norm.weight":
        return WeightSlice("norm.weight", hidden, 0, 0, spec.hidden_size) if shard.is_last else None
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if match is None:
        return None
    layer, stem, kind = int(match[1]), match[2], match[3]
    if layer >= spec.num_hidden_layers:
        raise KeyError(name)
    mine = shard.layers(spec.num_hidden_layers)
    if layer not in mine:
        return None
    found = _in_layer(stem, kind, spec, shard)
    return found and found._replace(parameter=f"layers.{layer - mine.start}.{found.parameter}.{kind}")


def _vocabulary(parameter: str, spec: ModelSpec, shard: Shard) -> WeightSlice:
    begin, end, _ = shard.vocab(spec.vocab_size)
    return WeightSlice(parameter, (spec.vocab_size, spec.hidden_size), 0, begin, end)


def _in_layer(stem: str, kind: str, spec: ModelSpec, shard: Shard) -> WeightSlice | None:
    hidden, wide, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    inputs = (hidden,) if kind == "weight" else ()
    match stem:
        case "self_attn.q_proj" | "self_attn.k_proj" | "self_attn.v_proj":
            return _projection(stem, inputs, spec, shard)
        case "mlp.gate_proj" | "mlp.up_proj":
            begin, end = shard.part(wide)
            return WeightSlice(
                "mlp.gate_up", (wide, *inputs), 0, begin, end, 0 if stem == "mlp.gate_proj" else end - begin
            )
        case "self_attn.o_proj" | "mlp.down_proj":
            columns = spec.num_attention_heads * dim if stem == "self_attn.o_proj" else wide
            if kind == "weight":
                return WeightSlice(_RENAMES[stem], (hidden, columns), 1, *shard.part(columns))
            # The sum over the ranks must have the bias once.
            return WeightSlice(_RENAMES[stem], (hidden,), 0, 0, hidden if shard.tp_rank == 0 else 0)
        case "self_attn.q_norm" | "self_attn.k_norm":
            return WeightSlice(_RENAMES[stem], (dim,), 0, 0, dim)
        case "input_layernorm" | "post_attention_layernorm":
            return WeightSlice(_RENAMES[stem], (hidden,), 0, 0, hidden)
    return None


def _projection(stem: str, inputs: tuple[int, ...], spec: ModelSpec, shard: Shard) -> WeightSlice:
    """Query, then key, then value rows in one parameter."""
    dim = spec.head_dim
    first, last = shard.heads(spec)
    kv_first, kv_last = shard.kv_heads(spec)
    queries, keys = (last - first) * dim, (kv_last - kv_first) * dim
    if stem == "self_attn.q_proj":
        return WeightSlice("attention.qkv", (spec.num_attention_heads * dim, *inputs), 0, first * dim, last * dim)
    row = queries if stem == "self_attn.k_proj" else queries + keys
    shape = (spec.num_key_value_heads * dim, *inputs)
    return WeightSlice("attention.qkv", shape, 0, kv_first * dim, kv_last * dim, row)
