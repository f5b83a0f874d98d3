"""Models by the `architectures` of their config.json."""

from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.models.decoder import Decoder

MODELS: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
}


def model_class(spec: ModelSpec) -> type[Decoder]:
    """The module for this architecture. ProcessFatal lists those that exist."""
    try:
        return MODELS[spec.architecture]
    except KeyError:
        known = ", ".join(sorted(MODELS))
        raise ProcessFatal(f"architecture {spec.architecture} is not supported; supported: {known}") from None
