"""--deterministic: what is proven to give a request the same logits to the last bit, however its steps are made up; others are refused.

The proof are tests/workers/models/test_invariance.py and, on a GPU, tests/workers/cuda/test_invariance.py, which compare bits: a row of
a model of each class below is the same alone, beside others, in chunks cut anywhere, behind a cached prefix, after preemption, with any
number of threads, in CUDA graphs of any size and outside of them. Called by resolve.py.
"""

from meshlm.architectures.family import Family
from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.protocol.model import ModelSpec
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
"""`Family.model` of families whose every operation was compared on a CPU."""
ON_GPU = ("meshlm.workers.models.decoder:Decoder",)
ELSEWHERE = "use --device cpu, or leave it out"
LARGEST_HEAD, ALIGNED = 128, 8  # of heads; what sizes are multiples of (kernels/batch_invariant)


def rules(c: MeshConfig, resolved: Resolved, family: Family) -> Rules:
    """Of a resolved configuration. The fake device has no arithmetic: its tokens follow from seed and prompt."""
    device, spec = resolved.device, resolved.spec
    if not c.worker.deterministic or device == "fake":
        return
    yield device not in ("cpu", "cuda"), FLAG, f"not proven on --device {device}; use --device cpu, or leave it out"
    needed = "bfloat16" if device == "cuda" else "float32"
    of_dtype = f"not proven for --dtype {resolved.dtype}; use --dtype {needed}, or leave it out"
    yield resolved.dtype != needed, FLAG, of_dtype
    backend, kept = c.worker.attention_backend, c.cache.kv_cache_dtype
    why = f"not proven for --attention-backend {backend}; use auto, or leave it out"
    yield backend not in ("auto", device), FLAG, why
    yield kept != "auto", FLAG, f"not proven for --kv-cache-dtype {kept}; use auto, or leave it out"
    name = f"not proven for {spec.architecture}"
    yield resolved.pooling is not None, FLAG, "not proven for vectors and scores; leave it out"
    yield spec.state is not None, FLAG, f"{name}, which has recurrent states; leave it out"
    sparse = spec.mla is not None and spec.mla.index_topk
    yield sparse, FLAG, f"{name}, whose attention chooses tokens by an index; leave it out"
    yield family.model not in PROVEN, FLAG, f"{name}; leave it out"
    processors = ", ".join(resolved.logits_processors)
    yield processors, FLAG, f"not proven for logits processors ({processors}); leave one of them out"
    synthetic = c.speculative.rejection_sample_method == "synthetic"
    yield synthetic, FLAG, "with rejection_sample_method synthetic the text is not the model's; use standard"
    yield from (_on_gpu if device == "cuda" else _on_cpu)(c, spec)
    why = "not proven for --enable-expert-parallel; leave one of them out"
    yield c.experts.enable_expert_parallel, FLAG, why
    yield device == "cuda" and family.model not in ON_GPU, FLAG, f"{name} on a GPU; {ELSEWHERE}"


def _on_cpu(c: MeshConfig, spec: ModelSpec) -> Rules:
    schemes = () if spec.quantization is None else spec.quantization.schemes
    rounds = spec.moe is not None and any(scheme.activation != "none" for scheme in schemes)
    yield rounds, FLAG, "not proven for experts whose activations are rounded to 8 bits; leave it out"
    ranks = c.parallel.tensor_parallel_size
    why = f"not proven for --tensor-parallel-size {ranks}, whose sums follow the size of a step; use 1 or 2, or leave it out"
    yield ranks > 2, FLAG, why


def _on_gpu(c: MeshConfig, spec: ModelSpec) -> Rules:
    """Which GPU it is, the worker knows (workers/attention/invariant_backend.py)."""
    p, moe, on = c.parallel, spec.moe, "not proven on a GPU for"
    sizes = {"--tensor-parallel-size": p.tensor_parallel_size, "--pipeline-parallel-size": p.pipeline_parallel_size}
    for flag, size in sizes.items():
        yield size > 1, FLAG, f"{on} {flag} {size}; leave one of them out"
    drafts = c.speculative.method
    yield drafts not in ("", "ngram"), FLAG, f"{on} drafts of method {drafts}; use ngram, or leave one of them out"
    yield c.worker.compile != "none", FLAG, f"{on} --compile {c.worker.compile}; leave one of them out"
    yield c.server.enable_prompt_embeds, FLAG, f"{on} --enable-prompt-embeds; leave one of them out"
    yield c.experts.enable_eplb, FLAG, f"{on} --enable-eplb; leave one of them out"
    yield spec.quantization is not None, FLAG, f"{on} quantised weights; {ELSEWHERE}"
    yield spec.mla is not None, FLAG, f"{on} latent attention (MLA); {ELSEWHERE}"
    biased = moe is not None and (moe.expert_bias or moe.swiglu is not None or not moe.gated)
    yield biased, FLAG, f"{on} experts with biases, or with other gates than silu's; {ELSEWHERE}"
    scores = spec.attention_sinks or spec.attn_logit_softcapping or spec.alibi_slopes
    chunks = any(one.attention_chunk_size for one in spec.attentions)
    yield scores or chunks, FLAG, f"{on} attention with sinks, soft caps, slopes or chunks; {ELSEWHERE}"
    heads = sorted({one.head_dim for one in spec.attentions if not 16 <= one.head_dim <= LARGEST_HEAD})
    yield heads, FLAG, f"{on} heads of {', '.join(map(str, heads))} numbers, but of 16 to {LARGEST_HEAD}; {ELSEWHERE}"
    others = [] if moe is None else [moe.moe_intermediate_size, moe.shared_intermediate_size]
    inputs = [spec.hidden_size, *(layer.intermediate_size for layer in spec.layers), *others]
    inputs += [spec.num_attention_heads * one.head_dim for one in spec.attentions]
    odd = sorted({size for size in inputs if size % ALIGNED})
    yield odd, FLAG, f"{on} products of {', '.join(map(str, odd))} inputs, but of multiples of {ALIGNED}; {ELSEWHERE}"
