"""--deterministic: what is proven to give a request the same logits to the last bit, however its steps are made up; others are refused.

The proof is tests/workers/models/test_invariance.py, which compares bits: a row of a model of each class below is the same alone,
beside others, in chunks cut anywhere, behind a cached prefix and with any number of threads. Called by resolve.py.
"""

from meshlm.architectures.family import Family
from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.supervisor.settings.rules import Rules

FLAG = "--deterministic (VLLM_BATCH_INVARIANT)"
_MODELS = "meshlm.workers.models."
PROVEN = tuple(
    _MODELS + name
    for name in (
        "decoder:Decoder",
        "deepseek:Deepseek",
        "gemma:Gemma",
        "gemma:Gemma1",
        "gemma:Sandwich",
        "gemma4:Gemma4",
        "layer_norm:LayerNormDecoder",
        "layer_norm:PhiMoE",
        "llama_variants:HunYuan",
        "llama_variants:Ministral3",
        "llama_variants:Llama4",
        "post_norm:Olmo",
        "post_norm:Olmoe",
        "post_norm:PostNorm",
    )
)
"""`Family.model` of families whose every operation was compared."""


def rules(c: MeshConfig, resolved: Resolved, family: Family) -> Rules:
    """Of a resolved configuration. The fake device has no arithmetic: its tokens follow from seed and prompt."""
    device, spec, p = resolved.device, resolved.spec, c.parallel
    if not c.worker.deterministic or device == "fake":
        return
    where = "a GPU" if device == "cuda" else f"--device {device}"
    yield device != "cpu", FLAG, f"not proven on {where} yet; use --device cpu, or leave it out"
    float32 = f"not proven for --dtype {resolved.dtype}; use --dtype float32, or leave it out"
    yield resolved.dtype != "float32", FLAG, float32
    backend, kept = c.worker.attention_backend, c.cache.kv_cache_dtype
    why = f"not proven for --attention-backend {backend}; use auto, or leave it out"
    yield backend not in ("auto", "cpu"), FLAG, why
    yield kept != "auto", FLAG, f"not proven for --kv-cache-dtype {kept}; use auto, or leave it out"
    name = f"not proven for {spec.architecture}"
    yield resolved.pooling is not None, FLAG, "not proven for vectors and scores; leave it out"
    yield spec.state is not None, FLAG, f"{name}, which has recurrent states; leave it out"
    sparse = spec.mla is not None and spec.mla.index_topk
    yield sparse, FLAG, f"{name}, whose attention chooses tokens by an index; leave it out"
    yield family.model not in PROVEN, FLAG, f"{name}; leave it out"
    schemes = () if spec.quantization is None else spec.quantization.schemes
    rounds = spec.moe is not None and any(scheme.activation != "none" for scheme in schemes)
    yield rounds, FLAG, "not proven for experts whose activations are rounded to 8 bits; leave it out"
    sizes = f"--tensor-parallel-size {p.tensor_parallel_size}"
    why = f"not proven for {sizes}, whose sums follow the size of a step; use 1 or 2, or leave it out"
    yield p.tensor_parallel_size > 2, FLAG, why
    why = "not proven for --enable-expert-parallel; leave one of them out"
    yield c.experts.enable_expert_parallel, FLAG, why
    processors = ", ".join(resolved.logits_processors)
    yield processors, FLAG, f"not proven for logits processors ({processors}); leave one of them out"
    synthetic = c.speculative.rejection_sample_method == "synthetic"
    yield synthetic, FLAG, "with rejection_sample_method synthetic the text is not the model's; use standard"
