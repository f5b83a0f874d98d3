"""Quantised tensors that hold several projections (query, key and value, or gate and up), as those of each. A part of sources.py.

Their codes and scales have outputs along one dimension, in words or blocks of several or one by one. What is said of the inputs, or of
all outputs, is each projection's.
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise

import torch

from meshlm.protocol.model import QuantizationScheme
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.weights.source import Mapped, Part, Source

_BY_COLUMNS = {"gptq": ("qweight", "qzeros", "scales"), "awq": ("qweight", "qzeros", "scales")}
"""The tensors of a layout that have a column for each output, or for some; others have rows."""


def parts_of(name: str, source: Source, last: str, outputs: list[int], scheme: QuantizationScheme) -> Iterator[Source]:
    """The tensor of each projection, of which each has so many outputs. last: what of its layer the tensor is. ProcessFatal."""
    total = sum(outputs)
    if last == "weight_shape":
        said = source.whole().tolist()
        if said[0] != total:
            raise ProcessFatal(f"tensor {name} is not the weight's shape, which has {total} rows")
        yield from (Mapped(torch.tensor([rows, *said[1:]])) for rows in outputs)
        return
    if last in ("g_idx", "weight_g_idx", "input_scale", "input_zero_point") or source.shape in ((), (1,)):
        yield from (source for _ in outputs)
        return
    dim = int(last in _BY_COLUMNS.get(scheme.files.removesuffix("_v2"), ()))
    size = source.shape[dim] if dim < len(source.shape) else 0
    each, ends = scheme.block[0], [0, *accumulate(outputs)]
    blocks = scheme.weight == "block" and last != "weight"
    for begin, end in pairwise(ends):
        if blocks:
            whole, first, behind = begin % each == 0 and size == -(-total // each), begin // each, -(-end // each)
        else:
            whole, first, behind = (
                not (begin * size % total or end * size % total),
                begin * size // total,
                end * size // total,
            )
        if not whole or not size:
            raise ProcessFatal(
                f"tensor {name} has shape {source.shape}, and holds {len(outputs)} projections of {', '.join(map(str, outputs))} rows: "
                "one does not begin with a word or a scale of its own"
            )
        yield Part(source, dim, first, behind)
