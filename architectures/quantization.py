"""What a `quantization_config` says of a checkpoint's weights: one `QuantizationFormat` for each quant_method that is read.

The supervisor reads it before a process starts; workers find by the same entry how to compute. A plug-in registers its own.
"""

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from meshlm.architectures.config_values import shown
from meshlm.protocol.model import QuantizationScheme, QuantizationSpec

FP8 = "F8_E4M3"  # as safetensors writes the type of such weights


class QuantizationFormat(NamedTuple):
    """One quant_method."""

    name: str
    read: Callable[[dict[str, Any]], QuantizationSpec]  # ValueError names the key that is not honoured
    method: str  # module and class of its LinearMethod, made from a QuantizationScheme


_FORMATS: dict[str, QuantizationFormat] = {}


def register(found: QuantizationFormat) -> None:
    """Let checkpoints of this quant_method be served. ValueError: there is one of that name."""
    if found.name in _FORMATS:
        raise ValueError(f"quantization {found.name} is registered already")
    _FORMATS[found.name] = found


def formats() -> dict[str, QuantizationFormat]:
    """All quantisation formats, by quant_method."""
    return dict(_FORMATS)


def scheme_of(spec: QuantizationSpec | None, module: str) -> QuantizationScheme | None:
    """The scheme of the linear layer with this name in a checkpoint; None where it is not quantised."""
    if spec is None or any(_matches(pattern, module) for pattern in spec.ignore):
        return None
    targeted = (scheme for scheme in spec.schemes if any(_matches(pattern, module) for pattern in scheme.targets))
    return next(targeted, None)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern == "Linear" or f".{pattern}." in f".{module}."


def read_fp8(config: dict[str, Any]) -> QuantizationSpec:
    """quant_method fp8: of transformers, DeepSeek, Qwen and AutoFP8."""
    _only(
        config, "quant_method activation_scheme weight_block_size ignored_layers modules_to_not_convert fmt dequantize"
    )
    _one_of(config, "fmt", ("e4m3", None))
    dynamic = _one_of(config, "activation_scheme", ("dynamic", "static")) == "dynamic"
    block = config.get("weight_block_size")
    ignore = (*_names(config, "ignored_layers"), *_names(config, "modules_to_not_convert"), "lm_head")
    if block is None:
        scheme = QuantizationScheme(targets=("Linear",), weight="tensor", activation="token" if dynamic else "static")
        return QuantizationSpec(method="fp8", schemes=(scheme,), ignore=ignore)
    if not dynamic:
        raise ValueError("activation_scheme 'static' goes with no weight_block_size")
    sizes = _block(config, "weight_block_size")
    scheme = QuantizationScheme(targets=("Linear",), weight="block", block=sizes, activation="group", group=sizes[1])
    return QuantizationSpec(method="fp8", schemes=(scheme,), ignore=ignore, weight_scale="weight_scale_inv")


_FP8_FORMATS = ("float-quantized", "naive-quantized", None)


def read_compressed_tensors(config: dict[str, Any]) -> QuantizationSpec:
    """quant_method compressed-tensors: weights of 8 bits float, activations of 8 bits float or as they are."""
    _only(
        config,
        "quant_method format config_groups ignore kv_cache_scheme quantization_status global_compression_ratio version"
        " sparsity_config",
    )
    _one_of(config, "format", _FP8_FORMATS)
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise ValueError(f"sparsity_config {shown(sparsity)} is not supported")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"config_groups must name groups of layers, got {shown(groups)}")
    schemes = []
    for name, group in groups.items():
        try:
            schemes.append(_scheme(group))
        except ValueError as error:
            raise ValueError(f"config_groups: {name}: {error}") from None
    return QuantizationSpec(method="compressed-tensors", schemes=tuple(schemes), ignore=_names(config, "ignore"))


def _scheme(group: Any) -> QuantizationScheme:
    if not isinstance(group, dict):
        raise ValueError(f"it must be an object, got {shown(group)}")
    _only(group, "targets weights input_activations format")
    _one_of(group, "format", _FP8_FORMATS)
    weights = _arguments(group, "weights")
    strategy: Literal["tensor", "channel", "block"] = _one_of(weights, "strategy", ("tensor", "channel", "block"))
    if weights.get("dynamic"):
        raise ValueError(f"weights: dynamic {shown(weights['dynamic'])} is not supported")
    block = _block(weights, "block_structure") if strategy == "block" else (0, 0)
    targets, activation, size = _names(group, "targets"), "none", 0
    if group.get("input_activations") is not None:
        inputs = _arguments(group, "input_activations")
        kind = _one_of(inputs, "strategy", ("tensor", "token", "group"))
        dynamic = _one_of(inputs, "dynamic", (True, False, None))
        size = inputs.get("group_size") or 0
        if not dynamic and kind != "tensor":
            raise ValueError(f"input_activations: strategy {kind!r} is supported where dynamic is true")
        if (type(size) is not int or size <= 0) if kind == "group" else size:
            raise ValueError(f"input_activations: group_size {shown(size)} does not go with strategy {kind!r}")
        activation = "static" if not dynamic else "group" if kind == "group" else "token"
    return QuantizationScheme(targets=targets, weight=strategy, block=block, activation=activation, group=size)  # type: ignore[arg-type]


def _arguments(group: dict[str, Any], key: str) -> dict[str, Any]:
    """weights or input_activations: of 8 bits float, symmetric."""
    found = group.get(key)
    if not isinstance(found, dict):
        raise ValueError(f"{key} must be an object, got {shown(found)}")
    try:
        _only(
            found,
            "num_bits type symmetric strategy dynamic group_size block_structure observer observer_kwargs scale_dtype zp_dtype",
        )
        _one_of(found, "num_bits", (8,))
        _one_of(found, "type", ("float",))
        _one_of(found, "symmetric", (True, None))
        if key == "weights" and found.get("group_size"):
            raise ValueError(f"group_size {shown(found['group_size'])} is not supported")
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    return found


def _only(config: dict[str, Any], known: str) -> None:
    """A key that is null, false, 0 or empty asks for nothing."""
    foreign = next((key for key, value in config.items() if value and key not in known.split()), None)
    if foreign is not None:
        raise ValueError(f"{foreign} {shown(config[foreign])} is not supported")


def _one_of(config: dict[str, Any], key: str, choices: tuple[Any, ...]) -> Any:
    value = config.get(key)
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        supported = ", ".join(str(choice) for choice in choices if choice is not None)
        raise ValueError(f"{key} {shown(value)} is not supported; supported: {supported}")
    return value


def _names(config: dict[str, Any], key: str) -> tuple[str, ...]:
    """Names of layers, and regular expressions that can be compiled."""
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{key} must be a list of names, got {shown(names)}")
    for name in names:
        try:
            re.compile(name[3:] if name.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"{key}: {shown(name)} is no regular expression ({error})") from None
    return tuple(names)


def _block(config: dict[str, Any], key: str) -> tuple[int, int]:
    sizes = config.get(key)
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"{key} must be two positive integers, got {shown(sizes)}")
    return sizes[0], sizes[1]


_FP8_LINEAR = "meshlm.workers.quantization.fp8:Fp8Linear"
register(QuantizationFormat("fp8", read_fp8, _FP8_LINEAR))
register(QuantizationFormat("compressed-tensors", read_compressed_tensors, _FP8_LINEAR))
