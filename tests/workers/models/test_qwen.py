"""Qwen of 2023 against Qwen2 of transformers, which computes the same and has other names for it."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_files import add, joined, known_names
from gguf_models import writer_of
from model_folders import resolve_model
from safetensors.torch import save_file
from small_models import SMALL, caches, load, run
from tiny_models import spec_of
from torch import Tensor

from meshlm.runtime.errors import ModelFilesError

CONFIG: dict[str, Any] = {
    "architectures": ["QWenLMHeadModel"],
    "model_type": "qwen",
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "kv_channels": 8,
    "seq_length": 128,
    "max_position_embeddings": 512,
    "layer_norm_epsilon": 1e-6,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "no_bias": True,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "scale_attn_weights": True,
}
_STEMS = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "model.layers.": "transformer.h.",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.w1",
    "mlp.gate_proj": "mlp.w2",
    "mlp.down_proj": "mlp.c_proj",
}
TOKENS = torch.randint(0, 211, (37,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def theirs() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(**{**SMALL, "num_key_value_heads": 6})
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.3
    return model


def tensors_of(theirs: Any) -> dict[str, Tensor]:
    """By Qwen's names, with query, key and value in one tensor."""
    found: dict[str, Tensor] = {}
    for name, tensor in theirs.state_dict().items():
        for ours, its in _STEMS.items():
            name = name.replace(ours, its)
        if ".self_attn." in name:
            stem, part = name.partition(".self_attn.")[0], name.rpartition(".")[2]
            whole = f"{stem}.attn.c_attn.{part}"
            found[whole] = torch.cat((found[whole], tensor)) if whole in found else tensor
        else:
            found[name] = tensor.clone()
    return found


def check(path: Path, theirs: Any) -> None:
    ours = load(path)
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    found = run(ours, caches(ours.spec, 24), [(TOKENS, 0, [7, 3, 11, 0, 5, 9, 1, 2, 8, 4])])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_a_folder_is_the_same_model(theirs: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors_of(theirs), tmp_path / "model.safetensors")
    assert resolve_model(str(tmp_path)).spec.max_position_embeddings == 128  # seq_length: beyond it rotation changes
    check(tmp_path, theirs)


def test_a_gguf_file_is_the_same_model(theirs: Any, tmp_path: Path) -> None:
    """Its feed_forward_length counts gate and up."""
    path = tmp_path / "m.gguf"
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN, 3)
    written = {names.get_name(name, (".weight", ".bias")): tensor for name, tensor in tensors_of(theirs).items()}
    sizes = {name: CONFIG[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    writer = writer_of(path, "qwen", spec_of(**sizes, num_attention_heads=6, num_key_value_heads=6))
    for key, value in {
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": 8,
        "rope.freq_base": 1e4,
    }.items():
        add(writer, f"qwen.{key}", value)
    assert "attn_qkv" in known_names("qwen")
    for name, tensor in joined({str(name): tensor for name, tensor in written.items()}, {}).items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    check(path, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": 161}, "intermediate_size is 161; it must be even"),
        ({"scale_attn_weights": False}, "scale_attn_weights False is not supported"),
        ({"rotary_pct": "all"}, "rotary_pct must be a number"),
    ],
)
def test_what_is_not_honoured_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ModelFilesError, match=message):
        resolve_model(str(tmp_path))
