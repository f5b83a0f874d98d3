"""What --quantization may ask of a model's weights: what its files say, or, of plain weights, to be quantised while they are loaded."""

from msgspec.structs import replace

from meshlm.architectures.quantization import formats, scheme_of
from meshlm.architectures.registry import family_of, weights_of
from meshlm.protocol.config import MeshConfig
from meshlm.runtime.model_files.model_files import ModelFiles
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings.rules import Rules, check

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
        files = replace(files, spec=replace(files.spec, quantization=online[asked]))
    for table in (_layers(files), _copy(config, files), _experts(config, files)):
        check(table)
    return files


def _layers(files: ModelFiles) -> Rules:
    """Of layers that nothing quantises, and of codes and scales that would have to be put in another order."""
    spec, found, family = files.spec, files.spec.quantization, family_of(files.spec.architecture)
    if found is None:
        return
    names = [weight.name.removesuffix(".weight") for weight in weights_of(spec).values()]
    idle = any(scheme.online for scheme in found.schemes) and all(scheme_of(found, name) is None for name in names)
    yield idle, f"--quantization {found.method}", f"the model of {files.path} has none of the layers that it quantises"
    ordered = family is not None and family.layouts and not all(one.online for one in found.schemes)
    why = f"files of {spec.architecture} hold weights in an order of their own, and are not read so"
    yield ordered, "quantization_config", why


def _experts(c: MeshConfig, files: ModelFiles) -> Rules:
    """Of experts whose activations cannot be rounded so, or whose rounded activations nobody sends."""
    found, way, experts = files.spec.quantization, c.worker.compile, c.experts
    if found is None:
        return
    yield way != "none", f"--compile {way}", f"it is not there for weights quantised with {found.method}; use none"
    every = weights_of(files.spec).values() if files.spec.moe is not None else ()
    for name in (weight.name.removesuffix(".weight") for weight in every if weight.expert == 0):
        if (scheme := scheme_of(found, name)) is None:
            continue
        why = f"{name} is an expert's; activations with zero points are not supported for these"
        yield scheme.integers and scheme.zeros, "quantization_config", why
        why = f"{name} has an activation scale in the file, which does not move with an expert; leave it out"
        yield scheme.activation == "static" and experts.enable_eplb, "--enable-eplb", why
        unsent = scheme.activation != "none" and c.lockstep and experts.all2all_backend == "peer_memory"
        why = "it sends no 8-bit activations, which the experts of this model want; use allgather_reducescatter or all_to_all"
        yield unsent, "--all2all-backend peer_memory", why


def _copy(c: MeshConfig, files: ModelFiles) -> Rules:
    """Of packed weights of which a decoded copy is kept, or not."""
    found, wanted = files.spec.quantization, c.model.decoded_copy
    flag = f"--decoded-copy {wanted}"
    if wanted != "auto":
        why = "weights of a .gguf file take --gguf-weights; leave it out"
        yield files.load_format == "gguf", flag, why
        packed = found is not None and any(scheme.weight == "group" for scheme in found.schemes)
        yield not packed, flag, f"no weights of {files.path} are packed; leave it out"
