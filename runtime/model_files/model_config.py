"""A model's config.json as a ModelSpec, or one line that says which key of it cannot be honoured. Imports no torch.

The family (architectures/) reads it. What a key defaults to where it is missing is what transformers' class of that family says.
Called by model_files.py.
"""

import difflib
import math
from operator import attrgetter
from pathlib import Path
from typing import Any

from meshlm.architectures import config_keys, text_part
from meshlm.architectures.config_values import shown
from meshlm.architectures.family import Family
from meshlm.architectures.registry import architectures, family_of
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ModelFilesError

MAX_SIZE, MAX_HEAD_DIM, MAX_CONTEXT = 1 << 24, 1024, 1 << 30


def parse_config(config: dict[str, Any], path: Path) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model's shape, and notes for the user. ModelFilesError names the key that is missing, wrong or not honoured."""
    where = f"{path}/config.json"
    family = _family(config, path)
    architecture = family.architecture
    try:
        unknown = config_keys.check(config, architecture, family.keys)
        spec = family.spec({**family.defaults, **config}, architecture)
        _check_dtype(config)
        _check_layer_types({**family.defaults, **config}, family, spec)
    except KeyError as error:
        raise ModelFilesError(f"{where}: key {error} is missing") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelFilesError(f"{where}: {error}") from None
    check(spec, path)
    notes = [f"{where}: unknown keys are ignored: {', '.join(sorted(unknown))}"] if unknown else []
    if config.get("auto_map"):
        text = f"it is not run, {architecture} is served by our own"
        notes.append(f"{where}: auto_map names code that comes with the model; {text}")
    return spec, tuple(notes)


_DTYPES = ("float32", "float16", "bfloat16", "float64", "float", "half")


def _check_dtype(config: dict[str, Any]) -> None:
    """ValueError for a type of numbers that no file of weights has."""
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        if value is not None and str(value).removeprefix("torch.") not in _DTYPES:
            raise ValueError(f"{key} {shown(value)} is unknown; known: {', '.join(_DTYPES)}")


def _check_layer_types(config: dict[str, Any], family: Family, spec: ModelSpec) -> None:
    """ValueError for kinds of layers where the family has one kind and reads none: what the file asks for would not be done."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        return
    try:
        family.spec({**config, "layer_types": [""] * len(kinds)}, family.architecture)
    except (TypeError, ValueError, ArithmeticError, KeyError):
        return  # it knows which kinds there are
    no_window = not config.get("sliding_window") or config.get("use_sliding_window") is False
    for layer, kind in enumerate(kinds):
        attention = spec.layers[layer].attention if layer < spec.num_hidden_layers else None
        slides = kind == "sliding_attention" and (no_window or (attention is not None and attention.slides))
        if kind != "full_attention" and not slides:
            raise ValueError(
                f"layer_types holds {shown(kind)} for layer {layer}; {family.architecture} has full_attention"
            )


def _family(config: dict[str, Any], path: Path) -> Family:
    given = config.get("architectures") or []
    names = list(dict.fromkeys(map(str, given if isinstance(given, list) else [given])))
    if len(names) > 1:
        raise ModelFilesError(f"{path}: config.json names several architectures ({', '.join(names)}); it must name one")
    family = family_of(names[0]) if names else None
    if family is None:
        raise ModelFilesError(f"{path}: architecture {names[0] if names else 'none'} is not supported{near(names[:1])}")
    kind = config.get("model_type")
    if kind is not None and kind not in (family.model_type, *family.other_model_types):
        both = f"model_type {shown(kind)} beside architecture {names[0]}"
        raise ModelFilesError(f"{path}: config.json has {both}; that is not supported")
    return family


def near(names: list[str]) -> str:
    """The architectures whose names are most like this one: there are more than a line holds."""
    known = (*architectures(), *text_part.architectures())
    near = difflib.get_close_matches(names[0], known, 3) if names else []
    return f"; near it: {', '.join(near)}" if near else f"; docs/models.md lists the {len(known)} that are"


_SIZES = {
    "vocab_size": MAX_SIZE,
    "hidden_size": MAX_SIZE,
    "num_attention_heads": MAX_SIZE,
    "max_position_embeddings": MAX_CONTEXT,
}
_CAPS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")


def check(spec: ModelSpec, path: Path) -> None:
    """Checks the sizes that kernels rely on and would not survive. ModelFilesError."""
    attentions = dict.fromkeys(spec.attentions)
    sizes = [(name, getattr(spec, name), limit) for name, limit in _SIZES.items()]
    sizes += [("intermediate_size", kind.mlp.intermediate_size, MAX_SIZE) for kind in spec.layers.kinds if kind.mlp]
    for one in attentions:
        sizes += [("num_key_value_heads", one.num_key_value_heads, MAX_SIZE), ("head_dim", one.head_dim, MAX_SIZE)]
    for name, value, limit in sizes:
        if value < 1:
            raise ModelFilesError(f"{path}: {name} is {value}; it must be positive")
        if value > limit:
            raise ModelFilesError(f"{path}: {name} is {value}; it may be {limit} at most")
    numbers = ["rms_norm_eps", "rope.rope_theta", "rope.factor", *_CAPS]  # a .gguf file's may be anything
    for name in [*numbers, "sliding_rope.rope_theta"] if spec.sliding_rope is not None else numbers:
        value = attrgetter(name)(spec)
        if not math.isfinite(value):
            raise ModelFilesError(f"{path}: {name} is {value}; it must be a finite number")
    for name in _CAPS:
        if getattr(spec, name) < 0:
            raise ModelFilesError(f"{path}: {name} is {getattr(spec, name)}; it must not be negative")
    for one in attentions:
        rotary = spec.rope_of(one).rotary_dim(one.head_dim) if one.mla is None else spec.rotary_dim
        _check_heads(spec, path, (one.num_key_value_heads, one.head_dim), rotary)
    for factors in (spec.rope.short_factor, spec.rope.long_factor):
        if len(factors) not in (0, spec.rotary_dim // 2):
            num = spec.rotary_dim // 2
            raise ModelFilesError(f"{path}: {len(factors)} factors of rotation; there are {num} frequencies")


def _check_heads(spec: ModelSpec, path: Path, keys: tuple[int, int], rotary: int) -> None:
    """keys: key-value heads of some layers, and their size, of which so many numbers are rotated. ModelFilesError."""
    (kv_heads, dim), heads = keys, spec.num_attention_heads
    if kv_heads < 1 or heads % kv_heads:
        raise ModelFilesError(f"{path}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if dim > MAX_HEAD_DIM or rotary % 2 or not 0 < rotary <= dim:
        raise ModelFilesError(
            f"{path}: head_dim {dim} of which {rotary} are rotated; an even number of at most head_dim can be, and that is "
            f"{MAX_HEAD_DIM} at most"
        )
