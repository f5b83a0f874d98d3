"""Quantised checkpoints whose files hold query, key and value, and gate and up, in one tensor each: Phi-3's. Whole and in shards."""

import json
from pathlib import Path

import packed_models
import pytest
import quantised_models
import torch
from safetensors.torch import load_file, save_file
from sharded_models import load_shards, logits_of, together
from small_models import caches, load, run
from torch import nn

from meshlm.runtime.errors import ProcessFatal
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, resolve

TOKENS, TABLE = torch.arange(23).mul(17).remainder(211).tolist(), [7, 3, 11, 0, 5, 9]
PACKED = ("gptq", "gptq-act-order", "awq", "w4a16-zeros", "w4a16-order", "w8a16", "mxfp4")
FP8 = ("fp8-dynamic", "fp8-static", "compressed-channel", "compressed-blocks")


def write(folder: Path, name: str) -> nn.Module:
    if name in PACKED:
        return packed_models.write(folder, packed_models.KINDS[name], family="Phi3")[0]
    return quantised_models.write(folder, quantised_models.KINDS[name], family="Phi3", attention_bias=False)[0]


def distance(found: torch.Tensor, model: nn.Module) -> float:
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    return float((found - expected).abs().mean() / expected.std())


@pytest.mark.parametrize("name", PACKED + FP8)
def test_logits_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    theirs, near = write(tmp_path, name), 0.02 if name in FP8 else 1e-3
    assert any("qkv_proj" in key for key in load_file(tmp_path / "model.safetensors"))
    ours = load(tmp_path)
    assert distance(run(ours, caches(ours.spec, 12), [(TOKENS, 0, TABLE)]), theirs) < near
    if name in PACKED:
        for found in together(load_shards(tmp_path, 2, 1), lambda model, comm: logits_of(model, comm, TOKENS)):
            assert distance(found, theirs) < near


def test_a_layer_is_left_out_by_the_name_of_its_tensor(tmp_path: Path) -> None:
    kind = packed_models.KINDS["w4a16"]
    kind = kind._replace(config={**kind.config, "ignore": ["lm_head", "re:.*gate_up_proj"]}, ignore=("gate_up_proj",))
    theirs, _ = packed_models.write(tmp_path, kind, family="Phi3")
    ours = load(tmp_path)
    assert distance(run(ours, caches(ours.spec, 12), [(TOKENS, 0, TABLE)]), theirs) < 1e-3


def test_a_projection_that_begins_within_a_scale_is_named(tmp_path: Path) -> None:
    write(tmp_path, "fp8-blocks")
    with pytest.raises(
        ProcessFatal, match=r"_proj.weight_scale_inv has shape .*: one does not begin with a word or a scale"
    ):
        load(tmp_path)


def test_weight_shape_is_the_tensors(tmp_path: Path) -> None:
    write(tmp_path, "w8a16")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.gate_up_proj.weight_shape"] = torch.tensor([7, 64])
    save_file(tensors, file)
    with pytest.raises(ProcessFatal, match=r"gate_up_proj\.weight_shape is not the weight's shape, which has 256 rows"):
        load(tmp_path)


def test_files_in_an_order_of_their_own_are_refused_before_the_start(tmp_path: Path) -> None:
    import transformers

    config = transformers.GPTNeoXConfig(vocab_size=211, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    described = {
        **config.to_dict(),
        "architectures": ["GPTNeoXForCausalLM"],
        "quantization_config": packed_models.gptq(),
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    save_file({"gpt_neox.embed_in.weight": torch.zeros(211, 64)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UsageError, match="quantization_config: files of GPTNeoXForCausalLM hold weights in an order of their own"
    ):
        resolve.resolve(flags.build({"device": "cpu", "model": str(tmp_path)}, None))
