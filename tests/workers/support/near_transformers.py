"""How far an engine's logits are from float32, beside transformers' own in bfloat16: prompts in chunks, cached, preempted."""

from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_driver import MODEL, Driver, engine, in_bfloat16, prompts_of
from numpy.typing import NDArray

from meshlm.protocol.audio import Audio
from meshlm.protocol.pool import PoolKind
from meshlm.protocol.sampling import SamplingParams
from meshlm.workers.engine.engine import ModelEngine

LENGTHS = [333, 40]
SIZES: dict[str, Any] = {
    "vocab_size": MODEL["vocab_size"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 2048,
    "sliding_window": 100,
    "initializer_range": 0.05,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
GEMMA: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2Config",
        {"num_hidden_layers": 4, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    ),
    "gemma3": ("Gemma3TextConfig", {"num_hidden_layers": 7}),
    "gemma3 with windows that hold everything": ("Gemma3TextConfig", {"num_hidden_layers": 7, "sliding_window": 2048}),
}
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 10.0,
    "num_key_value_heads": 4,
}
_EQUAL_KV = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_SPARSE_MLP = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 256}
GEMMA4: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4-31b": ("Gemma4TextConfig", _GEMMA4 | _EQUAL_KV),
    "gemma4-26b": ("Gemma4TextConfig", _GEMMA4 | _EQUAL_KV | _SPARSE_MLP),
    "gemma4-e2b": (
        "Gemma4TextConfig",
        _GEMMA4
        | {"num_key_value_heads": 1, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        | {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": MODEL["vocab_size"]},
    ),
}
"""Heads of 256 and 512."""

_LATENT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "head_dim": 32,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 128}
DEEPSEEK: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2-lite": ("DeepseekV2Config", _LATENT | {"q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek-v3": (
        "DeepseekV3Config",
        _LATENT
        | {"q_lora_rank": 192, "n_group": 4, "topk_group": 2}
        | {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
}
_SPARSE = {**DEEPSEEK["deepseek-v3"][1], "head_dim": 32, "index_n_heads": 8, "index_head_dim": 64}
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {"all are chosen": ("DeepseekV32Config", _SPARSE | {"index_topk": 512})}
"""DeepSeek-V3.2."""

_STATES: dict[str, Any] = {
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_expand": 2,
    "head_dim": 128,
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": (
        "BambaConfig",
        _STATES | {"num_hidden_layers": 5, "attn_layer_indices": [2], "mamba_n_groups": 2, "sliding_window": None},
    ),
    "mamba2": (
        "Mamba2Config",
        {
            "num_hidden_layers": 3,
            "num_heads": 16,
            "head_dim": 64,
            "n_groups": 2,
            "state_size": 64,
            "sliding_window": None,
        },
    ),
    "mamba": ("MambaConfig", {"num_hidden_layers": 3, "state_size": 16, "time_step_rank": 32, "sliding_window": None}),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 128,
            "sliding_window": None,
        },
    ),
}
EXPERTS: dict[str, Any] = {"num_hidden_layers": 3, "head_dim": 128, "sliding_window": None}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", EXPERTS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {"num_hidden_layers": 3, "num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
        | {"shared_expert_intermediate_size": 512, "mlp_only_layers": [0]},
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        EXPERTS | {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 128, "norm_topk_prob": True},
    ),
    "gpt-oss": (
        "GptOssConfig",
        {"num_hidden_layers": 4, "num_attention_heads": 16, "head_dim": 64, "sliding_window": 128}
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}
"""Their experts are few, so that steps of one, few and many rows all touch most of them."""


_CHUNKS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 128,
    "sliding_window": None,
    "attention_chunk_size": 128,
    "intermediate_size_mlp": 1024,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 1, 1, 0],
    "floor_scale": 64,
}
SEEN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4 with one expert": ("Llama4TextConfig", _CHUNKS | {"num_local_experts": 1}),
    "bloom": ("BloomConfig", {"n_layer": 4, "n_head": 4, "head_dim": 128, "num_key_value_heads": 4}),
}
CHOOSING: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4": ("Llama4TextConfig", _CHUNKS | {"num_local_experts": 4}),
    "few tokens are chosen": ("DeepseekV32Config", _SPARSE | {"index_topk": 96}),
    "layers share choices": (
        "GlmMoeDsaConfig",
        {name: value for name, value in _SPARSE.items() if name not in ("rope_parameters", "n_group", "topk_group")}
        | {"index_topk": 512, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
}
"""Rounding changes which expert, or which tokens, are the best: some logits are far away then."""


def transformers_model(name: str, folder: Path, **changes: object) -> Any:
    """transformers' model with random weights that bfloat16 can hold, saved to the folder."""
    import transformers
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

    torch.manual_seed(0)
    kind, settings = {**GEMMA, **GEMMA4, **DEEPSEEK, **MIXTURES, **HYBRIDS, **SEEN, **SPARSE, **CHOOSING}[name]
    if (
        name in HYBRIDS and "group_size" not in signature(MambaRMSNormGated).parameters
    ):  # all groups have one norm there
        settings = settings | {("mamba_n_groups" if name == "bamba" else "n_groups"): 1}
    config = getattr(transformers, kind)(**{**SIZES, **settings, **changes})
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for parameter_name, parameter in theirs.named_parameters():
        if parameter_name.endswith("norm.weight"):
            parameter.data += torch.randn_like(parameter) * 0.1
        parameter.data = parameter.data.bfloat16().float()
    for buffer_name, buffer in theirs.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer += torch.randn_like(buffer) * 0.1
    theirs.save_pretrained(folder)
    return theirs


def qwen3(folder: Path) -> Any:
    """The same with the sizes of MODEL."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{k: v for k, v in MODEL.items() if k not in ("architectures", "torch_dtype")})
    theirs = transformers.Qwen3ForCausalLM(config).eval().float()
    for parameter in theirs.parameters():
        parameter.data = parameter.data.bfloat16().float()
    theirs.save_pretrained(folder)
    return theirs


def history(made: ModelEngine, audio: list[Audio] | None = None) -> Driver:
    """A prompt in two chunks beside another one's decodes, decodes of both, one behind a cached prefix, one preempted."""
    driver = Driver(made, prompts_of(LENGTHS), SamplingParams(max_tokens=16, temperature=0.0), audio=audio)
    driver.step({1: 40})
    driver.step({0: 200, 1: 1})
    driver.step({0: 133, 1: 1})
    for _ in range(4):
        driver.step({0: 1, 1: 1})
    driver.again(0, 320)
    driver.step({0: driver.length(0) - 320, 1: 1})
    driver.again(1, 0)
    driver.step({0: 1, 1: driver.length(1)})
    driver.step({0: 1, 1: 1})
    return driver


def expected(theirs: Any, driver: Driver) -> torch.Tensor:
    """What transformers gives where the driver has seen logits, float32 [seen, vocab]."""
    device = driver.engine.device
    theirs.to(device)
    with torch.no_grad():
        found = [
            theirs(torch.tensor([prompt + tokens], device=device)).logits[0].float()
            for prompt, tokens in zip(driver.prompts, driver.tokens, strict=True)
        ]
    return torch.stack([found[seen.row][seen.length - 1] for seen in driver.seen])


def errors(theirs: Any, driver: Driver) -> tuple[float, float]:
    """Mean distance from float32: the engine's, and that of transformers in bfloat16, which the model is left in."""
    ours, rounded = errors_of_rows(theirs, driver)
    return float(ours.mean()), float(rounded.mean())


def errors_of_rows(theirs: Any, driver: Driver) -> torch.Tensor:
    """The same for each line of logits: float32 [2, seen]."""
    exact = expected(theirs, driver)
    rounded = expected(in_bfloat16(theirs), driver)
    ours = torch.stack([seen.logits for seen in driver.seen])
    return torch.stack(((ours - exact).abs().mean(1), (rounded - exact).abs().mean(1)))


def check_plain_torch(name: str, folder: Path, device: str, **changes: object) -> None:
    """Without Triton: a float32 engine gives transformers' logits, a bfloat16 one makes the errors of bfloat16."""
    theirs = transformers_model(name, folder, **changes)

    def driven(dtype: str) -> Driver:
        settings: dict[str, Any] = {"attention_backend": "torch", "kv_cache_memory": 64 << 20}
        return history(engine(folder, load_format="auto", device=device, dtype=dtype, **settings))

    exact = driven("float32")
    found = torch.stack([seen.logits for seen in exact.seen])
    torch.testing.assert_close(found, expected(theirs, exact), atol=2e-4, rtol=2e-4)
    ours, error = errors(theirs, driven("bfloat16"))
    assert ours <= 1.1 * error, f"mean error {ours:.4f}, transformers' own {error:.4f}"


def vector(theirs: Any, prompt: list[int], kind: PoolKind) -> NDArray[np.float32]:
    """What a Pool of this kind must give: float32 [hidden], or that for each token."""
    device = next(theirs.parameters()).device
    with torch.inference_mode():
        states = theirs.model(torch.tensor([prompt], device=device)).last_hidden_state[0].float().cpu()
    means = {PoolKind.MEAN: states.mean(0), PoolKind.CLS: states[0], PoolKind.ALL: states.flatten()}
    means[PoolKind.SPLADE] = states.amax(0)
    return np.asarray(means.get(kind, states[-1]), np.float32)
