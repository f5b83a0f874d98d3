"""Weights of a .gguf file that stay packed in memory: which they are, and how a file's rows get there. Called by load.py.

In a GPU's memory every part of such a parameter is of a type that kernels/packed_gemm reads, and a rank's share of it ends with whole
blocks. The compiled kernels of a CPU (kernels/cpu/packed.py) compute with codes and scales as the file has them: with activations that
are rounded to 16 bits, or, with --cpu-exact, in float32 and with the values that decoding would have given. All else is decoded.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from meshlm.kernels.cpu import packed, self_test
from meshlm.kernels.packed_gemm.ggml import LAYOUTS
from meshlm.workers.formats.format import UNQUANTIZED, PackedGGUF, WeightedLayer
from meshlm.workers.formats.packed import DecodedGGUF, GGUFFormat, Span
from meshlm.workers.layers.elements import Linear, Matrix
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


def _matrices(
    model: Decoder, tensors: Iterable[tuple[str, Source]]
) -> Iterator[tuple[WeightSlice, GGUFTensorSource | None]]:
    """Where this rank's parts of matrices belong, and their sources; None: they cannot stay as the file has them."""
    for name, source in tensors:
        found = place(name, model.spec, model.shard)
        if found is None or found.shape != source.shape or len(found.shape) != 2 or found.begin == found.end:
            continue
        cuts = isinstance(source, GGUFTensorSource) and source.cuts(found.dim, found.begin, found.end)
        stays = cuts and found.times == 1 and found.column is None  # codes are not multiplied
        yield found, source if stays and isinstance(source, GGUFTensorSource) else None


def keep_spans(
    model: Decoder, tensors: Iterable[tuple[str, Source]], method: type[GGUFFormat | DecodedGGUF] = GGUFFormat,
    kind: type[Linear | GroupedLinear] = Linear,
) -> dict[str, SpannedParameter]:  # fmt: skip
    """The weights of layers of this kind of which all parts can be loaded packed; their layers get the method for it. All experts of a
    layer must have parts of the same types."""
    parts: dict[str, dict[int, dict[int, Span | None]]] = {}  # by expert and row
    for found, source in _matrices(model, tensors):
        parts.setdefault(found.parameter, {}).setdefault(found.expert or 0, {})[found.row] = _span(source, found)
    kept = {}
    modules = list(model.layers.named_modules(prefix="layers"))
    # no rank has padding
    if model.head is not None and model.head.outputs * model.shard.tp_size == model.spec.vocab_size:
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
    found: list[Span] = []
    for span in spans:
        if found and found[-1][1:] == span[1:]:
            span = span._replace(rows=span.rows + found.pop().rows)
        found.append(span)
    return tuple(found)


def _span(source: GGUFTensorSource | None, found: WeightSlice) -> Span | None:
    if source is None or source.ggml_type not in LAYOUTS:
        return None
    rows, _ = source.rows(found.dim, found.begin, found.end)
    return Span(rows.data.shape[0], source.ggml_type, rows.data.shape[1])


class PackedParameter:
    """A parameter [n, k], or one of each expert, whose panels stay in these forms; its first `covered` rows come from files.

    matrices: that files have. rounded: see packed.py."""

    def __init__(self, forms: list[int], n: int, k: int, covered: int, matrices: int, *, rounded: bool) -> None:
        self._forms, self._n, self._k, self._covered, self._rounded = forms, n, k, covered, rounded
        self.size = packed.packed_bytes(forms, k)
        self.elements = covered * k * matrices

    def begin(self, parameter: Tensor) -> None:
        """parameter: uint8 [size], or [experts, size]."""
        if self._covered < self._n:
            parameter.zero_()  # padding
        for matrix in parameter.view(-1, self.size):
            packed.write_table(matrix, self._forms, self._k, rounded=self._rounded)

    def take(self, parameter: Tensor, name: str, source: Source, found: WeightSlice) -> int:
        """One part of it, from the tensor of this name; how many elements that is."""
        assert isinstance(source, GGUFTensorSource)
        rows, order = source.rows(found.dim, found.begin, found.end)
        source.check_scales(name, rows)
        matrix = parameter if found.expert is None else parameter[found.expert]
        packed.repack(rows, order, matrix, found.row, self._k)
        return rows.data.shape[0] * self._k


def keep(model: Decoder, tensors: Iterable[tuple[str, Source]], *, exact: bool) -> dict[str, PackedParameter]:
    """The parameters of which all parts can stay encoded; in the model they become uint8, of the size that they will have.

    exact: no product rounds its activations."""
    rounded = not exact and self_test.rounds()
    parts: dict[str, dict[int | None, list[tuple[int, int, int | None]]]] = {}  # of each expert: first row, rows, form
    for found, source in _matrices(model, tensors):
        form = None if source is None else packed.form_of(source.ggml_type, rounded=rounded)
        rows = found.end - found.begin if found.dim == 0 else found.shape[0]
        parts.setdefault(found.parameter, {}).setdefault(found.expert, []).append((found.row, rows, form))
    kept = {}
    begin, end, _ = model.shard.vocab(model.spec.vocab_size)
    for name, parameter in list(model.named_parameters()):
        of_experts = list(parts.get(name, {}).values())
        if not of_experts or parameter.dim() < 2:  # a bias may stand as one row in a file
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, Matrix) or (isinstance(owner, WeightedLayer) and owner.format is not UNQUANTIZED):
            continue
        n, k = parameter.shape[-2:]
        covered = end - begin if name in ("embed.weight", "head.weight") else n
        forms, *others = (_panels(sorted(each), covered, n) for each in of_experts)
        if forms is None or any(other != forms for other in others):
            continue
        kept[name] = PackedParameter(forms, n, k, covered, len(of_experts), rounded=rounded)
        if isinstance(owner, WeightedLayer):
            with torch.device(parameter.device):
                owner.use(PackedGGUF(kept[name].size))
        else:  # an embedding
            empty = torch.empty(kept[name].size, dtype=torch.uint8, device=parameter.device)
            owner.weight = nn.Parameter(empty, requires_grad=False)
    return kept


def _panels(parts: list[tuple[int, int, int | None]], covered: int, n: int) -> list[int] | None:
    """The form of each panel of n rows; None if a part has none, one begins within a panel, or they are not `covered` rows in all."""
    forms: list[int] = []
    at = 0
    for first, rows, form in parts:
        if form is None or first != at or first % packed.WIDTH:
            return None
        forms += [form] * -(-rows // packed.WIDTH)
        at += rows
    if not forms or at != covered:
        return None
    return forms + forms[-1:] * (-(-n // packed.WIDTH) - len(forms))
