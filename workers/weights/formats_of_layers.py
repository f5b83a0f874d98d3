"""Finds the layers of a model that are quantised, by the names of their weights in the checkpoint, and the method of each."""

from importlib import import_module

from meshlm.architectures.packed_quantization import of_layer
from meshlm.architectures.quantization import formats, scheme_of
from meshlm.protocol.model import QuantizationScheme, QuantizationSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.formats.format import WeightFormat
from meshlm.workers.formats.fp8 import Fp8Format
from meshlm.workers.layers.linear import Linear
from meshlm.workers.layers.moe import GroupedLinear
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights.slices import WeightSlice, slices_of


def use_formats(model: Decoder) -> None:
    """Give each quantised layer of a model on the meta device its method. ProcessFatal names layers that cannot be as the file asks."""
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
        if isinstance(module, Linear):
            if slices[f"{stems[path][0]}.weight"].column is not None:  # several by columns are of the model's type
                continue
            scheme = _common(spec, stems[path])
            if scheme is not None:
                for stem in stems[path]:
                    _check_split(stem, slices[f"{stem}.weight"], scheme)
                if scheme.weight == "group":
                    inputs = slices[f"{stems[path][0]}.weight"].shape[1]
                    scheme = of_layer(scheme, inputs, len(stems[path]))
                module.use(_method(spec, scheme))
        elif isinstance(module, GroupedLinear):
            _use_experts_method(module, spec, stems[path], slices)


def _use_experts_method(
    module: GroupedLinear, spec: QuantizationSpec, stems: list[str], slices: dict[str, WeightSlice]
) -> None:
    """Experts of a layer are 8-bit floats or of the model's type, all alike."""
    scheme = _common(spec, stems)
    if scheme is None:
        return
    if not isinstance(_method(spec, scheme), Fp8Format):
        raise ProcessFatal(
            f"quantization_config: {stems[0]} is an expert's; experts of method {spec.method} are not supported"
        )
    if scheme.activation == "static":
        raise ProcessFatal(
            f"quantization_config: {stems[0]} is an expert's; activation scales in the file are not supported for these"
        )
    for stem in stems:
        _check_split(stem, slices[f"{stem}.weight"], scheme)
    module.use_fp8(scheme)


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


def _method(spec: QuantizationSpec, scheme: QuantizationScheme) -> WeightFormat:
    known = formats()
    if spec.method not in known:
        raise ProcessFatal(f"quantization {spec.method} is not supported; supported: {', '.join(sorted(known))}")
    module, _, name = known[spec.method].method.partition(":")
    found: WeightFormat = getattr(import_module(module), name)(scheme)
    return found
