"""What a .gguf file may hold otherwise than one weight a tensor: several in one, layers that draft, factors of two rotations."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import QKV, add, joined
from gguf_models import writer_of
from model_folders import resolve_model
from tiny_models import spec_of
from torch import Tensor

from meshlm.architectures.registry import weights_of
from meshlm.protocol.layers import MoESpec
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.workers.weights.sources import sources

CPU = torch.device("cpu")
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
MOE = MoESpec(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24)


def tensors_of(spec: ModelSpec) -> dict[str, Tensor]:
    torch.manual_seed(0)
    stacks: dict[str, list[Tensor]] = {}
    for weight in weights_of(spec).values():
        stacks.setdefault(weight.gguf, []).append(torch.randn(weight.shape))
    return {name: torch.stack(found) if "_exps" in name else found[0] for name, found in stacks.items()}


def write(path: Path, kind: str, spec: ModelSpec, tensors: dict[str, Tensor], **keys: object) -> Path:
    writer: gguf.GGUFWriter = writer_of(path, kind, spec)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in keys.items():
        add(writer, f"{kind}.{key.replace('__', '.')}", value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.contiguous().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> dict[str, Tensor]:
    spec = resolve_model(str(path)).spec
    return {name: source.whole() for name, source in sources(path, "gguf", spec, CPU, 0)}


def test_fused_tensors_are_the_weights_that_they_were_fused_of(tmp_path: Path) -> None:
    """Query, key and value in one tensor, and gate and up of all experts, in a family whose heads are stored for neighbours."""
    spec = spec_of(**SIZES, architecture="MixtralForCausalLM", moe=MOE)
    tensors, keys = tensors_of(spec), {"expert_count": 3, "expert_used_count": 2}
    fused = joined(tensors, QKV | {"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")})
    assert "blk.1.ffn_gate_up_exps.weight" in fused
    assert "blk.1.attn_qkv.weight" in fused
    expected = read(write(tmp_path / "a.gguf", "llama", spec, tensors, **keys))
    found = read(write(tmp_path / "b.gguf", "llama", spec, fused, **keys))
    assert len(found) == len(expected) == len(weights_of(spec))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_fused_experts_of_another_size_are_refused(tmp_path: Path) -> None:
    spec = spec_of(**SIZES, architecture="MixtralForCausalLM", moe=MOE)
    tensors = tensors_of(spec)
    gate, _ = (tensors.pop(f"blk.0.ffn_{half}_exps.weight") for half in ("gate", "up"))
    tensors["blk.0.ffn_gate_up_exps.weight"] = gate
    path = write(tmp_path / "a.gguf", "llama", spec, tensors, expert_count=3, expert_used_count=2)
    with pytest.raises(ProcessFatal, match=r"ffn_gate_up_exps.weight has shape .* must have 48 rows"):
        read(path)


def test_layers_that_draft_are_left_out(tmp_path: Path) -> None:
    """They are counted among the blocks; tensors of a layer behind them stay foreign."""
    spec = spec_of(**SIZES, architecture="Qwen3ForCausalLM", qk_norm=True)
    tensors = tensors_of(spec)
    drafts = {"blk.2.nextn.eh_proj.weight": torch.ones(16, 32), "blk.2.attn_q.weight": torch.ones(16, 16)}
    blocks = {"num_hidden_layers": 3}
    larger = spec_of(**SIZES | blocks, architecture="Qwen3ForCausalLM", qk_norm=True)
    path = write(tmp_path / "a.gguf", "qwen3", larger, tensors | drafts, nextn_predict_layers=1)
    assert resolve_model(str(path)).spec.num_hidden_layers == 2
    assert read(path).keys() == weights_of(spec).keys()
    foreign = {"blk.3.attn_q.weight": torch.ones(16, 16)}
    path = write(tmp_path / "b.gguf", "qwen3", larger, tensors | foreign, nextn_predict_layers=1)
    assert read(path).keys() - weights_of(spec).keys() == foreign.keys()
    with pytest.raises(ModelFilesError, match=r"qwen3.nextn_predict_layers is 3"):
        resolve_model(str(write(tmp_path / "c.gguf", "qwen3", larger, tensors, nextn_predict_layers=3)))


def test_factors_of_two_rotations(tmp_path: Path) -> None:
    """Phi-3 with a long context; another family's file with such tensors is not this family's model."""
    spec = spec_of(**SIZES, architecture="Phi3ForCausalLM")
    short, long = torch.tensor([1.0, 1.25, 1.5, 2.0]), torch.tensor([2.0, 3.0, 4.0, 8.0])
    factors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    tensors = joined(tensors_of(spec), QKV | {"ffn_up": ("ffn_up.gate", "ffn_up.up")})
    keys = {"rope__scaling__original_context_length": 32, "rope__scaling__attn_factor": 1.25}
    path = write(tmp_path / "a.gguf", "phi3", spec, tensors | factors, **keys)
    rope = resolve_model(str(path)).spec.rope
    assert (rope.rope_type, rope.original_max_position_embeddings, rope.attention_factor) == ("longrope", 32, 1.25)
    assert (rope.short_factor, rope.long_factor) == (tuple(short.tolist()), tuple(long.tolist()))
    assert read(path).keys() == weights_of(spec).keys()
    other = spec_of(**SIZES, architecture="Qwen3ForCausalLM", qk_norm=True)
    path = write(tmp_path / "b.gguf", "qwen3", other, tensors_of(other) | factors)
    assert read(path).keys() - weights_of(other).keys() == factors.keys()
