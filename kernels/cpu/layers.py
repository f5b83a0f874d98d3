"""Whole decoder layers in one call: layers.h. The same results, to the last bit, as the operations of kernel.py one after the other."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshlm.kernels.cpu import packed
from meshlm.kernels.cpu.library import compute, step_type

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}


class LayerWeights(NamedTuple):
    """The weights of one layer, in the order of layers.h. Products are packed (packed.py)."""

    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None
    o_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


class Shape(NamedTuple):
    """The sizes of all layers. wide: inputs of down."""

    hidden: int
    wide: int
    heads: int
    kv_heads: int
    d: int
    act: str
    scale: float
    eps: float


class Places(NamedTuple):
    """Places of a step's t tokens: int64. Position of each [t]; by group, slot of each [t] and blocks of each request [n, any]; spans
    as for attention."""

    positions: Tensor
    slots: Sequence[Tensor]
    tables: Sequence[Tensor]
    spans: Tensor


class LayerPages(NamedTuple):
    """One layer's cache [blocks, size, kv_heads, d], and the group whose slots and tables it has."""

    keys: Tensor
    values: Tensor
    group: int


_Step = step_type(
    "layers table positions spans x stream normed qkv query attended gate_up gated rounded",
    "num_layers t hidden wide heads kv_heads d rotary size stride num_spans act",
)


class Layers:
    """The layers of a model. weights and windows: by layer; window 0: attention sees all that came before."""

    def __init__(self, weights: Sequence[LayerWeights], windows: Sequence[int], shape: Shape) -> None:
        self._weights, self._shape = weights, shape  # keeps what is pointed at
        rows = [
            [*(0 if tensor is None else tensor.data_ptr() for tensor in layer), 0, 0, 0, 0, window]
            for layer, window in zip(weights, windows, strict=True)
        ]
        self._table = torch.tensor(rows, dtype=torch.long)

    def run(self, stream: Tensor, places: Places, rope: Tensor, caches: Sequence[LayerPages]) -> tuple[Tensor, Tensor]:
        """stream [t, hidden], which is changed: the embeddings. caches: by layer.

        What the last layer adds to the stream, and the stream."""
        shape, t = self._shape, stream.shape[0]
        inner, outer = shape.heads * shape.d, (shape.heads + 2 * shape.kv_heads) * shape.d
        x = torch.empty(t, shape.hidden)
        widths = {"normed": shape.hidden, "qkv": outer, "query": inner, "attended": inner}
        widths |= {"gate_up": 2 * shape.wide, "gated": shape.wide}
        widths["rounded"] = packed.rounded_bytes(max(shape.hidden, inner, shape.wide)) // 4
        buffers = {name: torch.empty(t, width) for name, width in widths.items()}
        groups = [
            (slots.data_ptr(), table.data_ptr()) for slots, table in zip(places.slots, places.tables, strict=True)
        ]
        pointers = [[keys.data_ptr(), values.data_ptr(), *groups[group]] for keys, values, group in caches]
        self._table[:, -5:-1] = torch.tensor(pointers, dtype=torch.long)
        buffers |= {"layers": self._table, "table": rope, "positions": places.positions, "spans": places.spans}
        sizes = {"rotary": rope.shape[1], "size": caches[0].keys.shape[1], "stride": places.tables[0].stride(0)}
        counts = {"num_layers": len(self._weights), "t": t, "num_spans": places.spans.shape[0], **sizes}
        numbers = {**shape._asdict(), **counts, "act": ACTIVATIONS[shape.act]}
        compute("meshlm_layers", _Step, {**buffers, "x": x, "stream": stream}, numbers)
        return x, stream
