"""The least model there is, and what the supervisor would have found out of it: for tests that need some model, with their changes."""

from typing import Any

from meshlm.architectures.layers import with_attention, with_experts, with_shared_caches
from meshlm.protocol.config import Resolved
from meshlm.protocol.layers import MLP, Attention, Layers, LayerSpec
from meshlm.protocol.model import ModelSpec

# What one record of all layers has, unless a test says otherwise.
ATTENTION: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 8, "mla": None}
LOCAL: dict[str, Any] = {"sliding_window": 0, "attention_chunk_size": 0}
OF_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "sliding_layers": (),
    "moe": None,
    "moe_layers": (),
}
OF_LAYERS |= {"num_kv_shared_layers": 0, "layers": None}


def spec_of(**changes: Any) -> ModelSpec:
    """One layer of a Llama, eight wide. Changes are fields of its spec, and those of its layers: `sliding_layers` names those with the
    window or the chunks, `moe_layers` those with experts in the place of an MLP (empty: all); `layers` are the records themselves."""
    attention, local, own = (
        {name: changes.pop(name, default) for name, default in defaults.items()}
        for defaults in (ATTENTION, LOCAL, OF_LAYERS)
    )
    least: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 1000,
        "hidden_size": 8,
        "num_attention_heads": 1,
        "max_position_embeddings": 64,
    }
    record = LayerSpec(attention=Attention(**attention), mlp=MLP(intermediate_size=own["intermediate_size"]))
    layers = own["layers"] or Layers.alike(record, own["num_hidden_layers"])
    spec = ModelSpec(**{**least, **changes}, layers=layers)
    if any(local.values()):
        spec = with_attention(spec, own["sliding_layers"], **local)
    spec = with_experts(spec, own["moe"], own["moe_layers"])
    return with_shared_caches(spec, own["num_kv_shared_layers"], "num_kv_shared_layers")


def sliding(spec: ModelSpec) -> tuple[bool, ...]:
    """Which layers have a window or chunks."""
    return tuple(one.slides for one in spec.attentions)


def unrotated(spec: ModelSpec) -> tuple[bool, ...]:
    """Which layers have no positions."""
    return tuple(not one.rotates for one in spec.attentions)


def resolved_of(spec: ModelSpec, **changes: Any) -> Resolved:
    """A model without files on the CPU, of the spec's whole context."""
    least: dict[str, Any] = {
        "spec": spec,
        "model_path": "/models/tiny",
        "tokenizer_path": "/models/tiny",
        "chat_templates": {},
        "served_names": ("tiny",),
        "generation_defaults": {},
        "load_format": "dummy",
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": spec.max_position_embeddings,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "eos_token_ids": (),
        "digest": "",
    }
    return Resolved(**{**least, **changes})
