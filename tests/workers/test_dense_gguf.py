"""The .gguf files of dense decoders that differ from Llama, written as llama.cpp does, against transformers."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_models import writer_of
from small_models import CLASSIC, CPU, SMALL, caches, load, run

from meshlm.architectures.registry import family_of, weights_of
from meshlm.runtime.model_files import resolve_model
from meshlm.workers.weights.sources import sources

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("Olmo2Config", {}),
    "command-r": ("CohereConfig", {"attention_bias": True, "logit_scale": 1.5}),
    "cohere2": ("Cohere2Config", {"num_hidden_layers": 5, "sliding_window": 7, "logit_scale": 1.5}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 5}),
    "starcoder2": ("Starcoder2Config", {}),
    **{
        kind: CLASSIC[name]
        for kind, name in (
            ("gpt2", "gpt2"),
            ("gptneox", "gpt-neox"),
            ("phi2", "phi"),
            ("stablelm", "stablelm"),
            ("bloom", "bloom"),
            ("mpt", "mpt"),
            ("falcon", "falcon-40b"),
            ("olmo", "olmo"),
            ("nemotron", "nemotron"),
        )
    },
    "granite": (
        "GraniteConfig",
        {"embedding_multiplier": 3.0, "logits_scaling": 1.5, "residual_multiplier": 0.4, "attention_multiplier": 0.2},
    ),
}


def joined(tensors: dict[str, torch.Tensor], packed: Mapping[str, tuple[str, ...]]) -> dict[str, torch.Tensor]:
    """With those in one tensor that llama.cpp has in one."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem = next((whole for whole, parts in packed.items() if name.split(".")[-2] in parts), None)
        whole = name if stem is None else ".".join((*name.split(".")[:2], stem, name.split(".")[-1]))
        found[whole] = tensor if whole not in found else torch.cat((found[whole], tensor))
    return found


def known_names(kind: str, tensors: Collection[str]) -> set[str]:
    """The names that the gguf package gives these tensors of transformers."""
    (architecture,) = [number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == kind]
    names = gguf.get_tensor_name_map(architecture, 5)
    stems = {*tensors, *(tensor.removeprefix("transformer.") for tensor in tensors)}  # BLOOM's are without it
    return {names.get_name(tensor, (".weight", ".bias")) or "" for tensor in stems}


@pytest.mark.parametrize("kind", CASES)
def test_a_gguf_file_is_the_same_model(kind: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    name, extra = CASES[kind]
    config = getattr(transformers, name)(**{**SMALL, **extra})
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for parameter_name, parameter in theirs.named_parameters():
        if parameter_name.endswith(("norm.weight", ".bias")):
            parameter.data += torch.randn_like(parameter) * 0.3
    theirs.save_pretrained(tmp_path)
    spec, path = resolve_model(str(tmp_path)).spec, tmp_path / "m.gguf"
    weights = {name: source.whole() for name, source in sources(tmp_path, "safetensors", spec, CPU, 0)}
    family = family_of(spec.architecture)
    assert family is not None
    assert family.gguf is not None
    writer = writer_of(path, kind, spec)
    if spec.layer_norms is None:
        writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(spec.rms_norm_eps)
    if spec.logit_scale != 1:
        writer.add_logit_scale(spec.logit_scale)
    if spec.multipliers:
        embedding, logits, residual = spec.multipliers
        writer.add_embedding_scale(embedding)
        writer.add_logit_scale(logits)
        writer.add_residual_scale(residual)
        writer.add_attention_scale(spec.query_pre_attn_scalar**-0.5)
    if spec.head_dim * spec.num_attention_heads != spec.hidden_size:
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
    if spec.clip_qkv:
        writer.add_clamp_kqv(spec.clip_qkv)
    if kind == "mpt":
        writer.add_max_alibi_bias(8.0)
    if kind in ("gptneox", "phi2", "stablelm", "nemotron"):
        writer.add_rope_dimension_count(spec.rotary_dim)
    if spec.sliding_window:
        writer.add_sliding_window(spec.sliding_window)
    writer.add_rope_freq_base(spec.rope.rope_theta)
    tensors: dict[str, torch.Tensor] = {}
    for weight in weights_of(spec).values():
        tensor = weights[weight.name] + weight.plus
        if (
            family.gguf.interleaved_heads
            and not weight.neighbours[1]
            and weight.gguf.endswith(("attn_q.weight", "attn_k.weight"))
        ):
            halves = tensor.view(-1, 2, spec.head_dim // 2, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        tensors[weight.gguf] = tensor
    known = known_names(kind, theirs.state_dict())
    packed = {stem: parts for stem, parts in family.gguf.packed.items() if f"blk.0.{stem}.weight" in known}
    for name, tensor in joined(tensors, packed).items():
        assert name in known, "llama.cpp has no such name for a tensor of this model"
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = load(path)
    tokens = torch.randint(0, 211, (37,)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    found = run(ours, caches(ours.spec, 24), [(tokens, 0, [7, 3, 11, 0, 5, 9, 1, 2, 8, 4])])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
