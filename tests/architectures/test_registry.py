"""Families and their weights: one name each, and a parameter of the module for every tensor."""

import re
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
from tiny_models import spec_of

from meshlm.architectures import registry
from meshlm.architectures.layers import with_attention
from meshlm.architectures.registry import (
    architectures,
    families,
    family_of,
    gguf_family,
    gguf_kinds,
    register,
    weights_of,
)
from meshlm.protocol.layers import MLP, Attention, Layers, LayerSpec, MLASpec, MoESpec, StateSpec
from meshlm.protocol.model import AltUpSpec, AudioEncoderSpec, HeadSpec, LayerNormSpec, PerLayerInputSpec, RopeSpec
from meshlm.workers.distributed.shard import WHOLE
from meshlm.workers.models.registry import model_class
from meshlm.workers.weights.slices import place

STATES: dict[str, Literal["mamba", "mamba2", "gated_delta_net", "short_conv"]] = {
    "Mamba2": "mamba2",
    "Mamba": "mamba",
    "FalconMamba": "mamba",
    "FalconH1": "mamba2",
    "Lfm2": "short_conv",
    "Bamba": "mamba2",
    "GraniteMoeHybrid": "mamba2",
    "NemotronH": "mamba2",
    "Jamba": "mamba",
    "RecurrentGemma": "mamba",
    "Qwen3Next": "gated_delta_net",
    "Qwen3_5": "gated_delta_net",
    "Qwen3_5Moe": "gated_delta_net",
}
"""Architectures whose first layer has a state."""
MULTIPLIERS = {"Granite": 3, "FalconH1": 14}
LAYER_NORMS: dict[str, LayerNormSpec] = {
    "Cohere": LayerNormSpec(parallel=1, gated=True),
    "Starcoder2": LayerNormSpec(),
    "GPT2": LayerNormSpec(learned_positions=True),
    "GPTBigCode": LayerNormSpec(learned_positions=True),
    "GPTNeoX": LayerNormSpec(parallel=2),
    "Phimoe": LayerNormSpec(gated=True),
    "PhiMoE": LayerNormSpec(gated=True),
    "Phi": LayerNormSpec(parallel=1, head_bias=True),
    "OPT": LayerNormSpec(learned_positions=True, after=True, embedding_dim=6),
    "StableLm": LayerNormSpec(gated=True),
    "GPTJ": LayerNormSpec(parallel=1, head_bias=True),
    "NemotronF": LayerNormSpec(),
    "NemotronM": LayerNormSpec(),
    "OlmoF": LayerNormSpec(gated=True, affine=False),
    "OlmoM": LayerNormSpec(gated=True, affine=False),
    "Bloom": LayerNormSpec(embedding_norm=True),
    "Mpt": LayerNormSpec(),
    "MPT": LayerNormSpec(),
    "Falcon": LayerNormSpec(parallel=2),
    "Whisper": LayerNormSpec(learned_positions=True),
}
"""Families with layer norms, by what the names of their architectures begin with."""
SPEECH = AudioEncoderSpec(
    num_mel_bins=3, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=6, max_source_positions=5
)


def test_two_families_of_one_name_are_refused() -> None:
    family = families()["LlamaForCausalLM"]
    with pytest.raises(ValueError, match="LlamaForCausalLM is registered already"):
        register(family)


def test_a_family_that_is_added_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FAMILIES", families())
    register(families()["LlamaForCausalLM"]._replace(architecture="OtherForCausalLM"))
    assert "OtherForCausalLM" in families()
    assert len(weights_of(spec_of(architecture="OtherForCausalLM"))) == 12
    assert gguf_family({"general.architecture": "llama"}) is families()["LlamaForCausalLM"]
    assert gguf_family({"general.architecture": "llama", "llama.expert_count": 8}) is families()["MixtralForCausalLM"]
    assert gguf_family({"general.architecture": "other"}) is None


def test_what_is_said_of_a_family_before_its_module_is_imported() -> None:
    assert tuple(families()) == architectures()
    assert {name: family.architecture for name, family in families().items()} == {
        name: name for name in architectures()
    }
    kinds = tuple(dict.fromkeys(family.gguf.kind for family in families().values() if family.gguf))
    unread = dict(registry._OWN)
    assert {name: module.gguf_kind for name, module in unread.items()} == {
        name: family.gguf.kind if family.gguf else "" for name, family in families().items() if name in unread
    }
    assert gguf_kinds() == (*kinds, *registry._SAME_KINDS)
    assert set(registry._SAME_KINDS.values()) <= set(kinds)
    assert family_of("NobodyForCausalLM") is None


@pytest.mark.parametrize("architecture", families())
@pytest.mark.parametrize("tied", [False, True])
def test_weights_fill_the_parameters_of_the_model(architecture: str, tied: bool) -> None:
    """Each element once: what the weights of a parameter have in all is what the module declares."""
    mla = MLASpec(kv_lora_rank=6, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=5, q_lora_rank=7 if tied else 0)
    if any(stem in architecture for stem in ("V32", "Dsa")):
        mla = msgspec.structs.replace(mla, q_lora_rank=7, index_topk=3, index_n_heads=2, index_head_dim=4)
    is_encoder, is_modern = "bert" in architecture.lower() or "BgeM3" in architecture, architecture.startswith("Modern")
    two = is_modern or (is_encoder and "Sequence" in architecture) or "Reward" in architecture
    head = HeadSpec(num_labels=3, layers=2, bias=(tied, True), norm=is_modern)
    of_encoder: dict[str, Any] = {}
    if is_encoder:
        biases = dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), tied or not is_modern)
        of_encoder = {
            **biases,
            "norm_bias": tied,
            "type_vocab_size": 2,
            "sliding_window": 4,
            "sliding_layers": (False, True),
        }
    of_states: dict[str, Any] = {}
    if (kind := next((kind for stem, kind in STATES.items() if architecture.startswith(stem)), None)) is not None:
        alone, both = architecture.startswith(("Mamba", "FalconMamba")), architecture.startswith("FalconH1")
        short = kind == "short_conv"
        state = StateSpec(
            kind=kind,
            num_heads=8 if short else 4,
            head_dim=1 if short else 3,
            state_size=0 if short else 5,
            n_groups=2,
            proj_bias=tied and not both,
            time_step_rank=3,
            mixer_norm="weighted" if architecture.startswith("Jamba") else "none",
        )
        attention, mlp = Attention(num_key_value_heads=1, head_dim=4), MLP(intermediate_size=8)
        sole = alone or architecture.startswith("Nemotron")  # a layer is one thing
        first = LayerSpec(state=state, attention=attention if both else None, mlp=None if sole else mlp)
        second = LayerSpec(
            state=state if alone or both else None, attention=None if sole else attention, mlp=None if alone else mlp
        )
        of_states = {"layers": Layers.from_records((first, second)), "qk_norm": short}
    of_experts: dict[str, Any] = {}
    if architecture.startswith("GptOss"):
        moe = MoESpec(num_experts=1, num_experts_per_tok=1, moe_intermediate_size=5, router_bias=True, expert_bias=True)
        of_experts = {"attention_sinks": True, "moe": moe}
    if architecture.lower().startswith("phimoe"):
        of_experts = {"moe": MoESpec(num_experts=1, num_experts_per_tok=1, moe_intermediate_size=5, sparse_mixer=0.1)}
    order = next((order for stem, order in LAYER_NORMS.items() if architecture.startswith(stem)), None)
    if order is not None and not architecture.startswith(("Phi3", "FalconH1", "FalconMamba")):
        of_encoder = {"layer_norms": order, "norm_bias": order.affine and not architecture.startswith("Cohere")}
    if architecture.startswith("Gemma3n"):
        altup = AltUpSpec(
            altup_num_inputs=2,
            altup_active_idx=0,
            altup_correct_scale=True,
            laurel_rank=2,
            hidden_size_per_layer_input=3,
            vocab_size_per_layer_input=5,
        )
        of_experts = {"altup": altup, "qk_norm": True, "num_kv_shared_layers": 1}
    if architecture.startswith("Gemma4"):
        of_experts = {
            "qk_norm": True,
            "sliding_window": 4,
            "sliding_layers": (True, False),
            "sliding_rope": RopeSpec(),
            "per_layer_input": PerLayerInputSpec(hidden_size_per_layer_input=3, vocab_size_per_layer_input=5),
        }
    if architecture.startswith("Whisper"):
        of_experts = {"mlp_bias": True, "output_bias": True, "audio_encoder": SPEECH}
    spec = spec_of(
        **of_encoder,
        **of_states,
        **of_experts,
        encoder_only=is_encoder,
        projection=5 if architecture == "HF_ColBERT" else 0,
        lexical="splade" if "Splade" in architecture else "",
        head=(head if two else HeadSpec(num_labels=3, bias=(tied,)))
        if architecture.endswith(("Classification", "RewardModel"))
        else None,
        architecture=architecture,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=4,
        tie_word_embeddings=tied,
        multipliers=(1.0,) * next((n for stem, n in MULTIPLIERS.items() if architecture.startswith(stem)), 0),
        mla=mla if architecture.startswith(("Deepseek", "GlmMoeDsa", "Glm4MoeLite", "Youtu")) else None,
    )
    if architecture.startswith("Gemma4"):
        experts = MoESpec(num_experts=1, num_experts_per_tok=1, moe_intermediate_size=5)
        spec = with_attention(spec, (False, True), head_dim=6, keys_are_values=tied)
        spec = spec.with_layers(lambda layer: msgspec.structs.replace(layer, experts=experts))
    with torch.device("meta"):
        model = model_class(spec)(spec, 64, WHOLE)
    elements: dict[str, int] = {}
    for name, weight in weights_of(spec).items():
        found = place(name, spec, WHOLE)
        assert found is not None
        assert found.shape == weight.shape
        elements[found.parameter] = elements.get(found.parameter, 0) + torch.Size(weight.shape).numel()
    assert elements == {name: parameter.numel() for name, parameter in model.named_parameters()}
    if families()[architecture].gguf is not None:
        assert len({weight.gguf for weight in weights_of(spec).values()}) == len(weights_of(spec))


def test_the_document_lists_every_architecture() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")
    section = page.partition("## Architectures")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    tests = "".join(path.read_text("utf-8") for path in (Path(__file__).parents[1] / "workers").rglob("*.py")).lower()
    for name, module in registry._OWN.items():
        (line,) = [line for line in table if f"`{name}`" in line]
        assert line.split(" | ")[2] in ("CPU", "CPU, GPU"), f"{name}: where it is tested"
        stem = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel").lower()
        assert re.search(rf'"{stem}(text)?(config|forcausallm)?"', tests), (
            f"{name}: no test of workers makes a model of it"
        )
        assert module.gguf_kind in line.rpartition("| ")[2], f"{name}: its .gguf files"
