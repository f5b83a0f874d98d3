"""Tensors that files hold otherwise than as a matrix for each weight, with a row for each output. Used by sources.py.

Families have layouts of their own (Family.layouts), tensors of several projections (Family.packed), and of all experts of a layer.
Those have a row for each input, or are MXFP4, which is decoded while it is loaded (kernels/mxfp4) or kept (layer_formats.py):

    gate_up_proj [experts, hidden, 2 wide], down_proj [experts, wide, hidden]
    _blocks uint8 [experts, outputs, inputs / 32, 16], _scales uint8 [experts, outputs, inputs / 32]
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise, product

import torch
from torch import Tensor

from meshlm.architectures.family import ExpertTensors, Layout
from meshlm.architectures.registry import weights_of
from meshlm.kernels.mxfp4.reference import GROUP, decode_mxfp4
from meshlm.protocol.model import ModelSpec, QuantizationScheme
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.weights.source import ExpertMatrix, Mapped, Part, Source

_OF_LAYER = re.compile(r"model\.layers\.\d+\.(?P<stem>.+)\.(?P<kind>weight|bias)")


class Transposed(Source):
    """A matrix that has a row for each input."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.shape, self.dtype = source.shape[::-1], source.dtype

    def part(self, dim: int, begin: int, end: int) -> Tensor:
        return self._source.part(1 - dim, begin, end).t()

    def whole(self) -> Tensor:
        return self._source.whole().t()


class ByGroup(Source):
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


_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"


class MXFP4Source(Source):
    """One expert's matrix, decoded, or as it is."""

    def __init__(self, blocks: Source, scales: Source, expert: int, outputs: range) -> None:
        self._blocks, self._scales, self._expert, self._outputs = blocks, scales, expert, outputs
        self.dtype = "BF16"  # which holds every value
        self.shape: tuple[int, ...] = (len(outputs), scales.shape[2] * GROUP)

    def part(self, dim: int, begin: int, end: int) -> Tensor:
        if dim == 1:
            return self.whole().narrow(1, begin, end - begin)
        return decode_mxfp4(*self.packed(0, begin, end), torch.get_default_dtype())

    def packed(self, dim: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Blocks and scales of some outputs (dim 0), or of some inputs, which must be whole groups."""
        found = self._outputs[begin:end] if dim == 0 else self._outputs
        rows = slice(found.start, found.stop, found.step)
        blocks, scales = (of.part(0, self._expert, self._expert + 1)[0, rows] for of in (self._blocks, self._scales))
        if dim == 0:
            return blocks, scales
        groups = slice(begin // GROUP, end // GROUP)
        return blocks[:, groups], scales[:, groups]


def by_expert(
    tensors: Iterable[tuple[str, Source]], spec: ModelSpec, experts: ExpertTensors
) -> Iterator[tuple[str, Source]]:
    """The tensors, with one for each matrix in the place of each that holds those of all experts.

    ProcessFatal names what is missing or wrong."""
    stems = {experts.gate_up: ("gate_proj", "up_proj"), experts.down: ("down_proj",)}
    pattern = re.compile(
        rf"(?:model\.)?(layers\.\d+)\.({'|'.join(map(re.escape, stems))})({_BLOCKS}|{_SCALES}|{_BIAS})?"
    )
    halves: dict[str, tuple[str, Source]] = {}
    for name, source in tensors:
        match = pattern.fullmatch(name)
        if match is None:
            yield name, source
            continue
        layer, stem, kind = match.groups()
        names = [f"model.{layer}.{experts.expert}.{last}" for last in stems[stem]]
        if kind not in (_BLOCKS, _SCALES):
            yield from _of_floats(name, source, names, spec, experts.interleaved, "bias" if kind else "weight")
            continue
        if source.dtype != "U8":
            raise ProcessFatal(f"tensor {name} is of type {source.dtype}; codes and scales of MXFP4 are of type U8")
        stem = name.removesuffix(kind)
        if stem not in halves:
            halves[stem] = kind, source
            continue
        other, before = halves.pop(stem)
        if other == kind:
            raise ProcessFatal(f"1 tensor twice: {name}")
        blocks, scales = (before, source) if kind == _SCALES else (source, before)
        yield from _of_mxfp4(stem, blocks, scales, names, spec, interleaved=experts.interleaved)
    for stem, (kind, _) in halves.items():
        raise ProcessFatal(f"1 tensor missing: {stem}{_SCALES if kind == _BLOCKS else _BLOCKS}")


def _of_floats(
    name: str, source: Source, names: list[str], spec: ModelSpec, interleaved: bool, kind: str
) -> Iterator[tuple[str, Source]]:
    weights = weights_of(spec)
    known = weights.get(f"{names[0].format(0)}.{kind}")
    if known is None:  # the model has no experts in this layer, or no biases: check.py will say it
        yield name, source
        return
    assert spec.moe is not None
    count, rows = spec.moe.num_experts, len(names) * known.shape[0]
    wanted = (count, *known.shape[1:], rows)
    transposed = interleaved or source.shape == wanted
    if not transposed:
        # transformers 5
        wanted = (count, rows, *known.shape[1:]) if source.shape == (count, rows, *known.shape[1:]) else wanted
    if source.shape != wanted:
        raise ProcessFatal(f"tensor {name} has shape {source.shape}; it must have {wanted}")
    for expert, (nth, stem) in product(range(count), enumerate(names)):
        outputs = _outputs(nth, len(names), known.shape[0], interleaved=interleaved)
        yield f"{stem.format(expert)}.{kind}", ExpertMatrix(source, expert, outputs, transposed=transposed)


def _of_mxfp4(
    stem: str, blocks: Source, scales: Source, names: list[str], spec: ModelSpec, *, interleaved: bool
) -> Iterator[tuple[str, Source]]:
    known = weights_of(spec).get(f"{names[0].format(0)}.weight")
    if known is None:
        yield f"{stem}{_BLOCKS}", blocks
        return
    assert spec.moe is not None
    wanted = (spec.moe.num_experts, len(names) * known.shape[0], -(-known.shape[1] // GROUP))
    for of, kind, shape in ((blocks, _BLOCKS, (*wanted, GROUP // 2)), (scales, _SCALES, wanted)):
        if of.shape != shape:
            raise ProcessFatal(f"tensor {stem}{kind} has shape {of.shape}; it must have {shape}")
    for expert in range(spec.moe.num_experts):
        for nth, name in enumerate(names):
            outputs = _outputs(nth, len(names), known.shape[0], interleaved=interleaved)
            yield f"{name.format(expert)}.weight", MXFP4Source(blocks, scales, expert, outputs)


def _outputs(nth: int, of: int, count: int, *, interleaved: bool) -> range:
    """The outputs of the nth of so many matrices in one, each of `count` outputs."""
    return range(nth, of * count, of) if interleaved else range(nth * count, (nth + 1) * count)
