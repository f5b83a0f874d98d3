"""The tensors with codes and scales that a quantised checkpoint has, and the part of each that a worker's layer takes.

    gptq                 qweight int32 [inputs / 8, outputs], qzeros int32 [groups, outputs / 8], scales [groups, outputs],
                         g_idx [inputs]
    bitsandbytes         weight uint8 [outputs * inputs / 2, 1], weight_scale [outputs * groups] (made here)
    awq                  qweight int32 [inputs, outputs / 8], qzeros int32 [groups, outputs / 8], scales [groups, outputs]
    mxfp4                weight_packed uint8 [outputs, inputs / 2], weight_scale uint8 [outputs, groups]: exponents of two, plus 127
    compressed-tensors   weight_packed int32 [outputs, inputs / 8], weight_scale [outputs, groups], weight_zero_point int32
                         [outputs / 8, groups], weight_g_idx [inputs], weight_shape [2]

Words of 32 bits hold 8 codes of 4 bits or 4 of 8, the first in the lowest bits; AWQ's in an order of its own. GPTQ's zero points are
one less than they mean (not gptq_v2's); those of symmetric weights are taken as what they must mean.

Scales of bitsandbytes' weights may be quantised themselves; a JSON object in a tensor of bytes says so, and has the other numbers:

    weight_scale = absmax, or nested_quant_map[absmax] * nested_absmax[block // nested_blocksize] + nested_offset
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshlm.architectures.packed_quantization import BLOCK, STATE, TENSORS, of_layer, stem_of
from meshlm.architectures.quantization import scheme_of
from meshlm.architectures.registry import weights_of
from meshlm.kernels.mxfp4.reference import NAN
from meshlm.kernels.packed_gemm.reference import TABLES
from meshlm.protocol.model import ModelSpec, QuantizationScheme, QuantizationSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.weights.slices import WeightSlice
from meshlm.workers.weights.source import Mapped, Source

_PLAIN, _NESTED = ("absmax", "quant_map"), ("nested_absmax", "nested_quant_map")


def with_scales(tensors: Iterable[tuple[str, Source]], quantization: QuantizationSpec) -> Iterator[tuple[str, Source]]:
    """The tensors, with a weight_scale in the place of each weight's state. ProcessFatal names what is missing or wrong."""
    states: dict[str, dict[str, Tensor]] = {}
    for name, source in tensors:
        stem, last = stem_of(name)
        scheme = scheme_of(quantization, stem)
        if scheme is None or scheme.online or not last.startswith("weight."):
            yield name, source
            continue
        part = last.removeprefix("weight.").removeprefix("quant_state.")
        state = states.setdefault(stem, {})
        state["state" if part.startswith(STATE) else part] = source.whole().cpu()
        found = _bitsandbytes_scales(stem, state, scheme)
        if found is not None:
            del states[stem]
            yield f"{stem}.weight_scale", Mapped(found)
    for stem, state in states.items():
        missing = next(part for part in ("state", *_PLAIN, *_NESTED) if part not in state)
        named = f"quant_state.{STATE}..." if missing == "state" else missing
        raise ProcessFatal(f"1 tensor missing: {stem}.weight.{named}")


def _bitsandbytes_scales(stem: str, state: dict[str, Tensor], scheme: QuantizationScheme) -> Tensor | None:
    """float32 [blocks]; None while parts are to come."""
    if "state" not in state or any(part not in state for part in _PLAIN):
        return None
    said = _settings(stem, state["state"])
    if said.get("quant_type") != scheme.values or said.get("blocksize") != BLOCK:
        raise ProcessFatal(
            f"{stem}.weight: its state says {said.get('quant_type')} in blocks of {said.get('blocksize')}; config.json says "
            f"{scheme.values}, in blocks of {BLOCK}"
        )
    if not torch.allclose(state["quant_map"].float(), torch.tensor(TABLES[scheme.values]), atol=1e-4):
        raise ProcessFatal(f"tensor {stem}.weight.quant_map holds other numbers than those of {scheme.values}")
    absmax = state["absmax"]
    if absmax.dtype != torch.uint8:
        return absmax.float().flatten()
    if any(part not in state for part in _NESTED):
        return None
    size = int(said.get("nested_blocksize", 256))
    nested = state["nested_absmax"].float().flatten().repeat_interleave(size)[: absmax.numel()]
    if len(nested) != absmax.numel():
        raise ProcessFatal(f"tensor {stem}.weight.nested_absmax has {len(state['nested_absmax'])} numbers, too few")
    values = state["nested_quant_map"].float()[absmax.flatten().long()]
    return values * nested + float(said.get("nested_offset", 0.0))


def _settings(stem: str, data: Tensor) -> dict[str, Any]:
    try:
        found = json.loads(bytes(data.to(torch.uint8).tolist()).decode())
    except ValueError as error:
        raise ProcessFatal(f"{stem}.weight: its quant_state cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise ProcessFatal(f"{stem}.weight: its quant_state is no object")
    return found


class ScaleTensor(NamedTuple):
    """Scales of one weight, the scale of its inputs, or, where files hold several codes in a word, its codes themselves."""

    weight: str  # the weight's name
    parameter: str  # weight_scale, input_scale: of the layer that has the weight
    shapes: tuple[tuple[int, ...], ...]  # that the tensor may have
    scheme: QuantizationScheme
    types: tuple[str, ...] = ()  # that it may have, as safetensors writes them; empty: floats
    ordinal: int = 0  # which of the projections that are one product its weight is
    only_checked: bool = False  # no parameter takes it, and it may be missing


AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of an AWQ word each of its outputs is in."""


def tensors_of(
    weight: str, shape: tuple[int, int], scheme: QuantizationScheme, ordinal: int, *, bias: bool = True
) -> dict[str, ScaleTensor]:
    """By name. ProcessFatal names a weight that words or groups do not divide. ordinal: which projection of its product it is.

    bias: the model has one here; AutoGPTQ has written biases of zeros too."""
    outputs, inputs = shape
    layer, each, stem = of_layer(scheme, inputs), 32 // scheme.bits, weight.removesuffix("weight")
    groups = layer.num_groups
    for size, of, name in ((outputs, each, "outputs"), (inputs, each, "inputs")):
        if size % of and scheme.files != "mxfp4":
            raise ProcessFatal(
                f"quantization_config: {stem}qweight: {size} {name} are no multiple of the {of} in a word"
            )
    if inputs % layer.weight_group and scheme.files not in ("gptq", "gptq_v2"):
        raise ProcessFatal(
            f"quantization_config: {stem[:-1]} has {inputs} inputs, no multiple of group_size {layer.weight_group}"
        )
    match scheme.files:
        case "gptq" | "gptq_v2":
            shapes: dict[str, tuple[int, ...]] = {
                "qweight": (inputs // each, outputs), "qzeros": (groups, outputs // each), "scales": (groups, outputs),
                "g_idx": (inputs,),
            }  # fmt: skip
            shapes |= {} if bias else {"bias": (outputs,)}
        case "mxfp4":
            shapes = {"weight_packed": (outputs, inputs // 2), "weight_scale": (outputs, groups)}
        case "bitsandbytes":
            shapes = {"weight": (outputs * inputs // 2, 1), "weight_scale": (outputs * groups,)}
        case "awq":
            shapes = {
                "qweight": (inputs, outputs // each),
                "qzeros": (groups, outputs // each),
                "scales": (groups, outputs),
            }
        case _:
            shapes = {
                "weight_packed": (outputs, inputs // each), "weight_scale": (outputs, groups), "weight_shape": (2,),
            }  # fmt: skip
            shapes |= {"weight_zero_point": (outputs // each, groups)} if scheme.zeros else {}
            shapes |= {"weight_g_idx": (inputs,)} if scheme.act_order else {}
    found = {}
    for last, wanted in shapes.items():
        role, types = TENSORS[scheme.files].get(last, (last, ()))
        only_checked = role in ("weight_shape", "bias") or (role == "input_group" and not scheme.act_order)
        found[stem + last] = ScaleTensor(weight, role, (wanted,), layer, types, ordinal, only_checked)
    return found


def check_redundant(name: str, source: Source, found: ScaleTensor, shape: tuple[int, ...]) -> None:
    """Checks a tensor that no parameter takes, since it says what is known already. ProcessFatal."""
    values = source.whole().cpu()
    match found.parameter:
        case "weight_shape":
            known, means = torch.tensor(shape), "the weight's shape"
        case "bias":
            known, means = torch.zeros_like(values), "zero, and the model has no such bias"
        case _:
            known, means = (
                torch.arange(len(values)) // found.scheme.weight_group,
                "groups in order, as desc_act false says",
            )
    if not torch.equal(values.to(known.dtype), known):
        raise ProcessFatal(f"tensor {name} is not {means}")


def packed_rows(name: str, source: Source, found: ScaleTensor, part: WeightSlice) -> Tensor:
    """A worker's part of the tensor in the form of its parameter. ProcessFatal."""
    scheme = found.scheme
    each, size = 32 // scheme.bits, scheme.weight_group
    if found.parameter == "input_group":
        return (source.whole() if part.dim == 0 else source.part(0, part.begin, part.end)).to(torch.int32)
    inputs = (part.begin, part.end) if part.dim == 1 else (0, part.shape[1])
    outputs = (part.begin, part.end) if part.dim == 0 else (0, part.shape[0])
    groups = (0, scheme.num_groups) if scheme.act_order else (inputs[0] // size, -(-inputs[1] // size))
    if scheme.files == "mxfp4":
        return _mxfp4(name, source, found, (outputs, inputs, groups))
    if any(begin % each or end % each for begin, end in (inputs, outputs)):
        raise ProcessFatal(
            f"--tensor-parallel-size: {name} holds {each} codes in a word, and a rank's part does not begin or end with one"
        )
    match scheme.files, found.parameter:
        case (("gptq" | "gptq_v2"), "weight"):
            codes = _fields(_cut(source, _words(inputs, each), outputs).t(), scheme.bits)
        case "bitsandbytes", "weight":
            pairs = source.whole().view(part.shape[0], -1)[slice(*outputs), inputs[0] // 2 : inputs[1] // 2]
            return pairs << 4 | pairs >> 4  # the first of a pair is in the high half
        case "bitsandbytes", _:
            return _scales(name, source.whole().view(part.shape[0], -1)[slice(*outputs), slice(*groups)])
        case "awq", "weight":
            codes = _awq(_cut(source, inputs, _words(outputs, each))).t()
        case _, "weight":
            codes = _fields(_cut(source, outputs, _words(inputs, each)), scheme.bits)
        case (("gptq" | "gptq_v2"), "weight_zero"):
            return _gptq_zeros(name, _fields(_cut(source, groups, _words(outputs, each)), scheme.bits), scheme).t()
        case "awq", "weight_zero":
            return _awq(_cut(source, groups, _words(outputs, each))).t()
        case _, "weight_zero":
            return _fields(_cut(source, _words(outputs, each), groups).t(), scheme.bits).t()
        case "compressed-tensors", _:
            return _scales(name, _cut(source, outputs, groups))
        case _:
            return _scales(name, _cut(source, groups, outputs).t())
    return codes if scheme.bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4


def _gptq_zeros(name: str, stored: Tensor, scheme: QuantizationScheme) -> Tensor:
    """Zero points [groups, outputs]. Where all are the middle of the codes, whichever of both ways they are written in tells itself:
    checkpoints say the wrong one, or none. ProcessFatal: `sym` is true, and they are others."""
    middle = 1 << scheme.bits - 1
    if scheme.symmetric is not False:
        if bool((stored == stored.flatten()[0]).all()) and int(stored.flatten()[0]) in (middle - 1, middle):
            return torch.full_like(stored, middle)
        if scheme.symmetric:
            raise ProcessFatal(
                f"tensor {name}: quantization_config says sym true, and zero points are not all {middle - 1} or all {middle}; "
                "with sym false they are taken as they are"
            )
    plus = 1 if scheme.files == "gptq" else 0
    return (stored.to(torch.int32) + plus).clamp(max=255).to(torch.uint8)


def _mxfp4(name: str, source: Source, found: ScaleTensor, spans: tuple[tuple[int, int], ...]) -> Tensor:
    """spans: outputs, inputs, groups. The first code of a byte is in its low half, as in the parameter."""
    outputs, inputs, groups = spans
    if found.parameter == "weight":
        return _cut(source, outputs, (inputs[0] // 2, inputs[1] // 2))
    exponents = _cut(source, outputs, groups).to(torch.int32)
    if bool((exponents == NAN).any()):
        raise ProcessFatal(f"tensor {name}: a scale must be a number, and one is not")
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - 127)


def _cut(source: Source, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    if rows == (0, source.shape[0]):
        return source.part(1, *columns)
    return source.part(0, *rows)[:, columns[0] : columns[1]]


def _words(span: tuple[int, int], each: int) -> tuple[int, int]:
    return span[0] // each, span[1] // each


def _scales(name: str, values: Tensor) -> Tensor:
    values = values.to(torch.float32)
    if not bool(values.isfinite().all()):
        raise ProcessFatal(f"tensor {name}: a scale must be a number, and one is not")
    return values


def _fields(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, words * 32 / bits], from the lowest bits on."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words.to(torch.int32).unsqueeze(-1) >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(1)


def _awq(words: Tensor) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, words * 8], in the order of outputs."""
    order = torch.tensor(AWQ_ORDER, device=words.device)
    return _fields(words, 4).view(words.shape[0], -1, 8)[:, :, order].flatten(1)


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

    Of packed weights: see `packed_rows`."""
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
