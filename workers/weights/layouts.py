"""Tensors that a family's files hold otherwise than with a row for each output (Family.layouts). Used by sources.py."""

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from meshlm.architectures.family import Layout
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.weights.source import Source

_OF_LAYER = re.compile(r"model\.layers\.\d+\.(?P<stem>.+)\.(?P<kind>weight|bias)")


class Transposed:
    """A matrix that has a row for each input."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.shape, self.dtype = source.shape[::-1], source.dtype

    def part(self, dim: int, begin: int, end: int) -> Tensor:
        return self._source.part(1 - dim, begin, end).t()

    def whole(self) -> Tensor:
        return self._source.whole().t()


class ByGroup:
    """Query, key and value whose rows stand by key-value head: as all queries, all keys, all values."""

    def __init__(self, name: str, source: Source, spec: ModelSpec) -> None:
        groups, dim = spec.num_key_value_heads, spec.head_dim
        each = spec.num_attention_heads // groups
        if source.shape[:1] != (groups * (each + 2) * dim,):
            rows = groups * (each + 2) * dim
            raise ProcessFatal(f"tensor {name} has shape {source.shape}; it must have {rows} rows")
        self._source, self.shape, self.dtype = source, source.shape, source.dtype
        rows_of = torch.arange(source.shape[0]).view(groups, each + 2, dim)
        self._order = torch.cat(
            [rows_of[:, :each].flatten(), rows_of[:, each].flatten(), rows_of[:, each + 1].flatten()]
        )

    def part(self, dim: int, begin: int, end: int) -> Tensor:
        if dim:
            return self._source.part(dim, begin, end)[self._order]
        if begin == end:
            return self._source.part(0, 0, 0)
        rows = self._order[begin:end]
        first, last = int(rows.min()), int(rows.max()) + 1  # a rank reads little more than it keeps
        return self._source.part(0, first, last)[rows - first]

    def whole(self) -> Tensor:
        return self.part(0, 0, self.shape[0])


def laid_out(
    tensors: Iterable[tuple[str, Source]], spec: ModelSpec, layouts: Mapping[str, Layout]
) -> Iterator[tuple[str, Source]]:
    """The tensors with a row for each output, queries before keys before values. ProcessFatal names one of another shape."""
    for name, source in tensors:
        match = _OF_LAYER.fullmatch(name)
        layout = layouts.get(match["stem"]) if match else None
        if layout is Layout.TRANSPOSED and len(source.shape) == 2:
            yield name, Transposed(source)
        elif layout is Layout.BY_GROUP:
            yield name, ByGroup(name, source, spec)
        else:
            yield name, source


def to_halves(values: Tensor, head_dim: int, rotary: int) -> Tensor:
    """Rows of whole heads, of each of which the first `rotary` are neighbours that turn together: as halves that do."""
    heads = values.reshape(-1, head_dim, *values.shape[1:])
    turned = heads[:, :rotary]
    return torch.cat((turned[:, ::2], turned[:, 1::2], heads[:, rotary:]), dim=1).reshape(values.shape)
