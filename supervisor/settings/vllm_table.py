"""Flags of `vllm serve` that are not ours: the same by another name, needless here, or not there yet, each with its reason.

Nothing but data. Read by vllm_flags.py; docs/from-vllm.md lists it, and a test holds the two together. Another test compares it with
the list of all flags of vLLM 0.26 (tests/supervisor/vllm_0_26_flags.json).
"""

# vLLM's flag -> our setting of the same meaning.
RENAMED = {
    ("--api-server-count", "-asc"): "frontends",
    ("--kv-cache-memory-bytes",): "kv_cache_memory",
    ("--data-parallel-address", "-dpa"): "master_addr",
    ("-dpl",): "data_parallel_size_local",
    ("-dpr",): "data_parallel_start_rank",
    ("-dph",): "data_parallel_hybrid_lb",
    ("-dpe",): "data_parallel_external_lb",
    ("-n",): "nnodes",
    ("-r",): "node_rank",
    ("--cuda-graph-sizes",): "cudagraph_capture_sizes",
    ("--shutdown-timeout",): "drain_timeout",
    ("--override-pooler-config",): "pooler_config",
    ("--enable-layerwise-nvtx-tracing",): "profile_layers",
}

# vLLM's flag -> the variable that it sets for this process and all that it starts (vllm_flags.py).
VARIABLES = {"--hf-token": "HF_TOKEN"}

# Flags of older vLLMs -> the key of --hf-overrides that they are.
OVERRIDES = {"--rope-scaling": "rope_scaling", "--rope-theta": "rope_theta"}

# vLLM's switch -> our setting and the value that it asks for.
SWITCHES: dict[str, tuple[str, bool | int]] = {
    "--disable-uvicorn-access-log": ("disable_log_requests", True),
    "--no-disable-uvicorn-access-log": ("disable_log_requests", False),
    "--enable-log-requests": ("disable_log_requests", False),
    "--no-enable-log-requests": ("disable_log_requests", True),
    "--no-async-scheduling": ("async_depth", 1),
}

_KERNELS = "the attention kernels are MeshLM's own"
_PROMPTS = "it computes prompts outside of CUDA graphs, MeshLM's own kernels the rest"
_EXCHANGE = "rows are written into the other GPUs' memory by MeshLM's own kernels"
# Values of our settings that have another name there: ours, and what is different then ("" where nothing is).
VALUES = {
    "attention_backend": {
        "FLASH_ATTN": ("flash_attn", _PROMPTS),
        "FLASHINFER": ("flashinfer", _PROMPTS),
        "TRITON_ATTN": ("triton", _KERNELS),
        "TORCH_SDPA": ("torch", ""),
    },
    "all2all_backend": {
        "naive": ("allgather_reducescatter", ""),
        "pplx": ("allgather_reducescatter", ""),
        "deepep_low_latency": ("peer_memory", _EXCHANGE),
        "flashinfer_nvlink_one_sided": ("peer_memory", _EXCHANGE),
    },
    "model_impl": {"vllm": ("meshlm", "")},
    "kv_cache_dtype": {"fp8_e4m3": ("fp8", "")},
    "load_format": {
        "hf": ("auto", ""),
        "fastsafetensors": ("safetensors", "weights are mapped from disk"),
        "instanttensor": ("safetensors", "weights are mapped from disk"),
        "runai_streamer": ("auto", "weights are streamed where MODEL is a URL, s3:// or gs://"),
    },
}

_EXCHANGES = (
    "peer_memory writes rows into the other GPUs' memory (one host), all_to_all sends each rank what its experts need, and "
    "allgather_reducescatter, the default, sends all to all"
)
# Values of our settings that only vLLM has: what to do instead.
ABSENT_VALUES = {
    "load_format": {
        "bitsandbytes": "--quantization bitsandbytes is the setting; checkpoints that are quantised so need none",
        "tensorizer": "serve safetensors, which are mapped from disk or streamed from s3://, or --load-format sharded_state",
        "runai_streamer_sharded": "--load-format sharded_state reads files by worker from a disk",
        "modelexpress": "serve safetensors, which are mapped from disk or streamed from s3://",
        "npcache": "serve safetensors, which are mapped from disk",
        "mistral": "serve the folder in the format of transformers",
    },
    "all2all_backend": {
        **dict.fromkeys(("deepep_high_throughput", "deepep_v2"), f"DeepEP is not used; {_EXCHANGES}"),
        "flashinfer_all2allv": f"FlashInfer is not used; {_EXCHANGES}",
        "flashinfer_nvlink_two_sided": f"FlashInfer is not used; {_EXCHANGES}",
        **dict.fromkeys(("mori", "mori_high_throughput", "mori_low_latency"), f"MoRI is not used; {_EXCHANGES}"),
        "nixl_ep": f"NIXL is not used; {_EXCHANGES}",
    },
    "kv_cache_dtype": {
        "float16": "auto keeps keys and values in the model's dtype (--dtype)",
        "bfloat16": "auto keeps keys and values in the model's dtype (--dtype)",
        "fp8_inc": "fp8 is e4m3",
        "fp8_ds_mla": "latents of MLA are not kept in 8 bits; auto",
        "nvfp4": "keys and values are kept in 8 bits (fp8, fp8_e5m2) or in the model's dtype (auto)",
    },
    "model_impl": {"terratorch": "transformers is the only other library"},
}

_OWN_MEDIA = "images lie in shared memory once, for all processes (docs/media.md)"
_NO_EXPERTS = "an adapter's tensors say whether they are of one expert or of all; both forms are read, side by side"
# Accepted and without effect: why nothing is lost. The number of their values follows the flag's name.
NEEDLESS = {
    "--disable-log-stats": (0, "no statistics are logged; GET /metrics and LLM.get_metrics have them"),
    "--max-log-len": (1, "prompts are never logged"),
    "--disable-frontend-multiprocessing": (0, "the mesh is processes"),
    "--max-parallel-loading-workers": (1, "weights are mapped from disk"),
    "--use-tqdm-on-load": (0, "start-up shows what is loaded"),
    "--no-use-tqdm-on-load": (0, "start-up shows what is loaded in one line"),
    "--swap-space": (1, "nothing is swapped: a preempted request is computed again"),
    "--max-seq-len-to-capture": (1, "graphs do not depend on the context's length"),
    "--async-scheduling": (0, "scheduling is always asynchronous (--async-depth)"),
    "--disable-hybrid-kv-cache-manager": (0, "blocks outside every window are freed, which changes no answer"),
    "--no-disable-hybrid-kv-cache-manager": (0, "layers of all kinds share the KV cache"),
    "--enable-prompt-tokens-details": (0, "usage always has prompt_tokens_details"),
    "--enable-server-load-tracking": (0, "GET /load and /metrics always have the load"),
    "--enable-request-id-headers": (0, "answers always have X-Request-Id"),
    "--enable-offline-docs": (0, "/docs loads nothing from elsewhere"),
    "--aggregate-engine-logging": (0, "no statistics are logged; GET /metrics has them"),
    "--show-hidden-metrics-for-version": (1, "no metric is hidden"),
    "--num-lookahead-slots": (1, "blocks are taken as they are needed"),
    "--disable-nccl-for-dp-synchronization": (0, "ranks of dense models never wait for each other"),
    "--disable-mm-preprocessor-cache": (0, _OWN_MEDIA),
    "--disable-chunked-mm-input": (0, "images whose tokens attend to one another are computed in one step anyway"),
    "--skip-mm-profiling": (0, "the encoder has a buffer of its own"),
    "--mm-shm-cache-max-object-size-mb": (1, _OWN_MEDIA),
    **dict.fromkeys(("--mm-tensor-ipc", "--mm-ipc-gpu-memory-gb"), (1, _OWN_MEDIA)),
    "--pt-load-map-location": (1, "weights are read on the CPU and copied"),
    "--enable-flashinfer-autotune": (0, "--tune measures what no table of our kernels has"),
    "--enable-log-deltas": (0, "answers are never logged"),
    "--enable-flash-late-interaction": (0, "late interaction is computed where answers are written"),
    "--use-fp64-gumbel": (0, "draws are made in float64"),
    "--safetensors-prefetch-num-threads": (1, "weights are mapped from disk"),
    "--safetensors-prefetch-block-size": (1, "weights are mapped from disk"),
    "--enable-ep-weight-filter": (0, "each rank reads the weights of its own experts alone"),
    "--enable-cumem-allocator": (0, "--enable-sleep-mode needs no allocator of its own"),
    "--no-disable-log-stats": (0, "no statistics are logged; GET /metrics and LLM.get_metrics have them"),
    "--specialize-active-lora": (0, "a step computes with the adapters that its rows have"),
    "--enable-tower-connector-lora": (0, "adapters change no encoder"),
    **dict.fromkeys(("--enable-moe-shared-loras", "--enable-mixed-moe-lora-format"), (0, _NO_EXPERTS)),
    "--allow-deprecated-quantization": (0, "no method of quantisation needs to be allowed"),
    "--cudagraph-metrics": (0, "GET /metrics always counts replays and misses of CUDA graphs"),
}

_ENCODERS = (
    "encoders of images are transformers' modules in the model's own dtype, whole on each rank; they have no settings"
)
_IMAGES_ALONE = (
    "images and videos are taken as files or URLs, each where its part stands (docs/media.md); nothing else is"
)
_CLASSES = "the processes' code is MeshLM's own"
_CONFIG = "serve a folder with the config.json that you want"
_PREFILL = "--max-num-batched-tokens bounds what prompts may take of a step"
_CONTEXT_PARALLEL = "context parallelism is not there yet; -tp and -pp are"
_PER_RANK = "start one mesh per rank with --data-parallel-rank and a --port of its own"
_OFFLOAD = (
    "--cpu-offload-gb and --cpu-offload-params are the settings; layers that lie evenly between others are prefetched"
)
_STATES = "states of state-space layers are computed by our kernels and rounded to the nearest"
_CHOSEN = "kernels are chosen by their tables and by --tune"
_STEPS = "steps are not logged; --profiler-dir writes traces, GET /metrics has histograms"
_COMPILING = "compilations are not watched; GET /metrics counts steps without a CUDA graph"
_PACE = "--prefill-pace, --max-num-batched-tokens and --cudagraph-capture are the settings"
_TIMEOUTS = "--startup-timeout and --step-timeout are the settings"

_QUANTISED = (
    "--quantization is the setting: fp8 and bitsandbytes quantise plain weights while they are loaded; what others are their files "
    "say"
)
_ONE_MESH = "--dp-roles is the setting within a mesh, --kv-transfer-config between meshes (docs/moved-kv.md)"
# Asks for what is not there: refused, with what to do instead.
ABSENT = {
    "--default-mm-loras": "a request names its adapter (model); no adapter is chosen by what it brings",
    "--tool-server": "clients call their tools themselves",
    "--reasoning-config": "--reasoning-parser is the setting",
    "--guided-decoding-backend": "grammars are llguidance's; --structured-outputs-config has the options",
    "--enable-log-outputs": "answers are never logged; --record-requests DIR writes them to files, as token ids",
    "--log-config-file": "--log-level and --log-format are the settings",
    "--profiler-config": "--profiler-dir DIR is the setting",
    "--tokens-only": "prompts may be token ids, and return_token_ids gives the answer's",
    "--skip-tokenizer-init": "prompts may be token ids, and return_token_ids gives the answer's",
    "--uds": "--host and --port are where it listens; put a proxy before it for a Unix socket",
    "--kv-sharing-fast-prefill": "prompts are computed by all layers",
    **dict.fromkeys(("--data-parallel-multi-port-external-lb", "-dpm", "--data-parallel-supervisor-port"), _PER_RANK),
    **dict.fromkeys(("--dp-supervisor-probe-interval-s", "--dp-supervisor-probe-timeout-s"), _PER_RANK),
    "--dp-supervisor-probe-failure-threshold": _PER_RANK,
    "--data-parallel-rpc-port": "nodes meet at --listen and --join",
    "-dpp": "nodes meet at --listen and --join",
    "--scheduler-cls": _CLASSES,
    **dict.fromkeys(("--enable-mm-embeds", "--enable-mm-processor-stats"), _IMAGES_ALONE),
    **dict.fromkeys(("--interleave-mm-strings", "--video-pruning-rate"), _IMAGES_ALONE),
    **dict.fromkeys(("--mm-encoder-only", "--mm-encoder-attn-backend"), _ENCODERS),
    **dict.fromkeys(("--mm-encoder-attn-dtype", "--mm-encoder-fp8-scale-path"), _ENCODERS),
    **dict.fromkeys(("--mm-encoder-fp8-scale-save-path", "--mm-encoder-fp8-scale-save-margin"), _ENCODERS),
    "--middleware": "put a proxy before it",
    "--hf-config-path": _CONFIG,
    "--disable-sliding-window": _CONFIG,
    "--model-loader-extra-config": "--load-format is the setting",
    "--logits-processor-pattern": "logit_bias and penalties are what a request can ask for",
    "--attention-config": "--attention-backend is the setting",
    "--additional-config": "each setting is a flag of its own (--help)",
    "--no-enable-prompt-tokens-details": "usage always has prompt_tokens_details",
    "--no-enable-request-id-headers": "answers always have X-Request-Id",
    "--scheduler-reserve-full-isl": "a prompt begins when its first step's tokens fit; --max-num-seqs bounds how many run",
    "--log-error-stack": "errors are told in one line",
    "--h11-max-incomplete-event-size": "--max-body-bytes bounds bodies; heads have a limit of their own",
    "--h11-max-header-count": "heads have a limit of their own",
    "--ray-workers-use-nsight": "there is no Ray; --profiler-dir writes traces",
    "--quantization-config": _QUANTISED,
    "--model-class-overrides": _CLASSES,
    "--model-weights": "weights lie in the model's folder",
    "--override-attention-dtype": "--dtype is the setting for all layers",
    "--enable-return-routed-experts": "answers do not tell which experts were chosen",
    "--enable-elastic-ep": "the number of ranks that share experts is fixed",
    **dict.fromkeys(("--mamba-config", "--mamba-backend", "--enable-mamba-cache-stochastic-rounding"), _STATES),
    **dict.fromkeys(("--mamba-cache-philox-rounds", "--gdn-prefill-backend"), _STATES),
    "--distributed-timeout-seconds": _TIMEOUTS,
    "--cpu-distributed-timeout-seconds": _TIMEOUTS,
    "--kv-cache-dtype-skip-layers": "--kv-cache-dtype is for all layers",
    "--prefix-match-unit": "prefixes are matched in whole KV blocks (--block-size)",
    "--offload-params": _OFFLOAD,
    "--enable-logging-iteration-details": _STEPS,
    "--jit-monitor-mode": _COMPILING,
    "--jit-monitor-verbose": _COMPILING,
    "--max-num-scheduled-tokens": "--max-num-batched-tokens is the setting",
    "--ir-op-priority": _CHOSEN,
    "--kernel-config": _CHOSEN,
    "--enable-bf16x3-router-gemm": _CHOSEN,
    "--diffusion-config": "generation goes token by token",
    "-dc": "generation goes token by token",
    "--ec-transfer-config": "what encoders compute stays in the worker that computed it; no other mesh can have it",
    "--prefill-only": _ONE_MESH,
    "--decode-only": _ONE_MESH,
    "--quantization-param-path": "scales of an FP8 KV cache are the checkpoint's, or --calculate-kv-scales finds them",
    "-ac": "--attention-backend is the setting",
    "--fail-on-environ-validation": "VLLM_ variables without effect are named at the start, and do not end it",
}

_LEVELS = (
    "nothing is compiled (--compile inductor is the setting); CUDA graphs and fused kernels are always there, and --enforce-eager "
    "takes the graphs away"
)
# Flags of ONLY whose reason is said where they are taken, too: a user of vLLM expects something else of them.
SAID = ("--optimization-level", "-O")
# Taken with the values that name what is done anyway; with others refused.
ONLY = {
    "--tokenizer-mode": (("auto", "hf", "fast"), "tokenizer.json is what is read"),
    "--config-format": (("auto", "hf"), "config.json is what is read"),
    "--safetensors-load-strategy": (("auto", "lazy"), "weights are mapped from disk"),
    "--response-role": (("assistant",), "answers are the assistant's"),
    "--mm-processor-cache-type": (("lru", "shm"), _OWN_MEDIA),
    "--distributed-executor-backend": (("mp", "uni"), "the supervisor starts one worker per GPU; other hosts --join"),
    "--data-parallel-backend": (("mp",), "the supervisor starts one scheduler per rank; other hosts --join"),
    "-dpb": (("mp",), "the supervisor starts one scheduler per rank; other hosts --join"),
    "--prefix-caching-hash-algo": (("sha256",), "prefixes are hashed with sha256"),
    "--optimization-level": (("2", "3"), _LEVELS),
    "-O": (("2", "3"), _LEVELS),
    "--uvicorn-log-level": (
        ("info", "debug", "trace"),
        "there is no uvicorn; --log-level is for all processes, --disable-log-requests silences the line per request",
    ),
    **dict.fromkeys(("--decode-context-parallel-size", "-dcp", "-pcp"), (("1",), _CONTEXT_PARALLEL)),
    "--prefill-context-parallel-size": (("1",), _CONTEXT_PARALLEL),
    **dict.fromkeys(("--dcp-kv-cache-interleave-size", "--cp-kv-cache-interleave-size"), (("1",), _CONTEXT_PARALLEL)),
    "--long-prefill-token-threshold": (("0",), _PREFILL),
    "--max-num-partial-prefills": (("1",), _PREFILL),
    "--max-long-partial-prefills": (("1",), _PREFILL),
    "--prefill-schedule-interval": (("1",), "--prefill-pace is the setting"),
    "--watermark": (("0", "0.0"), "no KV blocks are kept free; a preempted request is computed again"),
    "--renderer-num-workers": (("1",), "--detokenizers is how many processes tokenize"),
    "--worker-cls": (("auto",), _CLASSES),
    "--performance-mode": (("balanced",), _PACE),
    "--moe-backend": (("auto",), "kernels are chosen by their tables and by --tune"),
    "--ubatch-size": (("0", "2"), "--enable-dbo halves steps"),
    "--expert-placement-strategy": (("linear",), "each rank has experts that follow one another"),
    "--linear-backend": (("auto",), "kernels are chosen by their tables and by --tune"),
    "--dcp-comm-backend": (("ag_rs",), _CONTEXT_PARALLEL),
    "--offload-backend": (("auto",), _OFFLOAD),
    "--offload-group-size": (("0",), _OFFLOAD),
    "--offload-num-in-group": (("1",), _OFFLOAD),
    "--offload-prefetch-step": (("1",), _OFFLOAD),
    "--mm-encoder-tp-mode": (("weights",), _ENCODERS),
    "--ignore-patterns": (("original/**/*",), "download what you want, and serve its folder"),
    "--disable-access-log-for-endpoints": (
        ("/health", "/ready", "/ping", "/metrics", "/load", "/version", "/v1/models", "/tokenize", "/detokenize"),
        "only generation requests are logged; --disable-log-requests silences them",
    ),
}
