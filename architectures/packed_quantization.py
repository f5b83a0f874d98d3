"""Checkpoints whose files hold several codes in a word: GPTQ, AWQ, compressed-tensors' pack-quantized, bitsandbytes with 4 bits (NF4,
FP4), and the names of the tensors that they have beside a layer's weight. See quantization.py.
"""

import re
from typing import Any, Literal

from msgspec.structs import replace

from meshlm.architectures.config_values import names, one_of, only, same, shown
from meshlm.protocol.model import QuantizationScheme, QuantizationSpec


def group_scheme(**fields: Any) -> QuantizationScheme:
    """Codes of groups of inputs, and activations as they are."""
    return QuantizationScheme(weight="group", activation="none", **fields)


BLOCK = 64  # codes that share a scale
_SETTINGS = (
    "quant_method load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_quant_type bnb_4bit_use_double_quant"
    " bnb_4bit_compute_dtype bnb_4bit_quant_storage llm_int8_threshold llm_int8_skip_modules"
)


def read_bitsandbytes(config: dict[str, Any]) -> QuantizationSpec:
    """quant_method bitsandbytes. llm_int8_threshold means nothing to 4 bits."""
    only(config, _SETTINGS)
    one_of(config, "load_in_8bit", (False, None))
    one_of(config, "_load_in_8bit", (False, None))
    one_of(config, "load_in_4bit", (True,))
    same(config, "load_in_4bit", "_load_in_4bit")
    one_of(config, "bnb_4bit_quant_storage", ("uint8", None))
    kind = one_of(config, "bnb_4bit_quant_type", ("nf4", "fp4"))
    return bitsandbytes_spec(kind, names(config, "llm_int8_skip_modules"), online=False)


def bitsandbytes_spec(kind: str, ignore: tuple[str, ...] = (), *, online: bool = True) -> QuantizationSpec:
    """kind: nf4 or fp4. online: of plain weights, while they are loaded."""
    scheme = group_scheme(
        targets=("Linear",), bits=4, weight_group=BLOCK, files="bitsandbytes", values="fp4" if kind == "fp4" else "nf4",
        online=online,
    )  # fmt: skip
    return QuantizationSpec(method="bitsandbytes", schemes=(scheme,), ignore=("lm_head", *ignore))


GROUPS = (32, 64, 128, -1)
_MEANS_NOTHING_HERE = (
    "quant_method damp_percent damp_auto_increment static_groups true_sequential model_name_or_path model_file_base_name quantizer"
    " meta tokenizer dataset batch_size use_cuda_fp16 use_exllama disable_exllama exllama_config max_input_length pad_token_id"
    " cache_block_outputs block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize model_seqlen mse"
    " act_group_aware backend do_fuse fuse_max_seq_len modules_to_fuse q_group_size w_bit quant_type"
)


def read_gptq(config: dict[str, Any]) -> QuantizationSpec:
    """quant_method gptq, as AutoGPTQ and GPTQModel write it. `dynamic` overrides settings of layers by regular expressions."""
    only(
        config,
        f"{_MEANS_NOTHING_HERE} bits group_size desc_act sym checkpoint_format format lm_head pack_dtype dynamic version",
    )
    one_of(config, "pack_dtype", ("int32", None))
    of_head = one_of(config, "lm_head", (True, False, None))
    for key in ("checkpoint_format", "format"):
        one_of(config, key, ("gptq", "gptq_v2", None))
    same(config, "checkpoint_format", "format")
    _same_names(config)
    second = "gptq_v2" in (config.get("checkpoint_format"), config.get("format"))
    usual = _gptq_scheme(config, ("Linear",), "gptq_v2" if second else "gptq")
    ignore, schemes = ([] if of_head else ["lm_head"]), []
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise ValueError(f"dynamic must be an object, got {shown(dynamic)}")
    for pattern, changes in dynamic.items():
        expression = pattern[2:] if pattern[:2] in ("-:", "+:") else pattern
        try:
            re.compile(expression)
        except re.error as error:
            raise ValueError(f"dynamic: {shown(pattern)} is no regular expression ({error})") from None
        if pattern.startswith("-:"):
            ignore.append(f"re:{expression}")
            continue
        if not isinstance(changes, dict):
            raise ValueError(f"dynamic: {shown(pattern)} must be an object, got {shown(changes)}")
        only(changes, "bits group_size desc_act sym")
        schemes.append(_gptq_scheme({**config, **changes}, (f"re:{expression}",), usual.files))
    return QuantizationSpec(method="gptq", schemes=(*schemes, usual), ignore=tuple(ignore))


def _gptq_scheme(
    config: dict[str, Any],
    targets: tuple[str, ...],
    files: Literal["", "gptq", "gptq_v2", "awq", "compressed-tensors", "bitsandbytes", "mxfp4"],
) -> QuantizationScheme:
    one_of(config, "desc_act", (True, False, None))
    return group_scheme(
        targets=targets, bits=one_of(config, "bits", (4, 8)), weight_group=one_of(config, "group_size", GROUPS),
        zeros=True, symmetric=one_of(config, "sym", (True, False, None)), files=files,
        act_order=bool(config.get("desc_act")),
    )  # fmt: skip


def _same_names(config: dict[str, Any]) -> None:
    """AWQ has other names for two keys, and a file may have both. ValueError where they differ."""
    same(config, "bits", "w_bit")
    same(config, "group_size", "q_group_size")


def read_awq(config: dict[str, Any]) -> QuantizationSpec:
    """quant_method awq, as AutoAWQ writes it. Layers are excepted by parts of their names."""
    only(config, f"{_MEANS_NOTHING_HERE} bits group_size zero_point version modules_to_not_convert")
    version = config.get("version")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise ValueError(f"version {shown(version)} is not supported; supported: gemm")
    one_of(config, "zero_point", (True,))
    _same_names(config)
    bits, group = ("bits", "group_size") if "bits" in config else ("w_bit", "q_group_size")
    excepted = tuple(f"re:.*{re.escape(name)}" for name in names(config, "modules_to_not_convert"))
    scheme = group_scheme(
        targets=("Linear",),
        bits=one_of(config, bits, (4,)),
        weight_group=one_of(config, group, GROUPS),
        zeros=True,
        files="awq",
    )
    return QuantizationSpec(method="awq", schemes=(scheme,), ignore=("lm_head", *excepted))


def packed_scheme(weights: dict[str, Any], targets: tuple[str, ...]) -> QuantizationScheme:
    """The weights of a group of compressed-tensors' config_groups with format pack-quantized."""
    bits = one_of(weights, "num_bits", (4, 8))
    strategy = one_of(weights, "strategy", ("group", "channel"))
    symmetric = one_of(weights, "symmetric", (True, False))
    order = one_of(weights, "actorder", ("group", "weight", "static", False, None))
    size = one_of(weights, "group_size", GROUPS[:3]) if strategy == "group" else -1
    return group_scheme(
        targets=targets, bits=bits, weight_group=size, zeros=not symmetric, files="compressed-tensors",
        act_order=order == "group",
    )  # fmt: skip


def mxfp4_scheme(weights: dict[str, Any], targets: tuple[str, ...]) -> QuantizationScheme:
    """The weights of a group of compressed-tensors' config_groups with format mxfp4-pack-quantized."""
    one_of(weights, "num_bits", (4,))
    one_of(weights, "strategy", ("group",))
    one_of(weights, "symmetric", (True, None))
    return group_scheme(
        targets=targets, bits=4, weight_group=one_of(weights, "group_size", (32,)), files="mxfp4", values="mxfp4"
    )


INTEGERS = ("I32", "I64")
_FLOATS = ("F64", "F32", "F16", "BF16")
_GPTQ: dict[str, tuple[str, tuple[str, ...]]] = {
    "qweight": ("weight", INTEGERS),
    "qzeros": ("weight_zero", INTEGERS),
    "scales": ("weight_scale", _FLOATS),
    "g_idx": ("input_group", INTEGERS),
}
TENSORS: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "gptq": _GPTQ,
    "gptq_v2": _GPTQ,
    "awq": {name: _GPTQ[name] for name in ("qweight", "qzeros", "scales")},
    "compressed-tensors": {
        "weight_packed": ("weight", INTEGERS),
        "weight_zero_point": ("weight_zero", INTEGERS),
        "weight_scale": ("weight_scale", _FLOATS),
        "weight_g_idx": ("input_group", INTEGERS),
        "weight_shape": ("weight_shape", INTEGERS),
    },
    "bitsandbytes": {"weight": ("weight", ("U8",)), "weight_scale": ("weight_scale", _FLOATS)},
    "mxfp4": {"weight_packed": ("weight", ("U8",)), "weight_scale": ("weight_scale", ("U8",))},
}
"""By layout: the tensors that stand for a layer's weight, what each of them is, and the types it may have."""
STATE = "bitsandbytes__"
_STATES = {"absmax": ("F32", "U8"), "quant_map": ("F32",), "nested_absmax": ("F32",), "nested_quant_map": ("F32",)}
"""The names that bitsandbytes has behind that of a weight, beside a tensor whose last part begins with STATE."""


def stem_of(name: str) -> tuple[str, str]:
    """A tensor's layer, and what of it the tensor is; a part of bitsandbytes' state is called weight.absmax, ..."""
    stem, weight, last = name.partition(".weight.")
    if weight:
        return stem, f"weight.{last}"
    stem, _, last = name.rpartition(".")
    return stem, last


def holds(scheme: QuantizationScheme | None, last: str, dtype: str) -> bool:
    """Whether a layer of this scheme has a tensor with this last part of its name and of this type."""
    if scheme is None or scheme.online:
        return False
    if scheme.integers and not scheme.files:
        return (last == "weight" and dtype == "I8") or (last == "input_zero_point" and dtype in ("I8", *INTEGERS))
    if scheme.files == "bitsandbytes" and last.startswith("weight."):
        part = last.removeprefix("weight.")
        return dtype == "U8" if part.startswith(f"quant_state.{STATE}") else dtype in _STATES.get(part, ())
    return dtype in TENSORS.get(scheme.files, {}).get(last, ("", ()))[1]


def of_layer(scheme: QuantizationScheme, inputs: int, projections: int = 1) -> QuantizationScheme:
    """The scheme of a layer with so many inputs: its groups have a size, also where a whole row is one."""
    size = inputs if scheme.weight_group == -1 else scheme.weight_group
    return replace(scheme, weight_group=size, num_groups=-(-inputs // size), projections=projections)
