"""DeepSeek's checkpoints: layers that are not loaded, 8-bit weights, the parts of its attention that ranks have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import Quantised, Reference, fp8, quantised
from safetensors.torch import load_file, save_file
from sharded_models import load_shards, logits_of, together
from small_models import CPU, LATENT, SMALL, caches, load, run
from torch import nn

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
