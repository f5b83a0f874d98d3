"""Gives the layers of a model that are quantised, which it finds by the names of their weights in the checkpoint, their formats."""

from importlib import import_module

from meshlm.architectures.packed_quantization import of_layer
from meshlm.architectures.quantization import formats, scheme_of
from meshlm.protocol.model import QuantizationScheme, QuantizationSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.formats.format import WeightedLayer, WeightFormat
from meshlm.workers.formats.fp8 import Fp8Format
from meshlm.workers.formats.int8 import Int8Format
from meshlm.workers.formats.packed import PackedFormat
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights.slices import WeightSlice, slices_of


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
