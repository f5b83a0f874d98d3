"""GLM-4-0414 and GLM-Z1 (GLM Team 2025): GLM with norms behind attention and MLP, too."""

from collections.abc import Iterator

from meshlm.architectures.family import Family, GGUFFamily, Weight
from meshlm.architectures.glm import DEFAULTS, PACKED, glm_gguf, glm_spec, glm_weights
from meshlm.architectures.weights import GGUF_GATE_UP, Norms
from meshlm.protocol.model import ModelSpec

_NORMS: Norms = (
    ("input_layernorm", "attn_norm", "input_norm"),
    ("post_self_attn_layernorm", "post_attention_norm", "attention_out_norm"),
    ("post_attention_layernorm", "ffn_norm", "post_norm"),
    ("post_mlp_layernorm", "post_ffw_norm", "mlp_out_norm"),
)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    return glm_weights(spec, _NORMS)


FAMILY = Family(
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    spec=glm_spec,
    weights=_weights,
    packed=PACKED,
    defaults=DEFAULTS,
    gguf=GGUFFamily("glm4", glm_gguf, packed=GGUF_GATE_UP),
    compiles=False,
    model="meshlm.workers.models.gemma:Sandwich",
)
