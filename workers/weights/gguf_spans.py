"""Weights of a .gguf file that stay packed in a GPU's memory: which they are, and how a file's rows get there. Called by load.py.

Every part of such a parameter is of a type that kernels/packed_gemm reads, and a rank's share of it ends with whole blocks; others are
decoded while they are loaded.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from meshlm.kernels.packed_gemm.ggml import LAYOUTS
from meshlm.workers.formats.gguf import DecodedGGUF, GGUFFormat, Span
from meshlm.workers.layers.linear import Linear, Matrix
from meshlm.workers.layers.moe import GroupedLinear
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights.gguf_source import GGUFTensorSource
from meshlm.workers.weights.slices import WeightSlice, place
from meshlm.workers.weights.source import Source


class SpannedParameter:
    """The bytes of a weight: parts by the first of their rows, one behind the other."""

    def __init__(self, parts: dict[int, Span], inputs: int, experts: int = 1) -> None:
        """experts: matrices of the parameter, all of these parts."""
        self._inputs = inputs
        self._begins: dict[int, int] = {}
        size = 0
        for row, span in sorted(parts.items()):
            self._begins[row] = size
            size += span.rows * span.row_bytes
        self.elements = experts * sum(span.rows for span in parts.values()) * inputs

    def begin(self, parameter: Tensor) -> None:
        """Nothing is to be done: files fill all of it."""

    def take(self, parameter: Tensor, name: str, source: Source, found: WeightSlice) -> int:
        """One part of it, from the tensor of this name; how many elements that is."""
        assert isinstance(source, GGUFTensorSource)
        rows, order = source.rows(found.dim, found.begin, found.end)
        source.check_scales(name, rows)
        data = rows.data if order is None else rows.data[order]
        begin = self._begins[found.row]
        parameter = parameter if found.expert is None else parameter[found.expert]
        parameter[begin : begin + data.numel()] = data.flatten().to(parameter.device)
        return data.shape[0] * self._inputs


def keep_spans(
    model: Decoder, tensors: Iterable[tuple[str, Source]], method: type[GGUFFormat | DecodedGGUF] = GGUFFormat,
    kind: type[Linear | GroupedLinear] = Linear,
) -> dict[str, SpannedParameter]:  # fmt: skip
    """The weights of layers of this kind of which all parts can be loaded packed; their layers get the method for it. All experts of a
    layer must have parts of the same types."""
    parts: dict[str, dict[int, dict[int, Span | None]]] = {}  # by expert and row
    for name, source in tensors:
        try:
            found = place(name, model.spec, model.shard)
        except KeyError:
            continue  # load.py will say it
        if found is None or found.shape != source.shape or len(found.shape) != 2:
            continue
        if found.begin < found.end:
            span = (
                _span(source, found) if found.times == 1 and found.column is None else None
            )  # codes are not multiplied
            parts.setdefault(found.parameter, {}).setdefault(found.expert or 0, {})[found.row] = span
    kept = {}
    modules = list(model.layers.named_modules(prefix="layers"))
    if (
        model.head is not None and model.head.outputs * model.shard.tp_size == model.spec.vocab_size
    ):  # no rank has padding
        modules.append(("head", model.head))
    for path, module in modules:
        name = f"{path}.weight"
        first, *others = parts.get(name, {}).values() or [{}]
        spans = {row: span for row, span in first.items() if span is not None}
        if (
            not isinstance(module, kind)
            or isinstance(module, Matrix)
            or not spans
            or any(one != first for one in others)
        ):
            continue
        if len(spans) < len(first) or sum(span.rows for span in spans.values()) != module.outputs:
            continue
        kept[name] = SpannedParameter(spans, module.inputs, 1 + len(others))
        with torch.device(module.weight.device):
            module.use(method(merged([span for _, span in sorted(spans.items())])))
    return kept


def merged(spans: list[Span]) -> tuple[Span, ...]:
    """Neighbours of one type are one span."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1][1:] == span[1:]:
            span = span._replace(rows=span.rows + found.pop().rows)
        found.append(span)
    return tuple(found)


def _span(source: Source, found: WeightSlice) -> Span | None:
    if not isinstance(source, GGUFTensorSource) or source.ggml_type not in LAYOUTS:
        return None
    if not source.cuts(found.dim, found.begin, found.end):
        return None
    rows, _ = source.rows(found.dim, found.begin, found.end)
    return Span(rows.data.shape[0], source.ggml_type, rows.data.shape[1])
