"""The .gguf files of Gemma 3n, written as llama.cpp does, against transformers; and those that cannot be."""

from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from gguf_files import write_model
from model_folders import resolve_model
from msgspec.structs import replace
from small_models import GEMMA3N, SMALL, caches, load, run
from tiny_models import sliding

from meshlm.architectures.family import GGUFMetadata, MetadataError
from meshlm.architectures.gemma3n import FAMILY
from meshlm.architectures.layers import sharing, with_sparsity
from meshlm.protocol.model import ModelSpec


def sparsity_of(spec: ModelSpec) -> list[float]:
    """By layer."""
    return [layer.mlp.sparsity for layer in spec.layers if layer.mlp is not None]


def keys_of(spec: ModelSpec) -> dict[str, Any]:
    """The metadata of such a file."""
    altup = spec.altup
    assert altup is not None
    assert spec.sliding_rope is not None
    sparsity = sparsity_of(spec)
    return {
        "attention.layer_norm_rms_epsilon": spec.rms_norm_eps,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "rope.freq_base": spec.rope.rope_theta,
        "rope.freq_base_swa": spec.sliding_rope.rope_theta,
        "attention.sliding_window": spec.sliding_window,
        "attention.sliding_window_pattern": list(sliding(spec)),
        "attention.shared_kv_layers": sum(sharing(spec)),
        "altup.num_inputs": altup.altup_num_inputs,
        "altup.active_idx": altup.altup_active_idx,
        "embedding_length_per_layer_input": altup.hidden_size_per_layer_input,
        "activation_sparsity_scale": [NormalDist().inv_cdf(one) if one else float("-inf") for one in sparsity],
        "final_logit_softcapping": spec.final_logit_softcapping,
        "feed_forward_length": [spec.intermediate_size] * spec.num_hidden_layers,
    }


def test_a_gguf_file_is_the_same_model(tmp_path: Path) -> None:
    """A checkpoint, and so a file, has keys and values of layers that use those of others."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(**{**SMALL, **GEMMA3N})
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.3
    theirs.save_pretrained(tmp_path)
    spec, path = resolve_model(str(tmp_path)).spec, tmp_path / "m.gguf"
    more = {"blk.5.attn_k.weight": torch.ones(32, 48), "blk.5.attn_k_norm.weight": torch.ones(16)}
    write_model(tmp_path, path, "gemma3n", spec, theirs.state_dict(), keys_of(spec), more)
    ours = load(path)
    assert sparsity_of(ours.spec) == pytest.approx(sparsity_of(spec))
    same = with_sparsity(replace(ours.spec, rms_norm_eps=spec.rms_norm_eps), sparsity_of(spec))
    assert same == spec  # files have float32
    tokens = torch.randint(0, 200, (37,)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    found = run(ours, caches(ours.spec, 24), [(tokens, 0, [7, 3, 11, 0, 5, 9, 1, 2, 8, 4])])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


FIELDS = {
    "block_count": 3,
    "context_length": 64,
    "embedding_length": 16,
    "feed_forward_length": 32,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, False, False],
    "attention.shared_kv_layers": 1,
    "altup.num_inputs": 4,
    "altup.active_idx": 0,
    "embedding_length_per_layer_input": 4,
    "activation_sparsity_scale": [1.0, 1.0, 1.0],
}
SHAPES = {
    "token_embd.weight": (10, 16),
    "output_norm.weight": (16,),
    "per_layer_token_embd.weight": (10, 12),
    "blk.0.laurel_l.weight": (3, 16),
}


@pytest.mark.parametrize(
    ("changes", "shapes", "said"),
    [
        (
            {"attention.sliding_window_pattern": [True, False]},
            SHAPES,
            "it must be a number, or one for each of 3 layers",
        ),
        ({"attention.shared_kv_layers": 3}, SHAPES, "without one to share with"),
        ({"attention.shared_kv_layers": 2}, SHAPES, "without one to share with"),
        ({"feed_forward_length": [32, 64, 32]}, SHAPES, "of layers that differ is not supported"),
        ({"altup.active_idx": 4}, SHAPES, "altup.active_idx 4, which no model can have"),
        ({"activation_sparsity_scale": "much"}, SHAPES, "activation_sparsity_scale is 'much'"),
        ({}, {**SHAPES, "blk.0.laurel_l.weight": (3,)}, "blk.0.laurel_l.weight is missing, or no matrix"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], shapes: dict[str, tuple[int, ...]], said: str) -> None:
    fields = {f"gemma3n.{key}": value for key, value in (FIELDS | changes).items()}
    assert FAMILY.gguf is not None
    with pytest.raises(MetadataError, match=said):
        FAMILY.gguf.spec(GGUFMetadata("gemma3n", fields, shapes, ()), FAMILY.architecture)
