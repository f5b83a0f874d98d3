"""Finds the place of a model's tensor in a worker's part of it, and which part of the tensor that is. Pure."""

from functools import cache
from typing import NamedTuple

from meshlm.architectures.family import Split, Weight
from meshlm.architectures.registry import weights_of
from meshlm.protocol.model import ModelSpec
from meshlm.workers.distributed.shard import Shard


class WeightSlice(NamedTuple):
    """Indices begin to end of dimension `dim` of the tensor go to rows `row` and on of our parameter."""

    parameter: str
    shape: tuple[int, ...]  # that the whole tensor must have
    dim: int
    begin: int
    end: int
    row: int = 0
    plus: float = 0.0  # see Weight.plus
    neighbours: tuple[int, int] = (0, 0)  # see Weight.neighbours
    times: float = 1.0  # see Weight.times
    column: int | None = None  # the first column of its place in our parameter; None: it has all columns
    expert: int | None = None  # which of the parameter's matrices it is a part of; None: the parameter is one


def place(name: str, spec: ModelSpec, shard: Shard) -> WeightSlice | None:
    """None: this worker does not need the tensor, or no model of this kind has it."""
    slices = slices_of(spec, shard)
    return slices.get(name) or slices.get(f"model.{name}")  # a checkpoint of the inner model alone has no prefix


@cache
def slices_of(spec: ModelSpec, shard: Shard) -> dict[str, WeightSlice]:
    """The slices that this worker reads. Weights of one parameter follow one another in its rows."""
    found: dict[str, WeightSlice] = {}
    rows: dict[tuple[str, int | None], int] = {}
    first, last = (0, 0) if spec.moe is None else shard.experts(spec.moe.num_experts)
    mine = shard.layers(spec.num_hidden_layers)
    for weight in weights_of(spec).values():
        if weight.expert is not None and not first <= weight.expert < last:
            continue
        if weight.layer in mine if weight.layer is not None else _needed(weight, spec, shard):
            prefix = "" if weight.layer is None else f"layers.{weight.layer - mine.start}."
            parameter = prefix + weight.parameter
            begin, end = _range(weight, spec, shard)
            expert = None if weight.expert is None else weight.expert - first
            at = rows.get((parameter, expert), 0)
            rows[parameter, expert] = at + (end - begin if weight.dim == 0 or weight.beside else weight.shape[0])
            found[weight.name] = WeightSlice(
                parameter, weight.shape, weight.dim, begin, end, 0 if weight.beside else at, weight.plus,
                weight.neighbours, weight.times, at if weight.beside else None, expert,
            )  # fmt: skip
    return found


def _needed(weight: Weight, spec: ModelSpec, shard: Shard) -> bool:
    """Whether a weight outside the layers belongs to this stage of a pipeline."""
    if weight.parameter == "embed.weight":
        return shard.is_first or (shard.is_last and spec.tie_word_embeddings)
    return shard.is_first if weight.parameter.startswith("entry.") else shard.is_last


def _range(weight: Weight, spec: ModelSpec, shard: Shard) -> tuple[int, int]:
    size = weight.shape[weight.dim] if weight.shape else 1
    match weight.split:
        case Split.REPLICATED:
            return 0, size
        case Split.FIRST_RANK:
            whole = weight.expert is not None and shard.ep_size > 1  # no other rank has this expert
            return 0, size if whole or shard.tp_rank == 0 else 0
        case Split.VOCABULARY:
            return shard.vocab(spec.vocab_size)[:2]
        case Split.INTERMEDIATE:
            return shard.shard_range(size)
        case Split.EXPERT:
            return shard.wide(size, of_expert=True)
        case Split.STATE_GROUPS:
            assert spec.state is not None
            first, last = shard.kv_heads(spec.state.n_groups)
            return first * size // spec.state.n_groups, last * size // spec.state.n_groups
        case Split.QUERY_HEADS | Split.KV_HEADS:
            of_query = weight.split is Split.QUERY_HEADS
            attention = spec.attention if weight.layer is None else spec.layers[weight.layer].attention
            kv_heads = 0 if attention is None else attention.num_key_value_heads
            first, last = shard.heads(spec) if of_query else shard.kv_heads(kv_heads)
            each = size // (spec.num_attention_heads if of_query else kv_heads)
            return first * each, last * each
