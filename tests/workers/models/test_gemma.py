"""Gemma's .gguf files against transformers, and its greedy text with the cache warm, cold and in chunks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import writer_of
from model_folders import resolve_model
from safetensors.torch import load_file, save_file
from small_models import BLOCK, GEMMA, GEMMA3N, SMALL, caches, load, run

from meshlm.architectures.registry import weights_of
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.models.decoder import Decoder

TABLE = [7, 3, 11, 0, 5, 9, 1, 2, 8, 4]
CASES: dict[str, dict[str, Any]] = {
    "Gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "Gemma3": {"num_hidden_layers": 7},
}


def both(kind: str, folder: Path) -> tuple[Any, Decoder]:
    """transformers' model, and ours of the folder that it has written."""
    import transformers

    torch.manual_seed(0)
    config_class = transformers.Gemma2Config if kind == "Gemma2" else transformers.Gemma3TextConfig
    config = config_class(**{**SMALL, **GEMMA, **CASES[kind], "query_pre_attn_scalar": GEMMA["head_dim"]})
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for name, parameter in theirs.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data += torch.randn_like(parameter) * 0.3
    theirs.save_pretrained(folder)
    return theirs, load(folder)


def write_gguf(kind: str, folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    """As llama.cpp's converter does: norms with the 1 added."""
    spec, path = resolve_model(str(folder)).spec, folder / "m.gguf"
    writer = writer_of(path, kind.lower(), spec)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_sliding_window(spec.sliding_window)
    if kind == "Gemma2":
        writer.add_attn_logit_softcapping(spec.attn_logit_softcapping)
        writer.add_final_logit_softcapping(spec.final_logit_softcapping)
    else:
        writer.add_rope_freq_base(spec.rope.rope_theta)
    for name, weight in weights_of(spec).items():
        plus = 1.0 if name.endswith("norm.weight") else 0.0
        writer.add_tensor(weight.gguf, (weights[name] + plus).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", CASES)
def test_a_gguf_file_is_the_same_model(kind: str, tmp_path: Path) -> None:
    theirs, _ = both(kind, tmp_path)
    ours = load(write_gguf(kind, tmp_path, theirs.state_dict()))
    tokens = torch.randint(0, 211, (37,)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    found = run(ours, caches(ours.spec, 24), [(tokens, 0, TABLE)])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", CASES)
def test_greedy_text_is_the_same_whatever_the_cache_held(kind: str, tmp_path: Path) -> None:
    """Decoded token by token; preempted and recomputed; and behind blocks that another request has left."""
    theirs, ours = both(kind, tmp_path)
    prompt = torch.randint(0, 211, (18,)).tolist()
    with torch.no_grad():
        made = theirs.generate(torch.tensor([prompt]), max_new_tokens=14, do_sample=False, eos_token_id=None)
    expected = made[0, len(prompt) :].tolist()

    def greedy(tokens: list[int], start: int, kv: list[Any], count: int) -> list[int]:
        """`count` tokens more, where what stands before `start` is in the cache."""
        found: list[int] = []
        step = tokens[start:]
        for _ in range(count):
            logits = run(ours, kv, [(step, len(tokens) + len(found) - len(step), TABLE)])
            found.append(int(logits[-1].argmax()))
            step = found[-1:]
        return found

    cold = caches(ours.spec, 24)
    assert greedy(prompt, 0, cold, 14) == expected
    warm = len(prompt) // BLOCK * BLOCK
    assert greedy(prompt, warm, cold, 14) == expected, "behind a cached prefix"
    assert greedy(prompt + expected[:6], 0, caches(ours.spec, 24), 8) == expected[6:], "recomputed after preemption"


def test_projections_of_layers_that_share_are_not_read(tmp_path: Path) -> None:
    """Files of Gemma 3n have keys and values of layers that use another's; those of the others are missed by name."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(**{**SMALL, **GEMMA3N})
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    expected = dict(load(tmp_path).named_parameters())
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    stem = "model.layers.{}.self_attn.{}.weight"
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[stem.format(5, name)] = tensors[stem.format(3, name)].clone()
    save_file(tensors, file, {"format": "pt"})
    found = dict(load(tmp_path).named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    del tensors[stem.format(3, "k_proj")]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ProcessFatal, match=r"1 tensor missing: layers.3.self_attn.k_proj.weight"):
        load(tmp_path)
