"""Configurations of Gemma 3n: what transformers takes missing keys for, and what cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
from model_folders import resolve_model
from tiny_models import sliding

from meshlm.runtime.errors import ModelFilesError

CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 30,
    "num_attention_heads": 4,
}


def test_missing_keys_are_what_transformers_takes_them_for(tmp_path: Path) -> None:
    import transformers

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    spec = resolve_model(str(tmp_path), load_format="dummy").spec
    theirs = transformers.Gemma3nTextConfig(**{k: v for k, v in CONFIG.items() if k != "architectures"})
    assert spec.altup is not None
    assert [layer.mlp and layer.mlp.sparsity for layer in spec.layers] == theirs.activation_sparsity_pattern
    assert [spec.intermediate_size] * 30 == theirs.intermediate_size
    assert ["sliding_attention" if one else "full_attention" for one in sliding(spec)] == theirs.layer_types
    assert spec.sliding_window == theirs.sliding_window
    assert spec.final_logit_softcapping == theirs.final_logit_softcapping
    for name in ("altup_num_inputs", "altup_active_idx", "laurel_rank", "hidden_size_per_layer_input"):
        assert getattr(spec.altup, name) == getattr(theirs, name)
    sharing = [layer.cache_of is not None for layer in spec.layers]
    assert sum(sharing) == theirs.num_kv_shared_layers
    assert sharing == [mode == "reuse" for mode in theirs.kv_sharing_modes]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_kv_shared_layers": 30}, "num_kv_shared_layers 30 of 30 leaves a layer"),
        ({"num_kv_shared_layers": 27}, "num_kv_shared_layers 27 of 30 leaves a layer"),
        ({"intermediate_size": [64] * 29 + [96]}, "intermediate_size .* of layers that differ"),
        ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern must have a number below 1"),
        ({"activation_sparsity_pattern": 1.0}, "activation_sparsity_pattern must have a number below 1"),
        ({"altup_active_idx": 4}, "altup_active_idx is 4"),
        ({"laurel_rank": 0}, "laurel_rank is 0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(ModelFilesError, match=said):
        resolve_model(str(tmp_path), load_format="dummy")
