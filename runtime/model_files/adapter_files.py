"""Reads a folder with an adapter (LoRA) as peft writes it, and holds it against the model that it is to change. No torch.

adapter_config.json says how the adapter is meant, adapter_model.safetensors has for each changed module A [rank, inputs] and
B [outputs, rank]: the module then gives V x, V = W + scale B A, where scale is alpha / rank (Hu et al. 2021), or alpha / sqrt(rank)
(rsLoRA, Kalajdzievski 2023). With magnitudes m [outputs], row i of V is multiplied by m_i / |V_i| (DoRA, Liu et al. 2024). Called by
the supervisor and by frontends, and by workers, which compute with what it says.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from msgspec import Struct

from meshlm.architectures.family import Layout, Weight
from meshlm.architectures.registry import family_of, weights_of
from meshlm.protocol.adapters import Adapter
from meshlm.protocol.config.adapters import AdapterConfig
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.adapter_tensors import EXPONENTS, AdapterTensors
from meshlm.runtime.model_files.checkpoint_files import TensorHeader
from meshlm.runtime.model_files.json_files import read_json

CONFIG = "adapter_config.json"
MAX_NAME = 256
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:(?P<kind>[AB])(?:\.default)?\.weight|(?P<m>magnitude_vector)(?:\.default)?(?:\.weight)?)"
)
_OF_LAYER = re.compile(r"(?P<layer>(?:model\.)?layers\.\d+)\.(?P<stem>.+)")
_PARAMETERS = re.compile(r"(attention\.(qkv|o|q_b)|mlp\.(shared\.)?(gate_up|up|down))\.weight")
"""Of a layer, the parameters whose products all families compute by `Linear`."""
_WORDS = {"A": "lora_A", "B": "lora_B", "M": "lora_magnitude_vector, which use_dora needs"}
_PLAIN_STARTS = (
    True,
    False,
    None,
    "gaussian",
    "eva",
    "orthogonal",
    "lora_ga",
)  # of peft: those that leave the base as it is
_ABSENT = {
    "alora_invocation_tokens": "aLoRA is not there yet",
    "modules_to_save": "modules that are trained whole are not read; train lora_A and lora_B alone",
    "trainable_token_indices": "tokens that are trained are not read",
    "target_parameters": "adapters of experts are not there yet",
    "layer_replication": "layers cannot be replicated",
    "lora_bias": "biases of adapters are not read",
    "use_qalora": "QALoRA is not there yet",
    "use_bdlora": "block-diagonal LoRA is not there yet",
    "arrow_config": "Arrow is not there yet",
    "velora_config": "VeLoRA is not there yet",
}
"""Keys of adapter_config.json that change what an adapter computes, where they have a value."""
_ON_CPU_ALONE = {
    "use_dora": "DoRA is computed",
    "alora_invocation_tokens": "aLoRA is computed",
    "modules_to_save": "modules that are trained whole are computed",
    "trainable_token_indices": "tokens that are trained are computed",
    "target_parameters": "adapters of experts are computed",
}
"""Such keys of what the kernels of other devices do not compute."""


class Limits(Struct, frozen=True):
    """What a server takes (protocol/config/adapters.py)."""

    max_rank: int
    target_modules: tuple[str, ...] = ()  # the last words of modules; none: all
    device: str = "cpu"  # --device of the workers

    @classmethod
    def of(cls, settings: AdapterConfig, device: str) -> Self:
        return cls(settings.max_lora_rank, settings.lora_target_modules, device)


class AdaptedModule(NamedTuple):
    """One module of the model, and the names of its tensors. `weights`: the base's that it has, one below the other."""

    name: str
    a: str
    b: str
    rank: int
    scale: float
    weights: tuple[str, ...]
    magnitude: str = ""  # of DoRA; "": it has none


class AdapterFiles(NamedTuple):
    """What was read, without values."""

    digest: bytes
    modules: tuple[AdaptedModule, ...]
    tensors: bytes  # the file of tensors, as it was when its digest was made


def read_adapter(folder: Path, spec: ModelSpec, limits: Limits) -> AdapterFiles:
    """An adapter that this model can be served with. ModelFilesError: one line that names file and fault."""
    if not folder.is_dir():
        raise ModelFilesError(f"{folder}: there is no such folder")
    config = read_json(folder / CONFIG)
    _check_config(folder / CONFIG, config, limits.device)
    tensors = AdapterTensors(folder)
    file = tensors.file
    modules = tuple(_modules(file, config, tensors.headers, spec))
    for module in modules:
        if module.rank > limits.max_rank:
            raise ModelFilesError(f"{file}: {module.name} has rank {module.rank}; --max-lora-rank is {limits.max_rank}")
        last = module.name.rpartition(".")[2]
        if limits.target_modules and last not in limits.target_modules:
            raise ModelFilesError(f"{file}: it changes {last}, which --lora-target-modules does not name")
    tensors.check_finite()
    digest = hashlib.sha256(hashlib.sha256((folder / CONFIG).read_bytes()).digest() + tensors.digest)
    return AdapterFiles(digest.digest(), modules, tensors.data)


def adapter_of(name: str, folder: Path, spec: ModelSpec, limits: Limits) -> Adapter:
    """What requests for it carry. ModelFilesError."""
    if why := wrong_name(name):
        raise ModelFilesError(f"adapter {name[:80]!r}: {why}")
    return Adapter(name, str(folder.absolute()), read_adapter(folder, spec, limits).digest)


def wrong_name(name: str) -> str:
    """Why an adapter cannot have it; empty: it can."""
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or name != name.strip():
        return f"a name has 1 to {MAX_NAME} printable characters, and no space at its ends"
    return ""


def why_not(spec: ModelSpec) -> str:
    """Why no adapter can be served with a model; empty: some can."""
    if spec.transformers is not None:
        return "modules of the transformers library take none"
    if spec.encoder_only or spec.audio_encoder is not None:
        return f"{spec.architecture} takes none; decoders of text do"
    return "" if any(map(is_adaptable, weights_of(spec).values())) else f"{spec.architecture} takes none"


def _check_config(file: Path, config: dict[str, Any], device: str) -> None:
    if config.get("peft_type") != "LORA":
        raise ModelFilesError(f"{file}: peft_type is {config.get('peft_type')!r}; LORA is what is read")
    for key, why in _ABSENT.items():
        if config.get(key):
            raise ModelFilesError(f"{file}: {key}: {why}")
    for key, what in _ON_CPU_ALONE.items():
        if device != "cpu" and config.get(key):
            raise ModelFilesError(f"{file}: {key}: {what} on --device cpu alone so far; this is --device {device}")
    if config.get("bias", "none") != "none":
        raise ModelFilesError(f"{file}: bias is {config['bias']!r}; none is what is read")
    if (start := config.get("init_lora_weights", True)) not in _PLAIN_STARTS:
        raise ModelFilesError(
            f"{file}: init_lora_weights is {start!r}, which changes the base's weights, too; save the adapter as a plain one "
            "(path_initial_model_for_weight_conversion of peft)"
        )


def _modules(
    file: Path, config: dict[str, Any], headers: Mapping[str, TensorHeader], spec: ModelSpec
) -> Iterator[AdaptedModule]:
    """The changed modules, in the order of their names."""
    found: dict[str, dict[str, str]] = {}
    for name, header in headers.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ModelFilesError(f"{file}: tensor {name} is no lora_A or lora_B of a linear module")
        kind, dimensions = ("M", 1) if match["m"] else (match["kind"], 2)
        if header.dtype not in EXPONENTS or len(header.shape) != dimensions:
            what = "a matrix" if dimensions > 1 else "a vector"
            raise ModelFilesError(
                f"{file}: tensor {name} is {header.dtype} {header.shape}; {what} of floats is expected"
            )
        found.setdefault(match["module"], {})[kind] = name
    if not found:
        raise ModelFilesError(f"{file}: it holds no tensor")
    needed = {"A", "B", "M"} if config.get("use_dora") else {"A", "B"}
    for module, names in sorted(found.items()):
        if missing := needed - names.keys():
            raise ModelFilesError(f"{file}: {module} has no {_WORDS[min(missing)]}")
        if names.keys() - needed:
            raise ModelFilesError(f"{file}: {module} has magnitudes, and {CONFIG} does not say use_dora")
        weights = _weights_of_module(module, spec)
        if not weights:
            raise ModelFilesError(
                f"{file}: {module}: this model ({spec.architecture}) has no such module, or none that adapters change"
            )
        a, b = headers[names["A"]].shape, headers[names["B"]].shape
        outputs, inputs = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        rank = a[0]
        if a[1] != inputs or b != (outputs, rank) or not rank:
            raise ModelFilesError(
                f"{file}: {module} has A {a} and B {b}; for this model they must be (rank, {inputs}) and ({outputs}, rank)"
            )
        if "M" in names and headers[names["M"]].shape != (outputs,):
            text = f"{module} has magnitudes {headers[names['M']].shape}; for this model they must be ({outputs},)"
            raise ModelFilesError(f"{file}: {text}")
        scale, own = _scale(file, config, module, rank), tuple(weight.name for weight in weights)
        yield AdaptedModule(module, names["A"], names["B"], rank, scale, own, names.get("M", ""))


def _weights_of_module(module: str, spec: ModelSpec) -> list[Weight]:
    """The base's weights that a module holds, in order; none where there is no such linear layer."""
    known, family = weights_of(spec), family_of(spec.architecture)
    assert family is not None
    for name in (f"{module}.weight", f"model.{module}.weight"):
        own = family.rename(name) if family.rename is not None else name
        if own in known:
            return [known[own]] if is_adaptable(known[own]) and not _is_laid_out(own, family.layouts) else []
        match = _OF_LAYER.fullmatch(own.removesuffix(".weight"))
        stems = family.packed.get(match["stem"], ()) if match is not None else ()
        names = [f"{match['layer']}.{stem}.weight" for stem in stems] if match is not None else []
        if names and all(one in known and is_adaptable(known[one]) for one in names):
            laid_out = match is not None and _is_laid_out(f"{match['layer']}.{match['stem']}.weight", family.layouts)
            return [] if laid_out else [known[one] for one in names]
    return []


def is_adaptable(weight: Weight) -> bool:
    """Whether a weight of the base is that of a linear layer that an adapter may change."""
    whole = weight.expert is None and not weight.beside and len(weight.shape) == 2
    return whole and weight.layer is not None and _PARAMETERS.fullmatch(weight.parameter) is not None


def _is_laid_out(name: str, layouts: Mapping[str, Layout]) -> bool:
    """Whether the rows of a fused tensor stand by group. (A tensor with a row for each input has a B with a row for each output.)"""
    match = _OF_LAYER.fullmatch(name.removesuffix(".weight"))
    return match is not None and layouts.get(match["stem"]) is Layout.BY_GROUP


def _scale(file: Path, config: dict[str, Any], module: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank); alpha_pattern has that of some modules, by a regular expression for their names' ends."""
    patterns = config.get("alpha_pattern") or {}
    alpha = config.get("lora_alpha", 8)
    try:
        key = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)
        found = float(alpha if key is None else patterns[key])
    except (re.error, TypeError, ValueError, AttributeError) as error:
        raise ModelFilesError(f"{file.parent / CONFIG}: lora_alpha or alpha_pattern is not read ({error})") from None
    return found / (rank**0.5 if config.get("use_rslora") else rank)
