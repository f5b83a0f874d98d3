"""The least model there is, and what the supervisor would have found out of it: for tests that need some model, with their changes."""

from typing import Any

from meshlm.protocol.config import Resolved
from meshlm.protocol.model import ModelSpec


def spec_of(**changes: Any) -> ModelSpec:
    """One layer of a Llama, eight wide."""
    least: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 1000,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    return ModelSpec(**{**least, **changes})


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
