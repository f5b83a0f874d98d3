"""What --quantization may ask of a model's weights: what its files say, or, of plain weights, to be quantised while they are loaded."""

import msgspec

from meshlm.architectures.quantization import formats, scheme_of
from meshlm.architectures.registry import family_of, weights_of
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.model_files.model_files import ModelFiles
from meshlm.supervisor.errors import UsageError

OTHER_NAMES = {"awq": ("awq_marlin",), "gptq": ("gptq_marlin", "marlin")}
"""What vLLM's users call a method to choose its kernels: here they are chosen at the start, and the weights are the same."""


def as_asked(config: MeshConfig, files: ModelFiles) -> ModelFiles:
    """The files, with the quantisation that the flag asks for. UsageError where they cannot have it."""
    spec, asked, wanted = files.spec.quantization, config.model.quantization, config.model.gguf_weights
    if wanted != "auto" and files.load_format != "gguf":
        raise UsageError(f"--gguf-weights {wanted}: {files.path} is no .gguf file; leave it out")
    found = "gguf" if files.load_format == "gguf" else "" if spec is None else spec.method
    if asked not in ("", found) and asked not in OTHER_NAMES.get(found, ()):
        if files.spec.transformers is not None:
            raise UsageError(f"--quantization {asked}: --model-impl transformers computes with plain weights alone")
        online = {name: known.online for name, known in formats().items() if known.online is not None}
        if found or asked not in online:
            what = f"are quantised with {found}; leave it out" if found else "are not quantised"
            can = "" if found else f"; while they are loaded they can be with {', '.join(sorted(online))}"
            raise UsageError(f"--quantization {asked}: the weights of {files.path} {what}{can}")
        files = msgspec.structs.replace(files, spec=msgspec.structs.replace(files.spec, quantization=online[asked]))
    quantization = files.spec.quantization
    if quantization is not None and any(scheme.online for scheme in quantization.schemes):
        names = [weight.name.removesuffix(".weight") for weight in weights_of(files.spec).values()]
        if all(scheme_of(quantization, name) is None for name in names):
            raise UsageError(
                f"--quantization {quantization.method}: the model of {files.path} has none of the layers that it quantises"
            )
    _check_copy(config, files)
    _check_layouts(files.spec)
    _check_experts(config, files.spec)
    if config.worker.compile != "none" and files.spec.quantization is not None:
        raise UsageError(
            f"--compile {config.worker.compile}: it is not there for weights quantised with "
            f"{files.spec.quantization.method}; use none"
        )
    return files


def _check_layouts(spec: ModelSpec) -> None:
    """UsageError for codes and scales that would have to be put in another order."""
    family, quantization = family_of(spec.architecture), spec.quantization
    if (
        family is not None
        and family.layouts
        and quantization is not None
        and not all(one.online for one in quantization.schemes)
    ):
        raise UsageError(
            f"quantization_config: files of {spec.architecture} hold weights in an order of their own, and are not read so"
        )


def _check_experts(config: MeshConfig, spec: ModelSpec) -> None:
    """UsageError for experts whose activations cannot be rounded so, or whose rounded activations nobody sends."""
    if spec.quantization is None or spec.moe is None:
        return
    names = [weight.name.removesuffix(".weight") for weight in weights_of(spec).values() if weight.expert == 0]
    for name in names:
        scheme = scheme_of(spec.quantization, name)
        if scheme is None:
            continue
        if scheme.integers and scheme.zeros:
            raise UsageError(
                f"quantization_config: {name} is an expert's; activations with zero points are not supported for these"
            )
        if scheme.activation == "static" and config.experts.enable_eplb:
            raise UsageError(
                f"--enable-eplb: {name} has an activation scale in the file, which does not move with an expert; leave it out"
            )
        sent = scheme.activation != "none"
        if sent and config.lockstep and config.experts.all2all_backend == "peer_memory":
            raise UsageError(
                "--all2all-backend peer_memory: it sends no 8-bit activations, which the experts of this model want; "
                "use allgather_reducescatter or all_to_all"
            )


def _check_copy(config: MeshConfig, files: ModelFiles) -> None:
    """UsageError where there are no packed weights of which a decoded copy could be kept, or not."""
    found, wanted = files.spec.quantization, config.model.decoded_copy
    if wanted == "auto":
        return
    if files.load_format == "gguf":
        raise UsageError(f"--decoded-copy {wanted}: weights of a .gguf file take --gguf-weights; leave it out")
    if found is None or not any(scheme.weight == "group" for scheme in found.schemes):
        raise UsageError(f"--decoded-copy {wanted}: no weights of {files.path} are packed; leave it out")
