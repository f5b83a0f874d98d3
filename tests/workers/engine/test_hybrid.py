"""Models with recurrent states behind a scheduler: tokens stay transformers' own, whole, in chunks, preempted, and behind checkpoints.

What no request needs any more is overwritten with NaN before each step, so whoever goes on from a state that was given back is seen.
"""

from pathlib import Path
from typing import Any

import pytest
from served_engines import AGAIN, Engines, Reference, made, served

from meshlm.protocol.kv import FullAttention, RecurrentState

STATES: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
MAMBA2 = {
    "num_hidden_layers": 3,
    "num_heads": 6,
    "head_dim": 16,
    "n_groups": 2,
    "state_size": 8,
    "expand": 2,
    "chunk_size": 8,
}
MAMBA = {"num_hidden_layers": 3, "state_size": 8, "expand": 2, "time_step_rank": 5, "intermediate_size": 96}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2Config", MAMBA2),
    "bamba": ("BambaConfig", STATES | {"num_hidden_layers": 4, "attn_layer_indices": [1]}),
    "granite": (
        "GraniteMoeHybridConfig",
        STATES
        | {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 5,
            "shared_intermediate_size": 40,
            "embedding_multiplier": 3.0,
            "logits_scaling": 1.7,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.3,
        },
    ),
    "granite-dense": (
        "GraniteMoeHybridConfig",
        STATES
        | {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
            "embedding_multiplier": 3.0,
        },
    ),
    "nemotron": (
        "NemotronHConfig",
        {
            "layers_block_type": ["mlp", "linear_attention", "full_attention", "linear_attention", "mlp"],
            "head_dim": 8,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 8,
        },
    ),
    "nemotron-experts": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
            "head_dim": 8,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 8,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 28,
            "routed_scaling_factor": 1.7,
        },
    ),
    "falcon-h1": (
        "FalconH1Config",
        STATES
        | {
            "num_hidden_layers": 2,
            "mamba_d_ssm": 96,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.4,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.6,
            "ssm_in_multiplier": 0.8,
            "ssm_out_multiplier": 0.5,
            "mlp_multipliers": [0.9, 0.45],
            "ssm_multipliers": [0.5, 0.8, 1.2, 0.9, 0.7],
        },
    ),
    "falcon-h1-normed": (
        "FalconH1Config",
        STATES
        | {
            "num_hidden_layers": 2,
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "tie_word_embeddings": True,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.4,
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "num_experts": 4,
            "mamba_d_state": 4,
            "mamba_dt_rank": 5,
            "mamba_expand": 1,
        },
    ),
    "mamba": ("MambaConfig", MAMBA),
    "falcon-mamba": ("FalconMambaConfig", MAMBA),
    "lfm2": (
        "Lfm2Config",
        {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
            "block_multiple_of": 8,
            "conv_bias": True,
        },
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [1],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
        },
    ),
    "qwen3.5": (
        "Qwen3_5MoeTextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
        },
    ),
}
ALONE = ("mamba2", "mamba", "falcon-mamba")  # nothing attends
PAGES = {**dict.fromkeys(ALONE, 4), "jamba": 16, "qwen3-next": 16, "qwen3.5": 16, "lfm2": 52}
SIZES = dict.fromkeys(ALONE, 16)  # of blocks, as states are large


@pytest.fixture(params=CASES, scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Reference]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, made(CASES[request.param], folder)


@pytest.mark.parametrize(("backend", "mode", "tp", "pp"), [("torch", "align", 1, 1), ("cpu", "all", 1, 1)])
def test_tokens_are_transformers(model: tuple[str, Path, Reference], backend: str, mode: str, tp: int, pp: int) -> None:
    case, folder, expected = model
    size = SIZES.get(case, 48)
    engines = Engines(folder, PAGES.get(case, 12), backend, tp, pp, mamba_cache_mode=mode, mamba_block_size=size)
    try:
        bench = served(engines, pp)
    finally:
        engines.close()
    assert any(isinstance(spec, RecurrentState) and spec.mode == mode for spec in engines.kv_specs)
    assert (FullAttention() in engines.kv_specs) == (case not in ALONE)
    assert bench.tokens == expected.greedy(bench.tokens)
    assert bench.core.batching.num_preemptions > 0, "memory was to be too little"
    if case not in ("jamba", "qwen3-next", "qwen3.5"):  # nothing of them is left in so little memory; see below
        assert bench.cached[AGAIN[-1]] >= (32 if case in ALONE else 48), "too little was found in the prefix cache"


@pytest.mark.parametrize(
    ("case", "tp", "pp"),
    [
        ("bamba", 2, 1),
        ("lfm2", 2, 1),
        ("falcon-h1", 2, 1),
        ("granite", 1, 2),
        ("nemotron", 2, 1),
        ("nemotron-experts", 2, 1),
        ("qwen3-next", 2, 1),
        ("jamba", 1, 2),
    ],
)
def test_ranks_and_stages(case: str, tp: int, pp: int, tmp_path: Path) -> None:
    """Heads with their states, and groups of B and C, are split; each stage has the pages of its own layers."""
    expected = made(CASES[case], tmp_path)
    engines = Engines(tmp_path, 60, "torch", tp, pp, mamba_block_size=SIZES.get(case, 48))
    try:
        bench = served(engines, pp)
    finally:
        engines.close()
    assert bench.tokens == expected.greedy(bench.tokens)
    assert bench.cached[AGAIN[-1]] >= 48, "too little was found in the prefix cache"
