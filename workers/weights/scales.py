"""The tensors with scales that a quantised checkpoint has beside its weights, and the part of each that a worker's layer takes."""

from collections import Counter
from functools import cache

import torch
from torch import Tensor

from meshlm.architectures.quantization import scheme_of
from meshlm.architectures.registry import weights_of
from meshlm.protocol.model import ModelSpec, QuantizationScheme
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.weights.packed_files import packed_rows, tensors_of
from meshlm.workers.weights.scale_tensor import ScaleTensor
from meshlm.workers.weights.slices import WeightSlice
from meshlm.workers.weights.source import Source

_ONE = ((), (1,))


@cache
def quantised_weights(spec: ModelSpec) -> dict[str, QuantizationScheme]:
    """The matrices of layers, and of the head, that files hold quantised, by Hugging Face's names."""
    found = {}
    for name, weight in weights_of(spec).items():
        inside = weight.layer is not None or weight.parameter == "head.weight"
        if inside and weight.quantises and len(weight.shape) == 2:
            scheme = scheme_of(spec.quantization, name.removesuffix(".weight"))
            if scheme is not None and not scheme.online:
                found[name] = scheme
    return found


@cache
def scale_tensors(spec: ModelSpec) -> dict[str, ScaleTensor]:
    """All scale tensors, by name; of packed weights those with their codes too."""
    found: dict[str, ScaleTensor] = {}
    ordinals: Counter[tuple[int | None, str, int | None]] = Counter()
    for name, scheme in quantised_weights(spec).items():
        assert spec.quantization is not None
        weight = weights_of(spec)[name]
        outputs, inputs = weight.shape
        product = weight.layer, weight.parameter, weight.expert
        ordinal = ordinals[product]
        ordinals[product] += 1
        match scheme.weight:
            case "group":
                found |= tensors_of(name, (outputs, inputs), scheme, ordinal, bias=_bias(name) in weights_of(spec))
                continue
            case "tensor":
                shapes: tuple[tuple[int, ...], ...] = _ONE
            case "channel":
                shapes = ((outputs, 1), (outputs,))
            case "block":
                shapes = ((-(-outputs // scheme.block[0]), -(-inputs // scheme.block[1])),)
        stem = name.removesuffix("weight")
        found[stem + spec.quantization.weight_scale] = ScaleTensor(name, "weight_scale", shapes, scheme)
        if scheme.integers:
            found[name] = ScaleTensor(name, "weight", (weight.shape,), scheme, ("I8",))
        if scheme.activation == "static" and scheme.integers and scheme.zeros:
            found[stem + "input_zero_point"] = ScaleTensor(name, "input_zero_point", _ONE, scheme, ("I8", "F32", "I32"))
        if scheme.activation == "static":
            found[stem + "input_scale"] = ScaleTensor(name, "input_scale", _ONE, scheme)
    return found


def _bias(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def scale_rows(name: str, source: Source, found: ScaleTensor, part: WeightSlice) -> Tensor:
    """float32 for each row of a worker's part of the weight: [1, 1], [rows, 1] or [rows, groups]; of inputs [1]. ProcessFatal.

    Of packed weights: see `packed_rows`.
    """
    if found.scheme.weight == "group":
        return packed_rows(name, source, found, part)
    if found.parameter == "weight":
        return source.part(part.dim, part.begin, part.end)
    values = source.whole().to(torch.float32)
    if found.parameter == "input_zero_point":
        return values.reshape(1)
    least = 0.0 if found.parameter == "weight_scale" else torch.finfo(torch.float32).tiny
    if not bool((values.isfinite() & (values >= least)).all()):
        raise ProcessFatal(f"tensor {name}: a scale must be a positive number, and one is not")
    if found.parameter == "input_scale":
        return values.reshape(1)
    first, last = (part.begin, part.end) if part.dim == 0 else (0, part.shape[0])
    match found.scheme.weight:
        case "tensor":
            return values.reshape(1, 1)
        case "channel":
            return values.reshape(-1, 1)[first:last]
        case "block":
            outputs, inputs = found.scheme.block
            rows = values[torch.arange(first, last, device=values.device) // outputs]
            return rows if part.dim == 0 else rows[:, part.begin // inputs : -(-part.end // inputs)]
