"""--deterministic: what is not proven is refused, with the reason and what would do."""

from typing import Any

import msgspec
import pytest
from tiny_models import resolved_of, spec_of

from meshlm.architectures.registry import family_of
from meshlm.protocol.config import (
    CacheConfig,
    ExpertConfig,
    MeshConfig,
    ParallelConfig,
    ServerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from meshlm.protocol.layers import Layers, LayerSpec, MLASpec, MoESpec, StateSpec
from meshlm.protocol.model import ModelSpec, QuantizationScheme, QuantizationSpec
from meshlm.protocol.pool import PoolKind
from meshlm.protocol.pooling import PoolingSpec
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.nodes import core
from meshlm.supervisor.settings import determinism, rules

WANTED = WorkerConfig(deterministic=True)
LLAMA = spec_of()
STATE = StateSpec(kind="mamba2", num_heads=4, head_dim=2, state_size=2, n_groups=2)
LATENT: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
SPARSE = MLASpec(**LATENT, index_topk=4, index_n_heads=1, index_head_dim=8)
MOE = MoESpec(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
INT8 = QuantizationScheme(targets=("Linear",), weight="channel", activation="token", integers=True)
ROUNDED = QuantizationSpec(method="compressed-tensors", schemes=(INT8,))


def check(config: MeshConfig, spec: ModelSpec = LLAMA, **changes: Any) -> None:
    family = family_of(spec.architecture)
    assert family is not None
    resolved = msgspec.structs.replace(resolved_of(spec), **{"device": "cpu", "dtype": "float32", **changes})
    rules.check(determinism.rules(config, resolved, family))


@pytest.mark.parametrize(
    ("config", "spec", "changes", "text"),
    [
        ({}, LLAMA, {"device": "tiny"}, "not proven on --device tiny; use --device cpu"),
        ({}, LLAMA, {"dtype": "bfloat16"}, "not proven for --dtype bfloat16; use --dtype float32"),
        (
            {"worker": WorkerConfig(deterministic=True, attention_backend="torch")},
            LLAMA,
            {},
            "-backend torch; use auto",
        ),
        ({"cache": CacheConfig(kv_cache_dtype="fp8")}, LLAMA, {}, "not proven for --kv-cache-dtype fp8; use auto"),
        (
            {},
            LLAMA,
            {"pooling": PoolingSpec(kind=PoolKind.LAST, tasks=("embed",), size=8)},
            "not proven for vectors and scores",
        ),
        (
            {},
            spec_of(layers=Layers.alike(LayerSpec(state=STATE), 1)),
            {},
            "LlamaForCausalLM, which has recurrent states",
        ),
        ({}, spec_of(mla=SPARSE), {}, "LlamaForCausalLM, whose attention chooses tokens by an index"),
        ({}, spec_of(architecture="Gemma3nForCausalLM"), {}, "not proven for Gemma3nForCausalLM; leave it out"),
        ({}, spec_of(architecture="TransformersForCausalLM"), {}, "not proven for TransformersForCausalLM"),
        ({}, spec_of(moe=MOE, quantization=ROUNDED), {}, "experts whose activations are rounded to 8 bits"),
        (
            {"parallel": ParallelConfig(tensor_parallel_size=4)},
            LLAMA,
            {},
            "--tensor-parallel-size 4, whose sums follow",
        ),
        ({"experts": ExpertConfig(enable_expert_parallel=True)}, spec_of(moe=MOE), {}, "for --enable-expert-parallel"),
        ({}, LLAMA, {"logits_processors": ("a:B",)}, r"not proven for logits processors \(a:B\)"),
        ({"speculative": SpeculativeConfig(rejection_sample_method="synthetic")}, LLAMA, {}, "use standard"),
    ],
)
def test_what_is_not_proven_is_refused(
    config: dict[str, Any], spec: ModelSpec, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=rf"^--deterministic \(VLLM_BATCH_INVARIANT\): .*{text}"):
        check(MeshConfig(**{"worker": WANTED, **config}), spec, **changes)
    if "worker" not in config:
        check(MeshConfig(**config), spec, **changes)


GPU = spec_of(hidden_size=64, num_attention_heads=1, head_dim=64, intermediate_size=128)
ON_GPU = {"device": "cuda", "dtype": "bfloat16"}
FP8 = QuantizationSpec(method="fp8", schemes=())


@pytest.mark.parametrize(
    ("config", "spec", "text"),
    [
        ({"parallel": ParallelConfig(tensor_parallel_size=2)}, GPU, "--tensor-parallel-size 2"),
        ({"parallel": ParallelConfig(pipeline_parallel_size=2)}, GPU, "--pipeline-parallel-size 2"),
        ({"speculative": SpeculativeConfig(method="eagle")}, GPU, "drafts of method eagle; use ngram"),
        ({"worker": WorkerConfig(deterministic=True, compile="inductor")}, GPU, "--compile inductor"),
        ({"worker": WorkerConfig(deterministic=True, attention_backend="triton")}, GPU, "-backend triton; use auto"),
        ({"server": ServerConfig(enable_prompt_embeds=True)}, GPU, "--enable-prompt-embeds"),
        ({"cache": CacheConfig(kv_cache_dtype="fp8")}, GPU, "--kv-cache-dtype fp8"),
        ({"experts": ExpertConfig(enable_eplb=True)}, GPU, "--enable-eplb"),
        ({}, msgspec.structs.replace(GPU, quantization=FP8), "quantised weights"),
        ({}, spec_of(mla=MLASpec(**LATENT)), "latent attention"),
        ({}, spec_of(moe=msgspec.structs.replace(MOE, expert_bias=True)), "experts with biases"),
        ({}, msgspec.structs.replace(GPU, attn_logit_softcapping=30.0), "sinks, soft caps"),
        ({}, msgspec.structs.replace(GPU, attention_sinks=True), "sinks, soft caps"),
        ({}, spec_of(hidden_size=512, num_attention_heads=2, head_dim=256), "heads of 256 numbers"),
        ({}, spec_of(hidden_size=68, num_attention_heads=1, head_dim=64), "products of 68 inputs"),
        ({}, msgspec.structs.replace(GPU, architecture="GemmaForCausalLM"), "GemmaForCausalLM on a GPU; use --device"),
    ],
)
def test_what_is_not_proven_on_a_gpu_is_refused(config: dict[str, Any], spec: ModelSpec, text: str) -> None:
    with pytest.raises(UsageError, match=rf"^--deterministic \(VLLM_BATCH_INVARIANT\): not proven .*{text}"):
        check(MeshConfig(**{"worker": WANTED, **config}), spec, **ON_GPU)


def test_what_is_proven_on_a_gpu_is_taken() -> None:
    check(MeshConfig(worker=WANTED), GPU, **ON_GPU)
    moe = MoESpec(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    check(MeshConfig(worker=WANTED), spec_of(hidden_size=64, num_attention_heads=1, head_dim=64, moe=moe), **ON_GPU)
    with pytest.raises(UsageError, match="not proven for --dtype float16; use --dtype bfloat16"):
        check(MeshConfig(worker=WANTED), GPU, device="cuda", dtype="float16")


def test_what_is_proven_is_taken() -> None:
    for spec in (LLAMA, spec_of(moe=MOE), spec_of(quantization=ROUNDED), spec_of(mla=MLASpec(**LATENT))):
        for ranks in (1, 2):
            check(MeshConfig(worker=WANTED, parallel=ParallelConfig(tensor_parallel_size=ranks)), spec)
    check(MeshConfig(worker=WANTED), LLAMA, device="fake", dtype="bfloat16")


def test_nodes_compare_their_processors() -> None:
    """The kernels of two kinds of processors differ in the last bit."""
    resolved = msgspec.structs.replace(resolved_of(LLAMA), load_format="dummy")
    asked, other = (core.facts(MeshConfig(worker=one, resolved=resolved)) for one in (WANTED, WorkerConfig()))
    assert asked.keys() - other.keys() == {"the processor", "torch"}
    on_gpu = core.facts(MeshConfig(worker=WANTED, resolved=msgspec.structs.replace(resolved, device="cuda")))
    assert on_gpu.keys() - other.keys() == {"triton", "torch"}
    theirs = asked | {"the processor": "0123 (another)"}
    assert core.differences(asked, theirs) == (
        f"the processor is {asked['the processor']} on the head and 0123 (another) on the node"
    )
