"""A small model that attends, keeps recurrent states, and has random weights: written to a folder as a checkpoint is."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file

from meshlm.architectures.registry import family_of, weights_of

BAMBA: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "attn_layer_indices": [1],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "max_position_embeddings": 1024,
}


def hybrid_model(folder: Path) -> str:
    """Every matrix is drawn, so that the text depends on what attention and the states remember."""
    (folder / "config.json").write_text(json.dumps(BAMBA))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    family = family_of("BambaForCausalLM")
    assert family is not None
    drawn, tensors = torch.Generator().manual_seed(0), {}
    spec = family.spec({**family.defaults, **BAMBA}, family.architecture)
    for name, weight in weights_of(spec).items():
        values = torch.randn(weight.shape, generator=drawn)
        tensors[name] = 1 + values * 0.1 if "norm" in name else values * (0.05 if "embed" in name else 0.2)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)
