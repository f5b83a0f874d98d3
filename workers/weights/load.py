"""Fills a model with weights and reports how far it is."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import structlog
import torch
from torch import Tensor, nn

from meshlm.kernels.packed_experts.layout import pack_mxfp4
from meshlm.protocol.config import Resolved
from meshlm.runtime.errors import ProcessFatal
from meshlm.runtime.model_files.checkpoint_files import SCALE_OF_KV_CACHE
from meshlm.workers import memory
from meshlm.workers.distributed.shard import WHOLE, Shard
from meshlm.workers.formats.format import Encode, WeightedLayer, has_kernels
from meshlm.workers.formats.packed import DecodedGGUF, PackedFormat
from meshlm.workers.layers.moe import GroupedLinear
from meshlm.workers.models.decoder import Attention, Decoder, DecoderLayer
from meshlm.workers.models.registry import model_class
from meshlm.workers.weights import sharded_state
from meshlm.workers.weights.check import check_finite, check_tensors
from meshlm.workers.weights.gguf_parameters import PackedParameter, SpannedParameter, keep, keep_spans
from meshlm.workers.weights.layer_formats import keep_codes, keeps_mxfp4, use_formats, use_mxfp4
from meshlm.workers.weights.layouts import MXFP4Source, to_halves
from meshlm.workers.weights.offload import offload
from meshlm.workers.weights.scales import ScaleTensor, check_redundant, scale_rows, scale_tensors
from meshlm.workers.weights.slices import WeightSlice, place
from meshlm.workers.weights.source import Source
from meshlm.workers.weights.sources import sources, weights_of_model
from meshlm.workers.weights.weights_plan import Form, WeightsPlan, form_of, keep_values

Kept = Mapping[str, PackedParameter | SpannedParameter]
"""The parameters that hold a .gguf file's bytes, in one form or another."""
NEWS = 256  # of a whole load, at most
_log = structlog.get_logger()
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(
    resolved: Resolved,
    device: torch.device,
    seed: int,
    progress: Callable[[int, int], None],
    shard: Shard = WHOLE,
    plan: WeightsPlan | None = None,
    *,
    prepare: bool = True,
    deterministic: bool = False,
) -> Decoder:
    """This shard of the model on its device, in its dtype. `progress` gets bytes done and in all. ProcessFatal.

    plan: for packed weights; None: as --gguf-weights auto and --cpu-exact on a CPU, without decoded copies. prepare: else it has the
    parameters that files fill. deterministic: --deterministic."""
    if resolved.spec.transformers is not None and prepare:
        return _of_transformers(resolved, device, seed, progress, shard)
    with default_dtype(DTYPES[resolved.dtype]):
        model, tensors, kept, needed, copied = planned(resolved, device, seed, shard, plan)
        if resolved.load_format == "sharded_state":
            memory.check_weights(needed + copied, device, 0, copied)
            make_tensors(model, device)
            sharded_state.fill(model, resolved, progress)
        else:
            memory.check_weights(needed + copied, device, _redundant_bytes(model), copied)
            make_tensors(model, device)
            fill(model, resolved, tensors(), kept, progress)
        check_finite(model, resolved.model_path)
    if not prepare:
        return model
    model.deterministic = deterministic
    model.prepare(device, DTYPES[resolved.dtype])
    if device.type == "cuda":
        torch.cuda.empty_cache()  # or what comes next settles in the tensors' large blocks, which then stay
    return model.eval()


class PlannedLoad(NamedTuple):
    """A model with parameters on the meta device, and all that is to be known before the first weight is read."""

    model: Decoder
    tensors: Callable[[], Iterable[tuple[str, Source]]]
    kept: Kept
    num_bytes: int  # of its weights, without decoded copies
    copied: int  # bytes of decoded copies


def planned(resolved: Resolved, device: torch.device, seed: int, shard: Shard, plan: WeightsPlan | None) -> PlannedLoad:
    """The formats of all layers, as the files and the plan have it. ProcessFatal. The default dtype of torch must be the model's."""
    spec, dtype = resolved.spec, DTYPES[resolved.dtype]
    model, tensors = described(resolved, device, seed, shard)
    copied = 0 if plan is None else keep_values(model, plan, weight_bytes(model), dtype)
    experts: dict[str, SpannedParameter] = {}
    packs = plan is None or plan.wanted != "decoded"
    if resolved.load_format == "gguf" and packs and has_kernels(device, dtype) and not spec.encoder_only:
        experts = keep_spans(model, tensors(), kind=GroupedLinear)
    if packs:
        keep_codes(model, device, dtype)
    needed = weight_bytes(model) + _decoded_bytes(model, device, dtype)
    kept: Kept = {}
    if resolved.load_format == "gguf":
        plan = plan or WeightsPlan(compiled=dtype == torch.float32)
        form, why = (Form.VALUES, "encoders read values") if spec.encoder_only else form_of(plan, needed)
        kept = _keep(model, tensors(), form, exact=plan.exact)
        say = _log.info if plan.device == "cuda" else _log.debug  # on a CPU there is little to choose
        say("weights of the .gguf file", form=form.name.lower(), reason=why)
        packed = weight_bytes(model) + _decoded_bytes(model, device, dtype)
        needed, kept = max(needed, packed) if form is Form.DECODED else packed, {**kept, **experts}
    if plan is not None and plan.offload_bytes:
        needed -= offload(model, plan.offload_bytes, plan.offload_names, device)
    return PlannedLoad(model, tensors, kept, needed, copied)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, new tensors of floats are of this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def described(
    resolved: Resolved, device: torch.device, seed: int, shard: Shard = WHOLE
) -> tuple[Decoder, Callable[[], Iterable[tuple[str, Source]]]]:
    """This shard with parameters on the meta device, and the tensors that are to fill them, held against each other by their names,
    shapes and types: no weight is read. ProcessFatal. The default dtype of torch must be the model's."""
    spec, dtype = resolved.spec, DTYPES[resolved.dtype]
    tensors: Callable[[], Iterable[tuple[str, Source]]]
    tensors = partial(sources, weights_of_model(resolved), resolved.load_format, spec, device, seed)
    stays_mxfp4 = keeps_mxfp4(resolved, tensors, shard, device, dtype)
    with torch.device("meta"):
        model = model_class(spec)(spec, resolved.max_model_len, shard)
        use_formats(model)
        if stays_mxfp4:
            use_mxfp4(model)
    if resolved.load_format == "sharded_state":
        sharded_state.check(model, resolved)
        return model, tensors
    if resolved.load_format == "gguf":
        tensors = partial(iter, list(tensors()))  # to step over the vocabulary in its header takes a while
    if resolved.load_format != "dummy":
        check_tensors(tensors(), resolved)
    return model, tensors


def _keep(model: Decoder, tensors: Iterable[tuple[str, Source]], form: Form, *, exact: bool) -> Kept:
    match form:
        case Form.PANELS:
            return keep(model, tensors, exact=exact)
        case Form.PACKED:
            return keep_spans(model, tensors)
        case Form.DECODED:
            return keep_spans(model, tensors, DecodedGGUF)
        case Form.VALUES:
            return {}


def _of_transformers(
    resolved: Resolved, device: torch.device, seed: int, progress: Callable[[int, int], None], shard: Shard
) -> Decoder:
    from meshlm.workers.models.transformers.load import load_transformers

    dtype = DTYPES[resolved.dtype]
    model = load_transformers(resolved, dtype, device, seed, progress, shard)
    check_finite(model, resolved.model_path)
    model.prepare(device, dtype)
    return model.eval()


def _fill_redundant(model: Decoder) -> None:
    """Slots for replicas begin with the rank's own experts."""
    for mixture in model.mixtures():
        begin, end = mixture.moe.local_experts or (0, mixture.moe.num_experts)
        for weight in mixture.experts.parameters():
            for slot in range(end - begin, 0 if weight.is_meta else len(weight)):
                weight[slot] = weight[(slot - (end - begin)) % (end - begin)]


def make_tensors(module: nn.Module, device: torch.device) -> None:
    """Does as `module.to_empty(device=device)` with what is on the meta device; that calls empty_like, which imports sympy for a meta
    tensor: 34 MiB, and time."""
    module._apply(lambda one: torch.empty(one.shape, dtype=one.dtype, device=device) if one.is_meta else one)


def fill(
    model: Decoder,
    resolved: Resolved,
    tensors: Iterable[tuple[str, Source]],
    kept: Kept,
    progress: Callable[[int, int], None],
) -> None:
    """Fills the parameters that are not on the meta device. ProcessFatal."""
    slots = {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}
    for name in kept.keys() & slots.keys():
        kept[name].begin(slots[name])
    encoders = encoders_of(model)
    missing = {
        name: kept[name].elements if name in kept else _clear_padding(name, parameter, model)
        for name, parameter in slots.items()
        if name in encoders or name.rpartition(".")[0] + ".weight" not in encoders or name.endswith(".bias")
    }
    total, expected = sum(parameter.nbytes for parameter in slots.values()), dict(missing)
    scales = scale_tensors(resolved.spec)
    done = told = 0.0
    progress(0, total)
    for name, source in tensors:
        if _take_kv_scale(name, source, model):
            continue
        found, scale = _place(name, scales, model)
        if found is None or found.end == found.begin:
            continue
        if scale is not None and scale.only_checked:
            check_redundant(name, source, scale, found.shape)
            continue
        if found.parameter not in slots:
            continue
        if found.parameter in kept:
            taken = kept[found.parameter].take(slots[found.parameter], name, source, found)
        else:
            taken = _take(slots, name, source, found, scale, resolved, encoders)
        missing[found.parameter] -= taken
        parameter = slots[found.parameter]
        done += parameter.numel() * parameter.element_size() * taken / expected[found.parameter]
        if done - told >= total / NEWS or round(done) == total:  # a mixture of experts has twenty thousand tensors
            told = done
            progress(round(done), total)
    incomplete = [name for name, left in missing.items() if left]
    if incomplete:
        raise ProcessFatal(
            f"{resolved.model_path}: the files changed while {', '.join(sorted(incomplete)[:3])} ... were read"
        )
    _fill_redundant(model)


def _place(
    name: str, scales: Mapping[str, ScaleTensor], model: Decoder
) -> tuple[WeightSlice | None, ScaleTensor | None]:
    """Finds where a tensor belongs, and of what it is the scale."""
    scale = scales.get(name) or scales.get(f"model.{name}")
    found = place(name if scale is None else scale.weight, model.spec, model.shard)
    if found is not None and scale is not None:
        found = found._replace(parameter=found.parameter.removesuffix("weight") + scale.parameter)
    return found, scale


def _take(
    slots: Mapping[str, nn.Parameter],
    name: str,
    source: Source,
    found: WeightSlice,
    scale: ScaleTensor | None,
    resolved: Resolved,
    encoders: Mapping[str, Encode],
) -> int:
    """A part of a tensor goes to its place in a parameter; how many elements of that are filled."""
    slot = _slot(slots, found)
    if scale is not None:
        rows = scale_rows(name, source, scale, found)
        if scale.parameter == "input_group":
            slot[scale.ordinal] = rows
            return rows.numel()
        count = found.end - found.begin if found.dim == 0 else found.shape[0]
        if found.neighbours[1] and len(rows) == count:
            rows = to_halves(rows, *found.neighbours)
        slot[found.row : found.row + count] = rows
        return slot[found.row : found.row + count].numel()
    if found.expert is not None and slot.dtype == torch.uint8 and isinstance(source, MXFP4Source):
        codes, powers = pack_mxfp4(*(part.to(slot.device) for part in source.packed(found.dim, found.begin, found.end)))
        at = _slot(slots, found._replace(parameter=f"{found.parameter}_scale"))
        at[found.row : found.row + len(powers)] = powers
        slot[found.row : found.row + len(codes)] = codes.view(torch.uint8)
        return codes.view(torch.uint8).numel()
    tensor = source.part(found.dim, found.begin, found.end) if found.shape else source.whole().view(1)
    if slot.dim() == 1 and tensor.dim() == 2:  # files have it as a matrix of one row
        tensor = tensor.flatten()
    rows = slot[found.row : found.row + tensor.shape[0]]
    if found.column is not None:
        rows = rows[:, found.column : found.column + tensor.shape[1]]
    if found.neighbours[1] and resolved.load_format != "gguf":  # gguf_source.py reorders
        tensor = to_halves(tensor, *found.neighbours)
    if found.times != 1:
        tensor = tensor.float() * found.times  # rounded once, when it is stored
    if (encode := encoders.get(found.parameter)) is not None:
        for last, values in encode(tensor.to(slot.device)).items():
            at = _slot(slots, found._replace(parameter=found.parameter.removesuffix("weight") + last))
            at[found.row : found.row + len(values)] = values
        return rows.numel()
    rows.copy_(tensor)
    if found.plus and resolved.load_format != "gguf":
        rows += found.plus
    return tensor.numel()


def encoders_of(model: Decoder) -> dict[str, Encode]:
    """By the name of a weight: what quantises it while it is loaded."""
    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, WeightedLayer)]
    return {f"{path}.weight": layer.format.encode for path, layer in layers if layer.format.encode is not None}


def _slot(slots: Mapping[str, nn.Parameter], found: WeightSlice) -> Tensor:
    whole = slots[found.parameter]
    return whole if found.expert is None else whole[found.expert]


def _take_kv_scale(name: str, source: Source, model: Decoder) -> bool:
    """A scale of an FP8 cache (k_scale, v_scale of self_attn, its attn or its projections; kv_scale for both) goes to its layer."""
    match = SCALE_OF_KV_CACHE.fullmatch(name)
    if match is None:
        return False
    mine = model.shard.layers(model.spec.num_hidden_layers)
    number = int(match[1]) - (model.spec.draft.first_layer if model.spec.draft else 0)
    if number not in mine:
        return True
    if math.prod(source.shape) != 1:
        raise ProcessFatal(f"tensor {name}: one positive number per layer is read, this has shape {source.shape}")
    scale = float(source.whole())
    if not 0 < scale < math.inf:
        raise ProcessFatal(f"tensor {name}: one positive number per layer is read, this is {scale}")
    layer = model.layers[number - mine.start]
    if not isinstance(layer, DecoderLayer):  # of a reload, which is done with it
        return True
    attention = layer.attention
    assert isinstance(attention, Attention)
    keys, values = attention.kv_scale
    what = match["one"] or match["output"] or match["cache"]
    attention.kv_scale = scale if "k" in what else keys, scale if "v" in what else values
    return True


def _clear_padding(name: str, parameter: Tensor, model: Decoder) -> int:
    """Zero what no file fills; how many elements are left for files."""
    shard = model.shard
    if shard.redundant_experts and ".experts." in name:  # see _fill_redundant
        return parameter[shard.redundant_experts :].numel()
    begin, end, rows = shard.vocab(model.spec.vocab_size)
    if name.startswith(("embed.weight", "head.weight")) and parameter.dim() == 2 and len(parameter) == rows:
        parameter[end - begin :].zero_()
        return (end - begin) * parameter.shape[1]
    added_once = name.endswith((".o.bias", ".down.bias")) and not (".experts." in name and shard.ep_size > 1)
    if shard.tp_rank and added_once:  # rank 0 adds these
        parameter.zero_()
        return 0
    return parameter.numel()


def _decoded_bytes(model: Decoder, device: torch.device, dtype: torch.dtype) -> int:
    """On a CPU the values of weights that are quantised stay in memory; on a GPU those of experts that do not keep their codes."""
    layers = [module for module in model.modules() if isinstance(module, WeightedLayer)]
    if device.type == "cpu":
        found = [layer for layer in layers if layer.weight.dtype in (torch.float8_e4m3fn, torch.int8)]
    else:
        of_files = PackedFormat | DecodedGGUF
        found = [one for one in layers if one.stack and isinstance(one.format, of_files) and not one.format.keeps_codes]
    return sum(layer.num_weights() for layer in found) * dtype.itemsize


def _redundant_bytes(model: Decoder) -> int:
    weights = [weight for mixture in model.mixtures() for weight in mixture.experts.parameters()]
    return sum(weight.nbytes // len(weight) * model.shard.redundant_experts for weight in weights)


def weight_bytes(model: Decoder) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
