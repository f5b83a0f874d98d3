"""How the model is computed: KV memory, batching and the workers."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from meshlm.protocol.config.per_node import PER_NODE


class CacheConfig(Struct, frozen=True, kw_only=True):
    """The memory of the KV cache."""

    block_size: Annotated[Literal[8, 16, 32, 64, 128], Meta(description="tokens per KV block")] = 16
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1, description="share of the GPU's memory for weights, activations and KV cache", extra=PER_NODE),
    ] = 0.92
    kv_cache_memory: (
        Annotated[
            int,
            Meta(ge=1, description="bytes of KV cache, CPU or GPU; suffixes K M G", extra={"bytes": True, **PER_NODE}),
        ]
        | None
    ) = None
    num_gpu_blocks_override: (
        Annotated[int, Meta(ge=1, description="KV blocks of a worker, instead of those that its memory has room for")]
        | None
    ) = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "fp8_e5m2"], Meta(description="of the KV cache; auto: the model's; fp8: e4m3")
    ] = "auto"
    calculate_kv_scales: Annotated[
        bool,
        Meta(
            description="scales of an FP8 KV cache from the keys and values that the model computes at its start, instead of those of "
            "the checkpoint"
        ),
    ] = False
    mamba_cache_mode: Annotated[
        Literal["auto", "none", "align", "all"],
        Meta(
            description="where state-space layers leave checkpoints for the prefix cache: none, where a step ends at a block's end "
            "(auto, with prefix caching), or behind each block"
        ),
    ] = "auto"
    mamba_block_size: (
        Annotated[int, Meta(ge=8, multiple_of=8, description="tokens between checkpoints; a multiple of the KV block")]
        | None
    ) = None
    mamba_cache_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Meta(description="of the states of state-space layers; auto: the model's"),
    ] = "auto"
    mamba_ssm_cache_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Meta(description="of these without the convolution's; auto: what the model says, or --mamba-cache-dtype"),
    ] = "auto"
    enable_prefix_caching: Annotated[bool, Meta(description="reuse the KV blocks of equal prefixes")] = True
    prefix_caching_per_key: Annotated[
        bool,
        Meta(description="with several API keys: reuse those of the same key only, so that no key learns of another's"),
    ] = True


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """How requests are batched."""

    max_num_seqs: (
        Annotated[int, Meta(ge=1, le=8192, description="requests in one step at most (GPU 1024, CPU 64)")] | None
    ) = None
    max_num_batched_tokens: (
        Annotated[int, Meta(ge=1, description="token budget of one step (GPU 8192, CPU 1024)", extra={"count": True})]
        | None
    ) = None
    max_num_encoder_input_tokens: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="vectors that encoders of images make in one step, if of more than one image; beside streams no more than "
                "the step has room for prompt tokens; default: --max-num-batched-tokens",
                extra={"count": True},
            ),
        ]
        | None
    ) = None
    scheduling_policy: Annotated[Literal["fcfs", "priority"], Meta(description="order of the waiting queue")] = "fcfs"
    max_waiting: Annotated[
        int, Meta(ge=1, description="queued requests beyond which new ones get 503", extra=PER_NODE)
    ] = 4096
    async_depth: Annotated[int, Meta(ge=1, le=4, description="steps in flight; 1: plan only when the last is back")] = 2
    enable_chunked_prefill: Annotated[bool, Meta(description="split prompts over steps")] = True
    prefill_pace: Annotated[
        Literal["even", "full"],
        Meta(
            description="even: spread prompts over steps, so that streams wait little for their next token; full: as many prompt "
            "tokens in each step as it holds, as offline work wants it"
        ),
    ] = "even"
    max_itl_ms: (
        Annotated[
            float,
            Meta(
                gt=0,
                description="the longest wait between two tokens of a stream that prompts of others may cause, in milliseconds: steps "
                "are no longer; throughput and time to first token pay for a short one; default: 120 for long prompts, less for others",
            ),
        ]
        | None
    ) = None


class WorkerConfig(Struct, frozen=True, kw_only=True):
    """How the workers compute."""

    device: Annotated[str, Meta(description="where the model runs: auto, cpu, cuda, fake, or a plug-in's name")] = (
        "auto"
    )
    device_ids: Annotated[
        str,
        Meta(
            description="GPUs of this node's workers, by number or by UUID, as 2,3; numbers count those of CUDA_VISIBLE_DEVICES",
            extra=PER_NODE,
        ),
    ] = ""
    numa_bind: Annotated[
        bool, Meta(description="each worker stays on the CPUs and in the memory of its GPU's NUMA node", extra=PER_NODE)
    ] = False
    numa_bind_nodes: Annotated[
        tuple[int, ...],
        Meta(description="NUMA nodes of this node's workers, in order; default: their GPUs'", extra=PER_NODE),
    ] = ()
    numa_bind_cpus: Annotated[
        tuple[str, ...],
        Meta(description="CPUs of this node's workers, like 0-3,8, in the place of all of the node's", extra=PER_NODE),
    ] = ()
    enforce_eager: Annotated[bool, Meta(description="no CUDA graphs, and nothing compiled")] = False
    cudagraph_mode: Annotated[
        Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"],
        Meta(description="CUDA graph mode"),
    ] = "FULL"
    cudagraph_capture_sizes: Annotated[
        tuple[int, ...],
        Meta(
            description="tokens of the CUDA graphs, of decodes (up to max-num-seqs) and of steps with prompts (128 or more)"
        ),
    ] = ()
    max_cudagraph_capture_size: (
        Annotated[int, Meta(ge=1, description="tokens of the largest CUDA graph; default: where launches cost nothing")]
        | None
    ) = None
    cudagraph_capture: Annotated[
        Literal["behind", "start"],
        Meta(
            description="behind: a few CUDA graphs before the worker is ready, the others in idle time; start: all before, but for "
            "those of steps with shared prefixes or long contexts, which are captured when such steps come"
        ),
    ] = "behind"
    compile: Annotated[
        Literal["none", "inductor", "eager"],
        Meta(
            description="inductor: torch.compile what stands between attention calls, instead of our fused kernels; eager: the same "
            "without a compiler behind Dynamo, to find out which of the two is wrong"
        ),
    ] = "none"
    compile_dynamic_shapes: Annotated[
        Literal["backed", "unbacked", "backed_size_oblivious"],
        Meta(description="numbers of tokens, for --compile: the stricter ones help to debug guards"),
    ] = "backed"
    compilation_config: Annotated[
        str, Meta(description="vLLM's, a JSON object: keys that have settings here are taken", extra={"short": "-cc"})
    ] = ""
    tune: Annotated[
        Literal["off", "kept", "quick", "full"],
        Meta(
            description="kernels for sizes that no table of this GPU has. quick: use what earlier starts have measured, and measure "
            "up to 8 seconds before the worker is ready; full: up to 9 minutes, more of them, and one row's in whole steps; "
            "kept: measure nothing; off: use nothing"
        ),
    ] = "quick"
    tuning_dir: Annotated[
        str,
        Meta(
            description="folder of what --tune has measured; default: below $XDG_CACHE_HOME/meshlm/tuning",
            extra=PER_NODE,
        ),
    ] = ""
    attention_backend: Annotated[
        str,
        Meta(
            description="attention implementation: auto, cpu, torch, triton, flash_attn or flashinfer (if installed), or a plug-in's"
        ),
    ] = "auto"
    disable_cascade_attn: Annotated[
        bool,
        Meta(description="each decode reads the whole of its context, also where it shares a long prefix with others"),
    ] = False
    logits_processors: Annotated[
        tuple[str, ...],
        Meta(
            description="classes that change logits, module:Class; those of installed packages are there, too",
            extra={"json": True},
        ),
    ] = ()
    worker_extension_cls: Annotated[
        str, Meta(description="class of yours, module.Class, whose methods POST /collective_rpc calls in every worker")
    ] = ""
    weight_transfer_config: Annotated[
        str,
        Meta(description='how a trainer sends weights, JSON as vLLM has it: {"backend": "nccl"}, gloo, ipc or disk'),
    ] = ""
    trainer_timeout: Annotated[
        float,
        Meta(gt=0, description="seconds without a call after which a trainer's update, and its pause, are given up"),
    ] = 300.0
    weight_transfer: str = ""  # its backend; set by the supervisor, no flag; "": folders alone
    deterministic: Annotated[
        bool,
        Meta(
            description="the same request gets the same logits to the last bit, whatever is computed beside it; refused where that is "
            "not proven (docs/determinism.md)"
        ),
    ] = False
    cpu_threads: Annotated[int, Meta(ge=0, description="threads of a CPU worker; 0: one per core", extra=PER_NODE)] = 0
    enable_sleep_mode: Annotated[
        bool,
        Meta(
            description="workers can give the memory of weights and KV cache back while the mesh runs: POST /sleep, LLM.sleep"
        ),
    ] = False
    profiler_dir: Annotated[
        str,
        Meta(
            description="directory for profiler traces; with it POST /start_profile and /stop_profile work",
            extra=PER_NODE,
        ),
    ] = ""
    profile_layers: Annotated[
        bool,
        Meta(description="NVTX ranges around layers, for nsys and ncu; without CUDA graphs, which would hide them"),
    ] = False

    @property
    def receives_weights(self) -> bool:
        """Whether a trainer may send tensors."""
        return self.weight_transfer not in ("", "disk")

    fake_step_ms: Annotated[float, Meta(ge=0, description="device fake: length of a step", extra=PER_NODE)] = 0.0
    fake_drafts: Annotated[
        int, Meta(ge=0, le=64, description="device fake: tokens that it drafts in a step, at most", extra=PER_NODE)
    ] = 0
    fake_lockstep: Annotated[
        bool, Meta(description="device fake: data-parallel ranks step together, as those that share experts do")
    ] = False
