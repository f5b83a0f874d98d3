"""Reads a folder with an adapter (LoRA) as peft writes it, and holds it against the model that it is to change. No torch.

adapter_config.json says how the adapter is meant, adapter_model.safetensors has for each changed module A [rank, inputs] and
B [outputs, rank]: the module then gives V x, V = W + scale B A, where scale is alpha / rank (Hu et al. 2021), or alpha / sqrt(rank)
(rsLoRA, Kalajdzievski 2023). With magnitudes m [outputs], row i of V is multiplied by m_i / |V_i| (DoRA, Liu et al. 2024). Called by
the supervisor and by frontends, and by workers, which compute with what it says.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple, Self

from msgspec import Struct

from meshlm.architectures.registry import weights_of
from meshlm.protocol.adapters import Adapter
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.model import ModelSpec
from meshlm.protocol.wire.columns import pack_i32
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.adapter_modules import CONFIG, AdaptedModule, adapted_modules, is_adaptable
from meshlm.runtime.model_files.adapter_tensors import AdapterTensors
from meshlm.runtime.model_files.json_files import read_json

MAX_NAME = 256
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
    no_experts: str = ""  # why experts cannot be adapted; empty: they can

    @classmethod
    def of(cls, config: MeshConfig, device: str) -> Self:
        settings, why = config.adapters, ""
        if config.lockstep:
            why = "ranks whose experts step together (-dp with --enable-expert-parallel) have no adapters of experts"
        elif config.experts.enable_eplb:
            why = "experts that move between ranks (--enable-eplb) have no adapters"
        return cls(settings.max_lora_rank, settings.lora_target_modules, device, why)


class AdapterFiles(NamedTuple):
    """What was read, without values."""

    digest: bytes
    modules: tuple[AdaptedModule, ...]
    tensors: bytes  # the file of tensors, as it was when its digest was made
    invocation: tuple[int, ...]  # token ids of an activated adapter; none: it is a plain one


def read_adapter(folder: Path, spec: ModelSpec, limits: Limits) -> AdapterFiles:
    """An adapter that this model can be served with. ModelFilesError: one line that names file and fault."""
    if not folder.is_dir():
        raise ModelFilesError(f"{folder}: there is no such folder")
    config = read_json(folder / CONFIG)
    _check_config(folder / CONFIG, config, limits.device)
    tensors = AdapterTensors(folder)
    file = tensors.file
    modules = tuple(adapted_modules(file, config, tensors.headers, spec))
    for module in modules:
        if limits.device != "cpu" and (module.parameter or module.whole or module.experts):
            what = f"{module.name} is adapted otherwise than by lora_A and lora_B of a linear layer"
            raise ModelFilesError(f"{file}: {what}, on --device cpu alone so far; this is --device {limits.device}")
        if module.rank > limits.max_rank:
            raise ModelFilesError(f"{file}: {module.name} has rank {module.rank}; --max-lora-rank is {limits.max_rank}")
        last = module.name.rpartition(".")[2]
        if module.experts and limits.no_experts:
            raise ModelFilesError(f"{file}: {module.name}: {limits.no_experts}")
        words = {last, "experts"} if module.experts else {last}
        if limits.target_modules and words.isdisjoint(limits.target_modules):
            raise ModelFilesError(f"{file}: it changes {last}, which --lora-target-modules does not name")
    invocation = _invocation(folder / CONFIG, config, modules, spec.vocab_size)
    tensors.check_finite()
    digest = hashlib.sha256(hashlib.sha256((folder / CONFIG).read_bytes()).digest() + tensors.digest)
    return AdapterFiles(digest.digest(), modules, tensors.data, invocation)


def adapter_of(name: str, folder: Path, spec: ModelSpec, limits: Limits) -> Adapter:
    """What requests for it carry. ModelFilesError."""
    if why := wrong_name(name):
        raise ModelFilesError(f"adapter {name[:80]!r}: {why}")
    files = read_adapter(folder, spec, limits)
    return Adapter(name, str(folder.absolute()), files.digest, pack_i32(files.invocation))


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


def _invocation(
    file: Path, config: dict[str, Any], modules: tuple[AdaptedModule, ...], vocab_size: int
) -> tuple[int, ...]:
    """The tokens that activate an adapter. ModelFilesError where they are none of the model's, or activate more than plain LoRA."""
    tokens = config.get("alora_invocation_tokens")
    if tokens is None:
        return ()
    if (
        not isinstance(tokens, list)
        or not tokens
        or not all(type(one) is int and 0 <= one < vocab_size for one in tokens)
    ):
        raise ModelFilesError(
            f"{file}: alora_invocation_tokens must be ids of the model's {vocab_size} tokens, at least one"
        )
    if other := next((one for one in modules if one.parameter or one.whole or one.magnitude or one.experts), None):
        what = "is of experts" if other.experts else "is not adapted by lora_A and lora_B alone"
        raise ModelFilesError(
            f"{file}: alora_invocation_tokens: {other.name} {what}; aLoRA takes linear layers and nothing else"
        )
    return tuple(tokens)


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
