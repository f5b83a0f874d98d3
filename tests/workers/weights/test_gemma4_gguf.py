"""The .gguf files of Gemma 4, written as llama.cpp does, against transformers; and those that cannot be."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_files import write_model
from model_folders import resolve_model
from msgspec.structs import replace
from small_models import GEMMA4, SMALL, caches, load, run
from tiny_models import sliding

from meshlm.architectures.family import GGUFMetadata, MetadataError
from meshlm.architectures.gemma4 import FAMILY
from meshlm.architectures.layers import sharing
from meshlm.protocol.model import ModelSpec
from meshlm.workers.models.gemma4 import Gemma4

Q8_0 = GGMLQuantizationType.Q8_0


def num_shared(spec: ModelSpec) -> int:
    """Layers that use keys and values of another."""
    return sum(sharing(spec))


def keys_of(spec: ModelSpec) -> dict[str, Any]:
    """The metadata of such a file."""
    full = spec.attentions[-1]
    assert spec.sliding_rope is not None
    keys: dict[str, Any] = {
        "attention.layer_norm_rms_epsilon": spec.rms_norm_eps,
        "rope.freq_base": spec.rope.rope_theta,
        "rope.freq_base_swa": spec.sliding_rope.rope_theta,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": spec.head_dim,
        "attention.sliding_window": spec.sliding_window,
        "attention.sliding_window_pattern": list(sliding(spec)),
        "attention.shared_kv_layers": num_shared(spec),
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": spec.head_dim,
        "attention.value_length_swa": spec.head_dim,
        "embedding_length_per_layer_input": spec.per_layer_input.hidden_size_per_layer_input
        if spec.per_layer_input
        else 0,
        "final_logit_softcapping": spec.final_logit_softcapping,
        "feed_forward_length": [layer.intermediate_size for layer in spec.layers],
        "attention.head_count_kv": [one.num_key_value_heads for one in spec.attentions],
    }
    if spec.moe is not None:
        moe = spec.moe
        keys |= {"expert_count": moe.num_experts, "expert_used_count": moe.num_experts_per_tok}
        keys |= {"expert_feed_forward_length": moe.moe_intermediate_size}
    return keys


@pytest.mark.parametrize("case", GEMMA4)
def test_a_gguf_file_is_the_same_model(case: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, GEMMA4[case][0])(**{**SMALL, **GEMMA4[case][1]})
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for name, parameter in [*theirs.named_parameters(), *theirs.named_buffers()]:
        if parameter.dim() == 1 and "inv_freq" not in name and "embed_scale" not in name:
            parameter.data += torch.randn_like(parameter) * 0.3
    theirs.save_pretrained(tmp_path)
    spec, path = resolve_model(str(tmp_path)).spec, tmp_path / "m.gguf"
    more = {"rope_freqs.weight": torch.tensor([1.0] * 2 + [1e30] * 6)}
    if num_shared(spec):  # checkpoints have what these layers do not use
        more["blk.3.attn_k.weight"] = torch.ones(32, 48)
    write_model(tmp_path, path, "gemma4", spec, theirs.state_dict(), keys_of(spec), more)
    ours = load(path)
    assert replace(ours.spec, rms_norm_eps=spec.rms_norm_eps) == spec  # the file's is rounded to float32
    tokens = torch.randint(0, 211, (37,)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    found = run(ours, caches(ours.spec, 24), [(tokens, 0, [7, 3, 11, 0, 5, 9, 1, 2, 8, 4])])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_tables_of_each_layer_stay_encoded(tmp_path: Path) -> None:
    """They are the most of a small model: on the CPU their rows are decoded when they are looked up."""
    import transformers

    torch.manual_seed(0)
    extra = GEMMA4["gemma4-e2b"][1] | {"hidden_size_per_layer_input": 16}
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.Gemma4TextConfig(**{**SMALL, **extra}))
    theirs.save_pretrained(tmp_path)
    spec, path = resolve_model(str(tmp_path)).spec, tmp_path / "m.gguf"
    kinds = {"per_layer_token_embd.weight": Q8_0}
    more = {"rope_freqs.weight": torch.tensor([1.0] * 2 + [1e30] * 6)}
    write_model(tmp_path, path, "gemma4", spec, theirs.state_dict(), keys_of(spec), more, kinds)
    table = theirs.model.embed_tokens_per_layer.weight
    table.data = torch.from_numpy(dequantize(quantize(table.data.numpy(), Q8_0), Q8_0))
    ours, tokens = load(path), list(range(3, 30))
    assert isinstance(ours, Gemma4)
    assert ours.entry is not None
    assert ours.entry.embed.weight.dtype == torch.uint8
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    found = run(ours, caches(spec, 24), [(tokens, 0, [7, 3, 11, 0, 5, 9, 1])])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


FIELDS = {
    "block_count": 3,
    "context_length": 64,
    "embedding_length": 16,
    "feed_forward_length": 32,
    "attention.head_count": 4,
    "attention.head_count_kv": [4, 4, 2],
    "attention.key_length": 16,
    "attention.key_length_swa": 8,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, True, False],
}
SHAPES = {"token_embd.weight": (10, 16), "output_norm.weight": (16,), "x": (1,)}


@pytest.mark.parametrize(
    ("changes", "factors", "said"),
    [
        ({"attention.sliding_window_pattern": [True, False, True]}, (), "the last layer must see all"),
        ({"attention.sliding_window_pattern": [True, False]}, (), "names 2 layers of 3"),
        ({"attention.head_count_kv": [4, 2, 2]}, (), "differs among layers of a kind"),
        ({"attention.shared_kv_layers": 1}, (), "without one to share with"),
        ({"feed_forward_length": [32, 64, 32]}, (), "may have twice that of others"),
        ({"attention.value_length_swa": 16}, (), "only 8 is supported"),
        ({"embedding_length_per_layer_input": 4}, (), "per_layer_token_embd.weight is missing"),
        ({}, (1.0, 2.0), "ones, and huge numbers behind them"),
        ({}, (1e30, 1.0), "ones, and huge numbers behind them"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], factors: tuple[float, ...], said: str) -> None:
    fields = {f"gemma4.{key}": value for key, value in (FIELDS | changes).items()}
    metadata = GGUFMetadata("gemma4", fields, SHAPES, factors)
    assert FAMILY.gguf is not None
    with pytest.raises(MetadataError, match=said):
        FAMILY.gguf.spec(metadata, FAMILY.architecture)
