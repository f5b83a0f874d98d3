"""Every tensor of a checkpoint is used, needless, or named in an error before the first is read."""

import json
from pathlib import Path

import pytest
import torch
from gguf_models import SPEC, write_gguf
from model_folders import resolve_model
from msgspec.structs import replace
from safetensors.torch import save_file
from small_models import SMALL, load, resolved
from tiny_models import spec_of
from torch import Tensor

from meshlm.architectures.family import Split, Weight
from meshlm.architectures.layers import with_attention
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.weights.check import check_finite
from meshlm.workers.weights.load import load_model
from meshlm.workers.weights.source import Mapped
from meshlm.workers.weights.sources import _Random, shapes, unpacked

Weights = dict[str, Tensor]
LAYER = "model.layers.1."


def weights_of(folder: Path, **changes: object) -> Weights:
    """Random weights of a Llama whose config.json is written."""
    (folder / "config.json").write_text(json.dumps({**SMALL, "architectures": ["LlamaForCausalLM"], **changes}))
    generator = torch.Generator().manual_seed(0)
    spec = resolve_model(str(folder), load_format="dummy").spec
    return {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes(spec)}


@pytest.mark.parametrize("load_format", ["safetensors", "pt"])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({LAYER + "self_attn.q_proj.weight_scale": torch.ones(1)}, "1 tensor that LlamaForCausalLM .*weight_scale"),
        ({LAYER + "self_attn.q_proj.bias": torch.ones(48)}, "1 tensor that LlamaForCausalLM .*q_proj.bias"),
        ({LAYER + "self_attn.q_norm.weight": torch.ones(8)}, "does not have: model.layers.1.self_attn.q_norm"),
        ({"model.layers.3.mlp.up_proj.weight": torch.ones(80, 48)}, "does not have: model.layers.3.mlp"),
        ({f"score.{n}": torch.ones(1) for n in range(5)}, r"5 tensors that .*: score\.0, score\.1, score\.2, \.\.\.$"),
        ({LAYER + "mlp.down_proj.weight": None}, r"1 tensor missing: layers\.1\.mlp\.down_proj\.weight$"),
        ({LAYER + "self_attn.v_proj.weight": None}, r"1 tensor missing: layers\.1\.self_attn\.v_proj\.weight$"),
        ({"lm_head.weight": None}, "1 tensor missing: lm_head.weight"),
        ({LAYER + "mlp.up_proj.weight": torch.ones(48, 80)}, r"up_proj.weight \(48, 80\) instead of \(80, 48\)"),
        ({LAYER + "mlp.up_proj.weight": torch.ones(0, 48)}, r"1 tensor of another shape .* \(0, 48\)"),
        ({"model.norm.weight": torch.ones(48, 1)}, r"norm.weight \(48, 1\) instead of \(48,\)"),
        ({"norm.weight": torch.ones(48)}, "1 tensor twice: "),
        ({"model.norm.weight": torch.full((48,), torch.nan)}, "the weights of norm.weight hold NaN or infinity"),
        ({LAYER + "mlp.up_proj.weight": torch.full((80, 48), -torch.inf)}, "mlp.gate_up.weight hold NaN"),
    ],
)
def test_what_does_not_fit_is_named(
    changed: dict[str, Tensor | None], said: str, load_format: str, tmp_path: Path
) -> None:
    weights = {**weights_of(tmp_path), **changed}
    write(tmp_path, {name: tensor for name, tensor in weights.items() if tensor is not None}, load_format)
    with pytest.raises(ProcessFatal, match=said) as told:
        load(tmp_path)
    assert str(tmp_path) in str(told.value)
    assert "\n" not in str(told.value)


def write(folder: Path, weights: Weights, load_format: str) -> None:
    if load_format == "pt":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32, torch.bool, torch.complex64]
)
def test_codes_are_not_read_as_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    """Of a .bin file; the headers of safetensors are read before any process starts."""
    weights = weights_of(tmp_path)
    name = LAYER + "mlp.up_proj.weight"
    write(tmp_path, {**weights, name: weights[name].to(dtype)}, "pt")
    with pytest.raises(ProcessFatal, match=rf"1 tensor of a type that is not read .*up_proj.weight \({dtype}\)"):
        load(tmp_path)


@pytest.mark.parametrize("content", [torch.ones(3), {"model": {"a": torch.ones(3)}}, {"step": 5}])
def test_a_pickle_of_something_else(content: object, tmp_path: Path) -> None:
    weights_of(tmp_path)
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ProcessFatal, match=r"pytorch_model.bin: (it holds a Tensor|model is a dict|step is a int)"):
        load(tmp_path)


def test_tensors_that_are_computed_here_are_needless(tmp_path: Path) -> None:
    weights = weights_of(tmp_path)
    write(tmp_path, weights, "safetensors")
    plain = load(tmp_path)
    weights[LAYER + "self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    weights["model.rotary_emb.inv_freq"] = torch.ones(4, dtype=torch.int64)
    weights[LAYER + "self_attn.masked_bias"] = torch.tensor(True)
    weights[LAYER + "self_attn.k_scale"] = torch.tensor(0.5)
    write(tmp_path, weights, "safetensors")
    for one, other in zip(plain.parameters(), load(tmp_path).parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_tied_head_is_a_copy_of_the_embedding(tmp_path: Path) -> None:
    weights = weights_of(tmp_path, tie_word_embeddings=True)
    head = weights["model.embed_tokens.weight"].clone()
    write(tmp_path, {**weights, "lm_head.weight": head}, "safetensors")
    load(tmp_path)
    write(tmp_path, {**weights, "lm_head.weight": head * 1.5}, "safetensors")
    with pytest.raises(ProcessFatal, match=r"lm_head.weight differs from embed_tokens.weight"):
        load(tmp_path)


def test_weights_that_a_narrower_type_does_not_hold(tmp_path: Path) -> None:
    weights = weights_of(tmp_path)
    weights["lm_head.weight"][7, 7] = 1e6
    write(tmp_path, weights, "safetensors")
    load(tmp_path)
    half = replace(resolved(tmp_path), dtype="float16")
    with pytest.raises(ProcessFatal, match=r"head.weight hold NaN or infinity in float16"), torch.inference_mode():
        load_model(half, torch.device("cpu"), 0, lambda done, total: None)


def test_a_sum_that_overflows_is_looked_at_again(tmp_path: Path) -> None:
    write(tmp_path, weights_of(tmp_path), "safetensors")
    model = load(tmp_path)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(3e38)
    check_finite(model, "m")


def test_tensors_of_a_gguf_file_that_nobody_uses(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {}, replace(SPEC, qk_norm=True))
    with pytest.raises(ProcessFatal, match=r"4 tensors that LlamaForCausalLM .*blk\.0\.attn_q_norm\.weight.*, \.\.\."):
        load(path)


def test_a_tensor_that_holds_several_weights_has_all_their_rows() -> None:
    """It would else give the next weight's rows to the one before."""
    spec = spec_of(hidden_size=8, num_attention_heads=2, head_dim=4)
    packed = {"self_attn.qkv_proj": tuple(f"self_attn.{stem}_proj" for stem in "qkv")}
    name = "model.layers.0.self_attn.qkv_proj.weight"
    whole = torch.arange(24 * 8.0).reshape(24, 8)
    found = dict(unpacked([(name, Mapped(whole))], with_attention(spec, num_key_value_heads=2), packed))
    assert list(found) == [f"model.layers.0.self_attn.{stem}_proj.weight" for stem in "qkv"]
    assert torch.equal(torch.cat([source.whole() for source in found.values()]), whole)
    keys = found["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(keys.part(0, 2, 5), whole[10:13])
    assert torch.equal(keys.part(1, 2, 5), whole[8:16, 2:5])
    with pytest.raises(ProcessFatal, match=r"qkv_proj\.weight has shape \(24, 8\); it must have 16 rows"):
        dict(unpacked([(name, Mapped(whole))], spec, packed))
    other = "model.layers.7.self_attn.qkv_proj.weight"
    assert list(dict(unpacked([(other, Mapped(whole))], spec, packed))) == [other], "the check of tensors will name it"


def test_a_part_of_a_dummy_norm_is_a_part() -> None:
    """OLMo 2 norms whole queries, whose weight ranks split."""
    weight = Weight("model.layers.0.self_attn.q_norm.weight", "", "attention.q_norm", (64,), Split.QUERY_HEADS)
    made = _Random(weight, torch.device("cpu"), 0)
    assert torch.equal(made.part(0, 32, 64), torch.ones(32))
    assert torch.equal(made.whole(), torch.ones(64))
