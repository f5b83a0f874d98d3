"""The .gguf files of decoders, dense and with experts, written as llama.cpp does, against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_model
from model_folders import resolve_model
from small_models import CLASSIC, SMALL, caches, load, run

from meshlm.protocol.model import ModelSpec
from meshlm.protocol.pool import PoolKind
from meshlm.runtime.errors import ModelFilesError

_ROUTED: dict[str, Any] = {
    "head_dim": 16,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "initializer_range": 0.2,
}
_EXPERTS = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 36}
_SIGMOIDS = _EXPERTS | {
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
    "expert_gating_func": 2,
    "expert_weights_scale": 1.7,
    "expert_weights_norm": True,
}
_SCALES = {"embedding_multiplier": 3.0, "logits_scaling": 1.5, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
_SCALE_KEYS = {"embedding_scale": 3.0, "logit_scale": 1.5, "residual_scale": 0.4, "attention.scale": 0.2}
_SLIDING = {"sliding_window": 7, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
_SLIDING_KEYS = {"attention.sliding_window": 7, "attention.sliding_window_pattern": [True, True, False]}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "olmo2": ("Olmo2Config", {}, {}),
    "command-r": ("CohereConfig", {"attention_bias": True, "logit_scale": 1.5}, {"logit_scale": 1.5}),
    "cohere2": (
        "Cohere2Config",
        {"num_hidden_layers": 5, "sliding_window": 7, "logit_scale": 1.5},
        {"attention.sliding_window": 7, "logit_scale": 1.5},
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 5}, {}),
    "starcoder2": ("Starcoder2Config", {}, {}),
    **{
        kind: (*CLASSIC[name], keys)
        for kind, name, keys in (
            ("arcee", "arcee", {}),
            ("gpt2", "gpt2", {}),
            ("starcoder", "gpt-bigcode", {}),
            ("gptneox", "gpt-neox", {"rope.dimension_count": 4}),
            ("phi2", "phi", {"rope.dimension_count": 4}),
            ("stablelm", "stablelm", {"rope.dimension_count": 4}),
            ("bloom", "bloom", {}),
            ("mpt", "mpt", {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 0.1}),
            ("falcon", "falcon-40b", {}),
            ("olmo", "olmo", {"attention.clamp_kqv": 0.1}),
            ("nemotron", "nemotron", {"rope.dimension_count": 8}),
            ("minimax-m2", "minimax-m2", _EXPERTS | {"expert_feed_forward_length": 80, "rope.dimension_count": 8}),
        )
    },
    "granite": ("GraniteConfig", _SCALES, _SCALE_KEYS),
    "granite-4": (  # without states
        "GraniteConfig",
        _SCALES,
        _SCALE_KEYS
        | {"rope.scaling.finetuned": True, "attention.head_count_kv": [2, 2, 2], "ssm.conv_kernel": 4}
        | {"expert_count": 0, "expert_used_count": 0, "expert_shared_feed_forward_length": 80},
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        _SCALES | {"num_local_experts": 6, "num_experts_per_tok": 2, "initializer_range": 0.2},
        _SCALE_KEYS | _EXPERTS | {"expert_feed_forward_length": 80},
    ),
    "phi3": (
        "Phi3Config",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}, "sliding_window": 7},
        {"attention.sliding_window": 7, "rope.dimension_count": 6, "rope.scaling.original_context_length": 4096},
    ),
    "chatglm": ("GlmConfig", {"head_dim": 8}, {"rope.dimension_count": 4}),
    "glm4": ("Glm4Config", {"head_dim": 16}, {"rope.dimension_count": 8}),
    "exaone4": ("Exaone4Config", _SLIDING, _SLIDING_KEYS),
    "olmo3": ("Olmo3Config", _SLIDING, _SLIDING_KEYS | {"rope.freq_base_swa": 5e5}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16}, {}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16, "use_bias": True}, {}),
    "mistral3": (
        "Ministral3Config",
        {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}},
        _YARN_KEYS | {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.3},
    ),
    "hunyuan-dense": (
        "HunYuanDenseV1Config",
        {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
        {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.scaling.original_context_length": 262144},
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1Config",
        {"head_dim": 16, "num_experts": 6, "moe_topk": 2, "initializer_range": 0.2},
        {"expert_count": 6, "expert_used_count": 2, "expert_shared_feed_forward_length": 80, "expert_shared_count": 1},
    ),
    "phimoe": (
        "PhimoeConfig",
        {"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True, "initializer_range": 0.2},
        {"expert_count": 6, "expert_used_count": 2, "attention.sliding_window": 0, "rope.dimension_count": 8}
        | {"rope.scaling.original_context_length": 4096},
    ),
    "glm4moe": (
        "Glm4MoeConfig",
        _ROUTED | {"use_qk_norm": True, "attention_bias": True},
        _SIGMOIDS | {"rope.dimension_count": 8},
    ),
    "dots1": ("Dots1Config", _ROUTED | {"sliding_window": None}, _SIGMOIDS),
    "ernie4_5-moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 36, "initializer_range": 0.2},
        _EXPERTS
        | {
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 40,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 16,
            "intermediate_size": 36,
            "intermediate_size_mlp": 96,
            "num_local_experts": 6,
            "interleave_moe_layer_step": 2,
            "num_hidden_layers": 4,
            "initializer_range": 0.2,
        },
        _EXPERTS | {"expert_used_count": 1, "interleave_moe_layer_step": 2, "rope.dimension_count": 16},
    ),
}
_KINDS = {"olmo3": "olmo2", "granite-4": "granite"}  # llama.cpp has one name for both


def common_keys(spec: ModelSpec) -> dict[str, Any]:
    """The metadata that families' files have by their kind of norm and heads."""
    eps = (
        "layer_norm_rms_epsilon"
        if spec.moe is not None or (spec.layer_norms is None and "Cohere" not in spec.architecture)
        else "layer_norm_epsilon"
    )
    keys: dict[str, Any] = {f"attention.{eps}": spec.rms_norm_eps, "rope.freq_base": spec.rope.rope_theta}
    if spec.head_dim * spec.num_attention_heads != spec.hidden_size:
        keys |= {"attention.key_length": spec.head_dim, "attention.value_length": spec.head_dim}
    return keys


def made(name: str, extra: dict[str, Any]) -> Any:
    """A model of transformers with random weights."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SMALL, **extra})
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for parameter_name, parameter in theirs.named_parameters():
        if parameter_name.endswith(("norm.weight", ".bias")):
            parameter.data += torch.randn_like(parameter) * 0.3
    for buffer_name, buffer in theirs.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer += torch.randn_like(buffer) * 0.3
    return theirs


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_file_is_the_same_model(case: str, tmp_path: Path) -> None:
    name, extra, keys = CASES[case]
    compare(made(name, extra), _KINDS.get(case, case), keys, tmp_path)


def test_the_numbers_of_an_activation_are_metadata(tmp_path: Path) -> None:
    """Each layer of Apertus has its own."""
    theirs = made("ApertusConfig", {"initializer_range": 0.2, "rope_parameters": {"rope_theta": 1e4}})
    functions = [layer.mlp.act_fn for layer in theirs.model.layers]
    numbers: dict[str, list[float]] = {f"xielu.{name}": [] for name in ("alpha_p", "alpha_n", "beta", "eps")}
    for function in functions:
        function.alpha_p.data += torch.randn(1)
        function.alpha_n.data += torch.randn(1)
        for name, column in numbers.items():
            column.append(getattr(function, name.removeprefix("xielu.")).item())
    compare(theirs, "apertus", numbers, tmp_path)


def test_numbers_of_an_activation_that_are_missing_are_named(tmp_path: Path) -> None:
    theirs = made("ApertusConfig", {"rope_parameters": {"rope_theta": 1e4}})
    short = {f"xielu.{name}": [0.5, 0.5] for name in ("alpha_p", "alpha_n", "beta", "eps")}
    with pytest.raises(ModelFilesError, match=r"xielu.alpha_p is \[0.5, 0.5\]; it must be a number for each layer"):
        compare(theirs, "apertus", short, tmp_path)


def test_a_decoder_may_be_made_for_vectors(tmp_path: Path) -> None:
    """As Qwen3-Embedding's files are."""
    made("Qwen3Config", {"head_dim": 16}).save_pretrained(tmp_path)
    spec, path = resolve_model(str(tmp_path)).spec, tmp_path / "m.gguf"
    for number, kind in ((0, None), (3, PoolKind.LAST)):
        write_model(tmp_path, path, "qwen3", spec, (), common_keys(spec) | {"pooling_type": number})
        modules = resolve_model(str(path)).modules
        assert (modules and modules.kind) == kind


def compare(theirs: Any, kind: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """Logits of the model as a .gguf file of this kind, with these keys of metadata."""
    theirs.save_pretrained(tmp_path)
    spec, path = resolve_model(str(tmp_path)).spec, tmp_path / "m.gguf"
    write_model(tmp_path, path, kind, spec, theirs.state_dict(), common_keys(spec) | keys)
    ours = load(path)
    tokens = torch.randint(0, 211, (37,)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    found = run(ours, caches(ours.spec, 24), [(tokens, 0, [7, 3, 11, 0, 5, 9, 1, 2, 8, 4])])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
