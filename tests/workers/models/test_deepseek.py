"""DeepSeek's checkpoints: layers that are not loaded, 8-bit weights, the parts of its attention that ranks have."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_models import add_vocabulary
from quantised_models import Quantised, Reference, compressed, fp8, quantised
from safetensors.torch import load_file, save_file
from sharded_models import load_shards, logits_of, together
from small_models import CPU, LATENT, SMALL, caches, load, resolved, run
from torch import nn

from meshlm.architectures.registry import weights_of
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.attention.backend import TorchBackend
from meshlm.workers.layers import cpu_ops
from meshlm.workers.memory import cache_dtype
from meshlm.workers.weights.load import weight_bytes

TABLE = [7, 3, 11, 0, 5, 9, 1, 2, 8, 4]
V3 = {**SMALL, **LATENT, "q_lora_rank": 20, "n_group": 4, "topk_group": 2}


def written(folder: Path, **changes: Any) -> Any:
    """transformers' model with random weights, saved to the folder."""
    import transformers

    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**{**V3, **changes})
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    theirs.save_pretrained(folder)
    return theirs


def test_layers_that_draft_are_not_loaded(tmp_path: Path) -> None:
    """They stand behind the last one; what stands further behind, or in a model that says that it has none, is named."""
    written(tmp_path, num_nextn_predict_layers=1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    before = weight_bytes(load(tmp_path))
    last = {name: tensor.clone() for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
    drafts = {name.replace("layers.2.", "layers.3."): tensor for name, tensor in last.items()}
    drafts["model.layers.3.eh_proj.weight"] = torch.ones(48, 96)
    save_file({**tensors, **drafts}, file)
    assert weight_bytes(load(tmp_path)) == before
    save_file({**tensors, **drafts, "model.layers.4.enorm.weight": torch.ones(48)}, file)
    with pytest.raises(ProcessFatal, match=r"1 tensor that DeepseekV3ForCausalLM .*layers\.4\.enorm"):
        load(tmp_path)
    save_file({**tensors, **drafts}, file)
    config = json.loads((tmp_path / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in ("num_nextn_predict_layers", "num_mtp_layers")}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    with pytest.raises(ProcessFatal, match=r"tensors that DeepseekV3ForCausalLM .*model\.layers\.3\."):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["torch", "cpu"])
def test_weights_of_8_bits_by_blocks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As V3's own files have them. Inputs of kv_b_proj are not rounded: absorbed, there is no such product."""
    if kind == "torch":
        monkeypatch.setattr(cpu_ops, "available", lambda: False)
    form = Quantised(fp8(weight_block_size=[16, 4]), "block", "group", (16, 4), "weight_scale_inv")
    theirs = written(tmp_path, first_k_dense_replace=3)  # no experts
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    for name, module in list(theirs.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            codes, scale, values = quantised(module.weight.data, form)
            tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = codes, scale
            owner, last = theirs.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            own = form._replace(activation="none") if last == "kv_b_proj" else form
            setattr(owner, last, Reference(values, None, own, 1.0))
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    tokens = torch.randint(0, 211, (37,)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    ours = load(tmp_path)
    kv = caches(ours.spec, 24)
    found = torch.cat([run(ours, kv, [(tokens[:30], 0, TABLE)]), run(ours, kv, [(tokens[30:], 30, TABLE)])])
    # A sum in another order may round to another code of 8 bits.
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    two = together(load_shards(tmp_path, 2, 1), lambda model, comm: logits_of(model, comm, tokens))
    torch.testing.assert_close(two[0], expected, atol=2e-2, rtol=2e-2)


def test_all_of_it_in_8_bits_but_the_routers(tmp_path: Path) -> None:
    """V3's config.json does not name them, and its files hold them in full."""
    import transformers

    weights = {"strategy": "block", "block_structure": [16, 4]}
    form = Quantised(compressed(weights, None), "block", "none", (16, 4))
    written(tmp_path)
    file, plain = tmp_path / "model.safetensors", tmp_path / "plain"
    meant, stored = load_file(file), {}
    for name, values in meant.items():
        stored[name] = values
        if values.dim() == 2 and ".layers." in name and ".mlp.gate." not in name:
            codes, scale, meant[name] = quantised(values, form)
            stored[name], stored[f"{name}_scale"] = codes, scale.clone()
    config = json.loads((tmp_path / "config.json").read_text())
    plain.mkdir()
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    (plain / "config.json").write_text(json.dumps(config))
    save_file(stored, file, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager").eval()
    tokens = torch.randint(0, 211, (37,)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    ours = load(tmp_path)
    torch.testing.assert_close(run(ours, caches(ours.spec, 24), [(tokens, 0, TABLE)]), expected, atol=2e-5, rtol=1e-4)
    two = together(load_shards(tmp_path, 2, 1), lambda model, comm: logits_of(model, comm, tokens))
    torch.testing.assert_close(two[0], expected, atol=2e-5, rtol=1e-4)


def test_ranks_have_some_of_the_heads_and_the_whole_latent(tmp_path: Path) -> None:
    written(tmp_path)
    for model in load_shards(tmp_path, 3, 1):
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        spec: ModelSpec = model.local
        assert (spec.num_attention_heads, spec.num_key_value_heads) == (2, 1)
        assert shapes["layers.0.attention.kv_b.weight"] == (2 * (16 + 12), 32)
        assert shapes["layers.0.attention.kv_norm.weight"] == (32,)


def test_latents_are_not_kept_in_8_bits() -> None:
    with pytest.raises(ProcessFatal, match="--kv-cache-dtype fp8: the latents of this model are not kept in 8 bits"):
        cache_dtype("fp8", torch.bfloat16, CPU, TorchBackend(), latent=True)


def as_gguf(folder: Path, path: Path, *, split: bool) -> None:
    """The checkpoint as llama.cpp writes it. split: as newer files hold kv_b_proj, and say its sizes."""
    spec = resolved(folder).spec
    mla, moe = spec.mla, spec.moe
    assert mla is not None
    assert moe is not None
    writer = gguf.GGUFWriter(path, "deepseek2")
    add_vocabulary(writer, spec.vocab_size)
    writer.add_block_count(spec.num_hidden_layers)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_attention_heads)
    writer.add_head_count_kv(1 if split else spec.num_attention_heads)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_dimension_count(mla.qk_rope_head_dim)
    writer.add_kv_lora_rank(mla.kv_lora_rank)
    writer.add_q_lora_rank(mla.q_lora_rank)
    writer.add_key_length(mla.line if split else spec.head_dim)
    writer.add_value_length(mla.kv_lora_rank if split else mla.v_head_dim)
    if split:
        writer.add_key_length_mla(spec.head_dim)
        writer.add_value_length_mla(mla.v_head_dim)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_count(moe.num_experts)
    writer.add_expert_used_count(moe.num_experts_per_tok)
    writer.add_expert_shared_count(2)
    writer.add_expert_feed_forward_length(moe.moe_intermediate_size)
    writer.add_expert_weights_scale(moe.routed_scaling_factor)
    writer.add_expert_weights_norm(moe.norm_topk_prob)
    writer.add_uint32("deepseek2.expert_gating_func", 2)
    writer.add_uint32("deepseek2.expert_group_count", moe.n_group)
    writer.add_uint32("deepseek2.expert_group_used_count", moe.topk_group)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(8.0)
    writer.add_rope_scaling_orig_ctx_len(16)
    writer.add_float32("deepseek2.rope.scaling.yarn_log_multiplier", 0.1 * 0.7)
    tensors, stacked = load_file(folder / "model.safetensors"), dict[str, list[Any]]()
    for name, weight in weights_of(spec).items():
        stacked.setdefault(weight.gguf, []).append(tensors[name].numpy())
    for name, values in stacked.items():
        whole = np.stack(values) if "_exps" in name else values[0]
        if split and "attn_kv_b" in name:
            by_head = whole.reshape(spec.num_attention_heads, -1, mla.kv_lora_rank)
            keys, rest = by_head[:, : mla.qk_nope_head_dim], by_head[:, mla.qk_nope_head_dim :]
            writer.add_tensor(name.replace("kv_b", "k_b"), np.ascontiguousarray(keys.transpose(0, 2, 1)))
            writer.add_tensor(name.replace("kv_b", "v_b"), np.ascontiguousarray(rest))
        else:
            writer.add_tensor(name, whole)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("split", [False, True])
def test_gguf_files_of_llama_cpp(split: bool, tmp_path: Path) -> None:
    """Its rotation is as in the checkpoint, and all of YaRN's factor is in the scale of scores."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
    written(tmp_path, rope_parameters=yarn | {"mscale": 0.7, "mscale_all_dim": 0.7})
    as_gguf(tmp_path, tmp_path / "m.gguf", split=split)
    tokens = torch.randint(0, 211, (21,)).tolist()
    theirs, ours = load(tmp_path), load(tmp_path / "m.gguf")
    expected, found = (run(model, caches(model.spec, 24), [(tokens, 0, TABLE)]) for model in (theirs, ours))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    two = together(load_shards(tmp_path / "m.gguf", 2, 1), lambda model, comm: logits_of(model, comm, tokens))
    torch.testing.assert_close(two[0], expected, atol=2e-5, rtol=1e-4)
