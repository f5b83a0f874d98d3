"""All layers in one call of the CPU kernels: to the last bit what the operations give one after the other."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SMALL, caches, load, run

from meshlm.kernels.cpu.library import library
from meshlm.workers.layers import cpu_ops
from meshlm.workers.models.cpu_layers import fuse_decoder

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels cannot be compiled here")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-odd-sizes": (
        "LlamaConfig",
        {"hidden_size": 60, "num_key_value_heads": 6, "intermediate_size": 83, "vocab_size": 213},
    ),
    "llama-gelu": ("LlamaConfig", {"hidden_act": "gelu", "intermediate_size": 300}),
    "llama-gelu-tanh": ("LlamaConfig", {"hidden_act": "gelu_pytorch_tanh", "intermediate_size": 83}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_are_their_operations(case: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    name, extra = CASES[case]
    config = getattr(transformers, name)(**{**SMALL, **extra})
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    model, fused, chance = load(tmp_path), load(tmp_path), random.Random(case)
    fuse_decoder(fused, "cpu")
    assert model.executor is None
    assert fused.executor is not None
    kv, kv_fused = caches(model.spec, 48), caches(model.spec, 48)
    tables, ats = [list(range(12 * row, 12 * row + 12)) for row in range(4)], [0] * 4
    for _ in range(6):
        parts = []
        for row in sorted(range(4), key=lambda row: (row + ats[0]) % 3):
            count = chance.choice((1, 1, 1, 3, 11)) if ats[row] < 30 else 1
            parts.append(([chance.randrange(200) for _ in range(count)], ats[row], tables[row]))
            ats[row] += count
        parts.sort(key=lambda part: len(part[0]) > 1)  # decodes first
        assert torch.equal(run(fused, kv_fused, parts), run(model, kv, parts))
    for cache, other in zip(kv, kv_fused, strict=True):
        assert torch.equal(cache.keys, other.keys)
        assert torch.equal(cache.values, other.values)


def test_only_a_whole_model_with_the_kernels_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    model = load(tmp_path)
    fuse_decoder(model, "torch")
    assert model.executor is None
    monkeypatch.setattr(cpu_ops, "available", lambda: False)
    plain = load(tmp_path)
    fuse_decoder(plain, "cpu")
    assert plain.executor is None
