"""Whether a checkpoint holds the tensors that the model has: all of them, none else, each of its shape, of a type that can be read.

Called by load.py before the first weight is read: what is found here would else be garbage, or an error after minutes of loading.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from meshlm.architectures.quantization import FP8
from meshlm.architectures.registry import weights_of
from meshlm.protocol.config import Resolved
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.runtime.model_files.checkpoint_files import FLOATS, SCALE_OF_KV_CACHE, is_needless
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights.scales import quantised_weights, scale_tensors
from meshlm.workers.weights.source import Source
from meshlm.workers.weights.sources import shapes

INTEGERS = ("I64", "I32")
_SAMPLE = 16
"""Rows of the embedding that are compared with those of an output projection that should be the same tensor."""


def check_tensors(tensors: Iterable[tuple[str, Source]], resolved: Resolved) -> None:
    """ProcessFatal names how many tensors are at fault, and the first of them."""
    spec, where = resolved.spec, resolved.model_path
    expected: dict[str, tuple[tuple[int, ...], ...]] = {_short(name): (shape,) for name, shape in shapes(spec)}
    scales = {_short(name): scale for name, scale in scale_tensors(spec).items()}
    codes = {_short(name) for name in quantised_weights(spec)}
    integers = {_short(weight.name) for weight in weights_of(spec).values() if weight.integers}
    for scale in scales.values():
        if scale.scheme.weight == "group":  # files hold it in other tensors, or in another shape
            expected.pop(_short(scale.weight), None)
    expected |= {short: scale.shapes for short, scale in scales.items()}
    found: dict[str, tuple[int, ...]] = {}
    twice, foreign, types = [], [], []
    samples: dict[str, Tensor] = {}
    for name, source in tensors:
        short = _short(name)
        if short == "lm_head.weight" and spec.tie_word_embeddings:
            expected[short] = expected["embed_tokens.weight"]
        if short not in expected:
            if not is_needless(name) and not SCALE_OF_KV_CACHE.fullmatch(name) and not _drafts(short, spec):
                foreign.append(name)
            continue
        if short in found:
            twice.append(name)
        found[short] = source.shape
        known = (FP8,) if short in codes else INTEGERS if short in integers else FLOATS
        if source.dtype not in ((scales[short].types or known) if short in scales else known):
            types.append(f"{name} ({source.dtype})")
        elif (
            spec.tie_word_embeddings
            and short in ("lm_head.weight", "embed_tokens.weight")
            and source.shape in expected[short]
        ):
            samples[short] = _sample(source)
    shown = {
        short: f"{short} {found[short]} instead of {expected[short][0]}"
        for short in found
        if found[short] not in expected[short]
    }
    _refuse(where, types, "of a type that is not read where config.json says what it says of their quantisation")
    _refuse(where, foreign, f"that {spec.architecture} of this configuration does not have")
    _refuse(where, twice, "twice")
    _refuse(where, list(shown.values()), "of another shape than the configuration says")
    needed = expected.keys() - {short for short, scale in scales.items() if scale.only_checked}
    _refuse(where, sorted(needed - found.keys()), "missing")
    if len(samples) == 2 and not torch.equal(samples["lm_head.weight"], samples["embed_tokens.weight"]):
        raise ProcessFatal(f"{where}: tie_word_embeddings is true, but lm_head.weight differs from embed_tokens.weight")


def check_finite(model: Decoder, where: str) -> None:
    """One bad number in the weights makes every answer garbage. ProcessFatal.

    A sum is one pass over the memory and makes no copy; only one that is not finite itself is looked at again."""
    most_power = 140 if torch.get_default_dtype() == torch.float16 else 254  # 6 times 2^13 is a number of float16
    for name, parameter in model.named_parameters():
        if parameter.is_meta:  # of a module that is not being loaded
            continue
        if parameter.dtype == torch.float8_e4m3fn:
            finite = not bool((parameter.view(torch.uint8) & 0x7F == 0x7F).any())
        elif parameter.dtype == torch.uint8 and name.endswith(".weight_scale"):  # of MXFP4, in the model's dtype
            finite = not bool((parameter > most_power).any())
        elif not parameter.is_floating_point() or bool(parameter.sum(dtype=torch.float32).isfinite()):
            continue
        else:
            finite = bool(parameter.isfinite().all())
        if not finite:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise ProcessFatal(f"{where}: the weights of {name} hold NaN or infinity in {dtype}")


def _drafts(short: str, spec: ModelSpec) -> bool:
    """Whether the tensor belongs to the layers behind the last that draft further tokens, which are not loaded."""
    layer = short.removeprefix("layers.").partition(".")[0] if short.startswith("layers.") else ""
    begin = spec.num_hidden_layers
    return layer.isdecimal() and begin <= int(layer) < begin + spec.num_nextn_predict_layers


def _short(name: str) -> str:
    return name.removeprefix("model.")


def _sample(source: Source) -> Tensor:
    rows = source.shape[0]
    return torch.cat([source.part(0, row, row + 1).cpu() for row in range(0, rows, max(1, rows // _SAMPLE))])


def _refuse(where: str, names: list[str], what: str) -> None:
    if names:
        tensors = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
        raise ProcessFatal(f"{where}: {tensors} {what}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}")
