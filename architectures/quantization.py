"""A `quantization_config` as a description of a checkpoint's weights: one `QuantizationFormat` for each quant_method that is read.
The supervisor reads it before a process starts; workers find by the same entry how to compute. A plug-in registers its own.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from meshlm.architectures import packed_quantization
from meshlm.architectures.config_values import block_sizes, names, one_of, only, shown
from meshlm.protocol.model import QuantizationScheme, QuantizationSpec

FP8 = "F8_E4M3"  # as safetensors writes the type of such weights


class QuantizationFormat(NamedTuple):
    name: str
    read: Callable[[dict[str, Any]], QuantizationSpec]  # ValueError names the key that is not honoured
    encodes: bool = False  # its WeightFormat quantises floats while they are loaded, where a scheme says so
    online: QuantizationSpec | None = None  # what --quantization makes of plain weights
    # module and class of a WeightFormat, made from a layer's scheme; empty: the one of such schemes
    weight_format: str = ""


_FORMATS: dict[str, QuantizationFormat] = {}


def register(found: QuantizationFormat) -> None:
    """Let checkpoints of this quant_method be served. ValueError: there is one of that name."""
    if found.name in _FORMATS:
        raise ValueError(f"quantization {found.name} is registered already")
    _FORMATS[found.name] = found


def formats() -> dict[str, QuantizationFormat]:
    """All quantisation formats, by quant_method."""
    return dict(_FORMATS)


def while_loading(spec: QuantizationSpec) -> QuantizationSpec | None:
    """The same quantisation of files that hold floats; None where no format makes it."""
    if not _FORMATS[spec.method].encodes:
        return None
    schemes = tuple(
        replace(
            scheme,
            online=True,
            act_order=False,
            activation="token" if scheme.activation == "static" else scheme.activation,
        )
        for scheme in spec.schemes
    )
    return replace(spec, schemes=schemes)


def scheme_of(spec: QuantizationSpec | None, module: str) -> QuantizationScheme | None:
    """The scheme of the linear layer with this name in a checkpoint; None where it is not quantised."""
    if spec is None or any(_matches(pattern, module) for pattern in spec.ignore):
        return None
    targeted = (scheme for scheme in spec.schemes if any(_matches(pattern, module) for pattern in scheme.targets))
    return next(targeted, None)


def with_projections(spec: QuantizationSpec, packed: Mapping[str, tuple[str, ...]]) -> QuantizationSpec:
    """The same where names of tensors that hold several projections (Family.packed) are those of the projections, too."""
    last = {stem.rpartition(".")[2]: [name.rpartition(".")[2] for name in names] for stem, names in packed.items()}

    def spread(patterns: tuple[str, ...]) -> tuple[str, ...]:
        more = [
            pattern.replace(fused, name)
            for pattern in patterns
            for fused, names in last.items()
            if fused in pattern
            for name in names
            if "{}" not in name
        ]
        return (*patterns, *more)

    schemes = tuple(replace(scheme, targets=spread(scheme.targets)) for scheme in spec.schemes)
    return replace(spec, schemes=schemes, ignore=spread(spec.ignore))


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern == "Linear" or f".{pattern}." in f".{module}."


def read_fp8(config: dict[str, Any]) -> QuantizationSpec:
    """quant_method fp8: of transformers, DeepSeek, Qwen and AutoFP8."""
    only(
        config, "quant_method activation_scheme weight_block_size ignored_layers modules_to_not_convert fmt dequantize"
    )
    one_of(config, "fmt", ("e4m3", None))
    one_of(config, "dequantize", (False, None))
    dynamic = one_of(config, "activation_scheme", ("dynamic", "static")) == "dynamic"
    block = config.get("weight_block_size")
    ignore = (*names(config, "ignored_layers"), *names(config, "modules_to_not_convert"), "lm_head")
    if block is None:
        scheme = QuantizationScheme(targets=("Linear",), weight="tensor", activation="token" if dynamic else "static")
        return QuantizationSpec(method="fp8", schemes=(scheme,), ignore=ignore)
    if not dynamic:
        raise ValueError("activation_scheme 'static' goes with no weight_block_size")
    sizes = block_sizes(config, "weight_block_size")
    scheme = QuantizationScheme(targets=("Linear",), weight="block", block=sizes, activation="group", group=sizes[1])
    return QuantizationSpec(method="fp8", schemes=(scheme,), ignore=ignore, weight_scale="weight_scale_inv")


_FORMATS_OF_FILES = (
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    None,
)


def read_compressed_tensors(config: dict[str, Any]) -> QuantizationSpec:
    """quant_method compressed-tensors: weights of 8 bits float, and activations too or as they are; or packed integers."""
    only(
        config,
        "quant_method format config_groups ignore kv_cache_scheme quantization_status global_compression_ratio version"
        " sparsity_config",
    )
    one_of(config, "format", _FORMATS_OF_FILES)
    one_of(config, "quantization_status", (None, "initialized", "calibration", "frozen", "compressed"))
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or (sparsity and sparsity.get("format") != "dense"):
        raise ValueError(f"sparsity_config {shown(sparsity)} is not supported")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"config_groups must name groups of layers, got {shown(groups)}")
    schemes = []
    for name, group in groups.items():
        try:
            schemes.append(_scheme(group, config.get("format")))
        except ValueError as error:
            raise ValueError(f"config_groups: {name}: {error}") from None
    return QuantizationSpec(method="compressed-tensors", schemes=tuple(schemes), ignore=names(config, "ignore"))


def _scheme(group: Any, written: Any) -> QuantizationScheme:
    """written: the format of the whole checkpoint; a group may have its own."""
    if not isinstance(group, dict):
        raise ValueError(f"it must be an object, got {shown(group)}")
    only(group, "targets weights input_activations format")
    one_of(group, "format", _FORMATS_OF_FILES)
    if (group.get("format") or written) in ("pack-quantized", "mxfp4-pack-quantized"):
        return _packed(group, floats=(group.get("format") or written) == "mxfp4-pack-quantized")
    integers = _object(group, "weights").get("type") == "int"
    weights = _arguments(group, "weights", integers=integers)
    strategies = ("tensor", "channel") if integers else ("tensor", "channel", "block")
    strategy: Literal["tensor", "channel", "block"] = one_of(weights, "strategy", strategies)
    if weights.get("dynamic"):
        raise ValueError(f"weights: dynamic {shown(weights['dynamic'])} is not supported")
    block = block_sizes(weights, "block_structure") if strategy == "block" else (0, 0)
    activation: Literal["none", "static", "token", "group"] = "none"
    targets, size = names(group, "targets"), 0
    if group.get("input_activations") is not None:
        inputs = _arguments(group, "input_activations", integers=integers)
        kind = one_of(inputs, "strategy", ("tensor", "token") if integers else ("tensor", "token", "group"))
        dynamic = one_of(inputs, "dynamic", (True, False, None))
        size = inputs.get("group_size") or 0
        if not dynamic and kind != "tensor":
            raise ValueError(f"input_activations: strategy {kind!r} is supported where dynamic is true")
        if (type(size) is not int or size <= 0) if kind == "group" else size:
            raise ValueError(f"input_activations: group_size {shown(size)} does not go with strategy {kind!r}")
        activation = "static" if not dynamic else "group" if kind == "group" else "token"
    elif integers:
        raise ValueError("input_activations must be there for weights of 8-bit integers that are not pack-quantized")
    zeros = integers and inputs.get("symmetric") is False
    return QuantizationScheme(
        targets=targets, weight=strategy, block=block, activation=activation, group=size, integers=integers, zeros=zeros
    )


def _packed(group: dict[str, Any], *, floats: bool) -> QuantizationScheme:
    """floats: of mxfp4-pack-quantized."""
    weights = _object(group, "weights")
    if group.get("input_activations") is not None:
        raise ValueError("input_activations go with no packed weights here: activations of 4 bits are not supported")
    try:
        only(weights, _ARGUMENTS if floats else f"{_ARGUMENTS} actorder")
        one_of(weights, "type", ("float",) if floats else ("int",))
        one_of(weights, "dynamic", (False, None))
        if floats:
            return packed_quantization.mxfp4_scheme(weights, names(group, "targets"))
        return packed_quantization.packed_scheme(weights, names(group, "targets"))
    except ValueError as error:
        raise ValueError(f"weights: {error}") from None


_ARGUMENTS = (
    "num_bits type symmetric strategy dynamic group_size block_structure observer observer_kwargs scale_dtype zp_dtype"
)


def _object(group: dict[str, Any], key: str) -> dict[str, Any]:
    found = group.get(key)
    if not isinstance(found, dict):
        raise ValueError(f"{key} must be an object, got {shown(found)}")
    return found


def _arguments(group: dict[str, Any], key: str, *, integers: bool = False) -> dict[str, Any]:
    """weights or input_activations: of 8 bits, symmetric; activations that are integers may have a zero point."""
    found = _object(group, key)
    try:
        only(found, _ARGUMENTS)
        one_of(found, "num_bits", (8,))
        one_of(found, "type", ("int",) if integers else ("float",))
        one_of(found, "symmetric", (True, False, None) if integers and key != "weights" else (True, None))
        if key == "weights" and found.get("group_size"):
            raise ValueError(f"group_size {shown(found['group_size'])} is not supported")
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    return found


def read_mxfp4(config: dict[str, Any]) -> QuantizationSpec:
    """quant_method mxfp4: experts alone, whose tensors are kept or decoded while they are read; which they are, the files say."""
    only(config, "quant_method modules_to_not_convert dequantize")
    return QuantizationSpec(method="mxfp4", schemes=(), ignore=names(config, "modules_to_not_convert"))


def is_mxfp4(spec: QuantizationSpec | None, name: str, dtype: str) -> bool:
    """Whether a tensor holds MXFP4 codes or scales."""
    return spec is not None and spec.method == "mxfp4" and dtype == "U8" and name.endswith(("_blocks", "_scales"))


def read_experts_int8(config: dict[str, Any]) -> QuantizationSpec:
    """quant_method experts_int8: files hold plain weights, of which those of experts are quantised while they are loaded."""
    only(config, "quant_method")
    return _EXPERTS_INT8


_FP8_ROWS = QuantizationScheme(targets=("Linear",), weight="channel", activation="token", online=True)
_FP8_ONLINE = QuantizationSpec(method="fp8", schemes=(_FP8_ROWS,), ignore=("lm_head",))
register(QuantizationFormat("fp8", read_fp8, encodes=True, online=_FP8_ONLINE))
register(QuantizationFormat("compressed-tensors", read_compressed_tensors, encodes=True))
register(QuantizationFormat("mxfp4", read_mxfp4, encodes=True))  # of experts: weights/layer_formats.py
register(QuantizationFormat("gptq", packed_quantization.read_gptq, encodes=True))
register(QuantizationFormat("awq", packed_quantization.read_awq, encodes=True))
_NF4 = packed_quantization.bitsandbytes_spec("nf4")
register(QuantizationFormat("bitsandbytes", packed_quantization.read_bitsandbytes, encodes=True, online=_NF4))
_INT8_ROWS = QuantizationScheme(
    targets=(r"re:.*\.experts\.\d+\.",), weight="group", weight_group=-1, activation="none", symmetric=True, online=True
)
_EXPERTS_INT8 = QuantizationSpec(method="experts_int8", schemes=(_INT8_ROWS,))
_INT8_FORMAT = "meshlm.workers.formats.experts_int8:ExpertsInt8Format"
register(QuantizationFormat("experts_int8", read_experts_int8, online=_EXPERTS_INT8, weight_format=_INT8_FORMAT))
