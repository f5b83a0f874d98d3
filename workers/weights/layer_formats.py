"""Gives layers that are quantised their formats, found by the names of their weights in the checkpoint; and says which experts keep the
codes of their files on a GPU. Called by load.py, before weights are read.
"""

from collections.abc import Callable, Iterable
from importlib import import_module

import structlog
import torch

from meshlm.architectures.packed_quantization import of_layer
from meshlm.architectures.quantization import formats, scheme_of
from meshlm.kernels.mxfp4.reference import GROUP
from meshlm.protocol.config import Resolved
from meshlm.protocol.model import ModelSpec, QuantizationScheme, QuantizationSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.formats.eight_bits import Fp8Format, Int8Format
from meshlm.workers.formats.expert_codes import ExpertCodes, MXFP4Format
from meshlm.workers.formats.format import WeightedLayer, WeightFormat, has_kernels
from meshlm.workers.formats.packed import PackedFormat
from meshlm.workers.layers.moe import MoE
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.moe.registry import computes_gate
from meshlm.workers.weights.layouts import MXFP4Source
from meshlm.workers.weights.slices import WeightSlice, place, slices_of
from meshlm.workers.weights.source import Source


def use_formats(model: Decoder) -> None:
    """Give each quantised layer of a model on the meta device its format. ProcessFatal names layers that cannot be as the file asks."""
    spec = model.spec.quantization
    if spec is None:
        return
    stems: dict[str, list[str]] = {}
    slices = slices_of(model.spec, model.shard)
    for name, found in slices.items():
        if name.endswith(".weight"):
            stems.setdefault(found.parameter.removesuffix(".weight"), []).append(name.removesuffix(".weight"))
    modules = list(model.layers.named_modules(prefix="layers"))
    if model.head is not None and "head" in stems:
        modules.append(("head", model.head))
    for path, module in modules:
        if not isinstance(module, WeightedLayer) or path not in stems:
            continue
        found = slices[f"{stems[path][0]}.weight"]
        if found.column is not None:  # several by columns are of the model's type
            continue
        scheme = _common(spec, stems[path])
        if scheme is not None:
            for stem in stems[path]:
                _check_split(stem, slices[f"{stem}.weight"], scheme)
            if scheme.weight == "group":
                projections = len({slices[f"{stem}.weight"].row for stem in stems[path]})
                scheme = of_layer(scheme, found.shape[1], projections)
            module.use(_format(spec, scheme))


def _common(spec: QuantizationSpec, stems: list[str]) -> QuantizationScheme | None:
    """The scheme that projections share which are one product here."""
    first, *others = (scheme_of(spec, stem) for stem in stems)
    if any(scheme != first for scheme in others):
        raise ProcessFatal(
            f"quantization_config: {', '.join(stems)} are one product here; they must be quantised alike"
        )
    return first


def _check_split(stem: str, found: WeightSlice, scheme: QuantizationScheme) -> None:
    """A group of inputs has one scale, which two ranks cannot find each by itself."""
    whole = scheme.block[1] if scheme.weight == "block" else 1
    if scheme.weight == "group" and not scheme.act_order:
        whole = max(1, scheme.weight_group)
    for size in (whole, scheme.group or 1):
        if found.dim == 1 and (found.begin % size or (found.end % size and found.end != found.shape[1])):
            raise ProcessFatal(
                f"--tensor-parallel-size: {stem} has {found.end - found.begin} inputs on a rank, no multiple of the {size} that "
                "quantization_config gives one scale"
            )


def _format(spec: QuantizationSpec, scheme: QuantizationScheme) -> WeightFormat:
    known = formats()
    if spec.method not in known:
        raise ProcessFatal(f"quantization {spec.method} is not supported; supported: {', '.join(sorted(known))}")
    module, _, name = known[spec.method].weight_format.partition(":")
    if module:
        own: WeightFormat = getattr(import_module(module), name)(scheme)
        return own
    if scheme.weight == "group":
        return PackedFormat(scheme)
    return Int8Format(scheme) if scheme.integers else Fp8Format(scheme)


_log = structlog.get_logger()


def keep_codes(model: Decoder, device: torch.device, dtype: torch.dtype) -> None:
    """Says to the formats of experts whether these keep their codes. A line in the log says why those of a GPU do not."""
    reasons = {}
    for mixture in model.mixtures():
        formats = [layer.format for layer in mixture.experts.linears()]
        codes = [format for format in formats if isinstance(format, ExpertCodes)]
        if len(codes) < len(formats) or any(isinstance(format, MXFP4Format) for format in formats):
            continue
        reason = why_decoded(mixture, codes, device, dtype)
        for format in codes:
            format.keeps_codes = not reason
        reasons[reason] = True
    for reason in filter(None, reasons):
        if device.type == "cuda":
            _log.warning("packed experts are decoded, and take more memory", reason=reason)


def why_decoded(mixture: MoE, formats: list[ExpertCodes], device: torch.device, dtype: torch.dtype) -> str:
    """Why these do not keep their codes; "" where they do."""
    if not has_kernels(device, dtype):
        return "the kernels compute in float16 and bfloat16, on GPUs of compute capability 8.0"
    if not computes_gate(mixture.moe, mixture.act):
        return "the kernels compute experts with a gate and an activation that they know"
    found = [format.codes_format for format in formats]
    kept = [format for format in found if format is not None]
    if len(kept) < len(found):
        return "the kernels do not read the codes of all of them"
    from meshlm.workers.moe.experts.self_test import of_packed

    return next((why for format in kept if (why := of_packed(dtype, device, format))), "")


Tensors = Callable[[], Iterable[tuple[str, Source]]]


def keeps_mxfp4(resolved: Resolved, tensors: Tensors, shard: Shard, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the experts of this shard stay MXFP4. A line in the log says why those of a GPU do not."""
    spec = resolved.spec
    if spec.moe is None or spec.quantization is None or spec.quantization.method != "mxfp4" or device.type != "cuda":
        return False
    reason = _of_files(resolved, tensors) or why_unfit(spec, shard) or _of_device(device, dtype)
    if reason:
        _log.warning("MXFP4 experts are decoded while they are read, and take four times the memory", reason=reason)
    return not reason


def use_mxfp4(model: Decoder) -> None:
    """Makes the parameters of experts those of MXFP4, on the meta device."""
    for mixture in model.mixtures():
        for linear in mixture.experts.linears():
            linear.use(MXFP4Format())


def why_unfit(spec: ModelSpec, shard: Shard) -> str:
    """Why experts of these sizes cannot stay MXFP4: a scale is for 32 inputs, which two ranks cannot have parts of."""
    assert spec.moe is not None
    begin, end = shard.wide(spec.moe.moe_intermediate_size, of_expert=True)
    for what, inputs in (("gate and up have", spec.hidden_size), ("on this rank down has", end - begin)):
        if inputs % GROUP:
            return f"{what} {inputs} inputs, no multiple of the {GROUP} that have a scale together"
    return ""


def _of_files(resolved: Resolved, tensors: Tensors) -> str:
    """Why the files' experts are not all MXFP4."""
    if resolved.load_format == "dummy":
        return ""
    if resolved.load_format in ("gguf", "sharded_state"):
        return f"--load-format {resolved.load_format}"
    for name, source in tensors():
        found = place(name, resolved.spec, Shard())
        if (
            found is not None
            and found.expert is not None
            and name.endswith(".weight")
            and not isinstance(source, MXFP4Source)
        ):
            return f"the files have {name} of type {source.dtype}"
    return ""


def _of_device(device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernels do not compute them here."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the kernels compute in float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernels need compute capability 8.0"
    from meshlm.workers.moe.experts.self_test import of_packed

    return of_packed(dtype, device)
