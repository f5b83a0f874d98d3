"""Llama (Touvron et al. 2023; Grattafiori et al. 2024)."""

from meshlm.architectures.dense import dense_gguf, full_spec
from meshlm.architectures.family import Family, GGUFFamily
from meshlm.architectures.weights import transformer_weights

FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    spec=full_spec,
    weights=transformer_weights,
    gguf=GGUFFamily("llama", dense_gguf, interleaved_heads=True),
)
