"""The whole configuration as one frozen Struct tree, checked when it is built.

The command line and the TOML file are generated from it: a field's flag is its name with dashes, its description the help
text; `extra` may add a short flag ({"short": "-tp"}) or say that the value is a size ({"bytes": True}: 4G, 512M). The
supervisor hands the resolved tree to every child in memory (JSON); a child reads only that.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from meshlm.protocol.model import ModelSpec

PER_NODE = {"per_node": True}  # of a setting in which the nodes of one mesh may differ


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Which model, and how to read it."""

    model: Annotated[
        str, Meta(description="folder, .gguf file or hub name; empty: SmolLM2-135M-Instruct", extra=PER_NODE)
    ] = ""
    served_model_name: Annotated[
        tuple[str, ...], Meta(description="names that clients use; the first is shown", extra=PER_NODE)
    ] = ()
    tokenizer: Annotated[
        str, Meta(description="folder or file of the tokenizer, where it is not the model's own", extra=PER_NODE)
    ] = ""
    chat_template: Annotated[
        str,
        Meta(
            description="name of one of the model's templates, a file with one, or the template itself", extra=PER_NODE
        ),
    ] = ""
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(
            description="what templates get for a message's content: text, a list of parts, or what they are made for"
        ),
    ] = "auto"
    generation_config: Annotated[
        str,
        Meta(
            description="'auto': sampling defaults from the model's generation_config.json; 'meshlm' (or 'vllm'): none; "
            "or a folder with that file",
            extra=PER_NODE,
        ),
    ] = "auto"
    override_generation_config: Annotated[
        str, Meta(description='JSON object over those defaults: {"temperature": 0.5}', extra=PER_NODE)
    ] = ""
    revision: Annotated[str, Meta(description="of a hub name: branch, tag or commit", extra=PER_NODE)] = ""
    download_dir: Annotated[str, Meta(description="where hub names are downloaded to", extra=PER_NODE)] = ""
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16", "half", "float"],
        Meta(description="of weights and activations; auto: the model's on a GPU, float32 on the CPU"),
    ] = "auto"
    max_model_len: (
        Annotated[
            int, Meta(ge=1, description="context length, prompt + output; default: the model's", extra={"count": True})
        ]
        | None
    ) = None
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "pt", "dummy"], Meta(description="format of the weights; dummy: random")
    ] = "auto"
    quantization: Annotated[
        str,
        Meta(description="how the weights must be quantised; empty: as the model's files say", extra={"short": "-q"}),
    ] = ""
    seed: (
        Annotated[int, Meta(ge=0, description="of dummy weights, and of the seeds that requests without one get")]
        | None
    ) = None


class CacheConfig(Struct, frozen=True, kw_only=True):
    """KV memory."""

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
    kv_cache_dtype: Annotated[Literal["auto", "fp8"], Meta(description="of the KV cache; auto: the model's")] = "auto"
    enable_prefix_caching: Annotated[bool, Meta(description="reuse the KV blocks of equal prefixes")] = True
    prefix_caching_per_key: Annotated[
        bool,
        Meta(description="with several API keys: reuse those of the same key only, so that no key learns of another's"),
    ] = True


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """Batching."""

    max_num_seqs: (
        Annotated[int, Meta(ge=1, le=8192, description="requests in one step at most (GPU 1024, CPU 64)")] | None
    ) = None
    max_num_batched_tokens: (
        Annotated[int, Meta(ge=1, description="token budget of one step (GPU 8192, CPU 1024)", extra={"count": True})]
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


class WorkerConfig(Struct, frozen=True, kw_only=True):
    """The data plane."""

    device: Annotated[Literal["auto", "cpu", "cuda", "fake"], Meta(description="where the model runs")] = "auto"
    enforce_eager: Annotated[bool, Meta(description="no CUDA graphs")] = False
    cudagraph_mode: Annotated[
        Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"],
        Meta(description="CUDA graph mode"),
    ] = "FULL"
    cudagraph_capture_sizes: Annotated[
        tuple[int, ...], Meta(description="batch sizes to capture; default by max-num-seqs")
    ] = ()
    cudagraph_capture: Annotated[
        Literal["behind", "start"],
        Meta(
            description="behind: a few CUDA graphs before the worker is ready, the others in idle time; start: all before"
        ),
    ] = "behind"
    compile: Annotated[
        Literal["none", "inductor"],
        Meta(description="inductor: torch.compile what stands between attention calls, instead of our fused kernels"),
    ] = "none"
    attention_backend: Annotated[
        str, Meta(description="attention implementation: auto, cpu, torch, triton, or a plug-in's name")
    ] = "auto"
    cpu_threads: Annotated[int, Meta(ge=0, description="threads of a CPU worker; 0: one per core", extra=PER_NODE)] = 0
    profiler_dir: Annotated[
        str,
        Meta(
            description="directory for profiler traces; with it POST /start_profile and /stop_profile work",
            extra=PER_NODE,
        ),
    ] = ""
    fake_step_ms: Annotated[float, Meta(ge=0, description="device fake: length of a step", extra=PER_NODE)] = 0.0
    fake_drafts: Annotated[
        int, Meta(ge=0, le=64, description="device fake: tokens that it drafts in a step, at most", extra=PER_NODE)
    ] = 0
    fake_lockstep: Annotated[
        bool, Meta(description="device fake: data-parallel ranks step together, as those that share experts do")
    ] = False


class ParallelConfig(Struct, frozen=True, kw_only=True):
    """How many ranks."""

    data_parallel_size: Annotated[int, Meta(ge=1, le=1024, description="schedulers", extra={"short": "-dp"})] = 1
    tensor_parallel_size: Annotated[
        int, Meta(ge=1, le=64, description="GPUs that share each layer", extra={"short": "-tp"})
    ] = 1
    pipeline_parallel_size: Annotated[
        int, Meta(ge=1, le=64, description="stages that share the layers", extra={"short": "-pp"})
    ] = 1
    disable_custom_all_reduce: Annotated[
        bool, Meta(description="sums of tensor-parallel ranks go by NCCL alone, not through the memory of peers")
    ] = False
    data_parallel_size_local: (
        Annotated[int, Meta(ge=0, le=1024, description="schedulers of this node; default: the rest", extra=PER_NODE)]
        | None
    ) = None
    data_parallel_start_rank: Annotated[
        int, Meta(ge=0, le=1023, description="first rank of this node", extra=PER_NODE)
    ] = 0
    nnodes: Annotated[int, Meta(ge=1, le=1024, description="nodes over which all workers are spread evenly")] = 1
    node_rank: Annotated[int, Meta(ge=0, le=1023, description="which of --nnodes this is", extra=PER_NODE)] = 0
    master_addr: Annotated[
        str, Meta(description="address of torch.distributed's store; default: the head's", extra=PER_NODE)
    ] = ""
    master_port: Annotated[int, Meta(ge=1, le=65535, description="its port; rank R uses this + R")] = 29501

    dp_routing: Annotated[
        Literal["cache-aware", "least-loaded", "round-robin"], Meta(description="which rank takes a request")
    ] = "cache-aware"
    data_parallel_hybrid_lb: Annotated[
        bool, Meta(description="this node serves its own ranks; an outer balancer is over the nodes")
    ] = False
    data_parallel_external_lb: Annotated[
        bool, Meta(description="this mesh is one rank of several behind an outer balancer; needs --data-parallel-rank")
    ] = False
    data_parallel_rank: (
        Annotated[
            int,
            Meta(ge=0, le=1023, description="which rank this mesh is; implies external-lb", extra={"short": "-dpn"}),
        ]
        | None
    ) = None

    @property
    def workers_per_rank(self) -> int:
        """Workers of one scheduler."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def nodes_of(self, rank: int) -> range:
        """Of --nnodes, those that have workers of dp rank `rank`: all workers are spread evenly."""
        here = self.data_parallel_size * self.workers_per_rank // self.nnodes
        first = rank * self.workers_per_rank
        return range(first // here, (first + self.workers_per_rank - 1) // here + 1)


class ServerConfig(Struct, frozen=True, kw_only=True):
    """HTTP."""

    host: Annotated[str, Meta(description="address to listen on")] = "0.0.0.0"
    port: Annotated[int, Meta(ge=1, le=65535, description="port to listen on")] = 8000
    api_key: Annotated[
        tuple[str, ...], Meta(description="clients must send one of these as Bearer token", extra={"repeat": True})
    ] = ()
    frontends: Annotated[
        int,
        Meta(ge=0, le=256, description="HTTP processes; 0: one for each rank, as far as there are 8 cores for each"),
    ] = 0
    detokenizers: Annotated[int, Meta(ge=0, le=256, description="text processes; 0: as many by the same rule")] = 0
    max_body_bytes: Annotated[int, Meta(ge=1024, description="larger bodies get 413", extra={"bytes": True})] = 32 << 20
    max_incoming_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="bodies that a frontend is reading at once, beyond which 503",
            extra={"bytes": True},
        ),
    ] = 256 << 20
    max_unsent_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="answers that a frontend's clients have not taken; beyond it, and a quarter for one, they are cut off",
            extra={"bytes": True},
        ),
    ] = 256 << 20
    http_header_timeout: Annotated[
        float, Meta(gt=0, description="seconds that a request's head may take to come; then 408")
    ] = 60.0
    http_body_timeout: Annotated[
        float, Meta(gt=0, description="seconds that a request's body may be silent before its end; then 408")
    ] = 60.0
    http_send_timeout: Annotated[
        float, Meta(gt=0, description="seconds in which a client must take some of its answer, or be cut off")
    ] = 60.0
    max_concurrent_requests: Annotated[
        int, Meta(ge=1, description="open requests per frontend beyond which it answers 503")
    ] = 8192
    stream_interval: Annotated[
        int, Meta(ge=1, description="tokens of a chunk of a stream; the first token and the end leave at once")
    ] = 1
    max_concurrent_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description="bytes of open requests (prompts, times their choices) per frontend beyond which it answers 503",
            extra={"bytes": True},
        ),
    ] = 256 << 20
    max_logprobs: Annotated[int, Meta(ge=-1, description="largest logprobs / top_logprobs; -1: the vocabulary")] = 20
    return_tokens_as_token_ids: Annotated[
        bool, Meta(description="logprobs name tokens 'token_id:5', unless a request says otherwise")
    ] = False
    enable_force_include_usage: Annotated[bool, Meta(description="streams tell their usage, asked for or not")] = False
    fingerprint_mode: Annotated[
        Literal["full", "hash", "custom", "none"],
        Meta(description="what system_fingerprint of answers tells; hash: not how the model is divided"),
    ] = "full"
    fingerprint_value: Annotated[str, Meta(description="system_fingerprint with --fingerprint-mode custom")] = ""
    trust_request_chat_template: Annotated[
        bool, Meta(description="requests may bring a chat_template, which can keep a detokenizer busy for ever")
    ] = False
    enable_auto_tool_choice: Annotated[
        bool, Meta(description="the model may call a request's tools; needs --tool-call-parser")
    ] = False
    tool_call_parser: Annotated[
        Literal["", "hermes", "llama3_json"],
        Meta(description="how the model writes tool calls; hermes: Qwen's models too"),
    ] = ""
    reasoning_parser: Annotated[
        Literal["", "deepseek_r1", "qwen3"],
        Meta(description="tell what stands before </think> from the answer; qwen3: unless enable_thinking is false"),
    ] = ""
    disable_fastapi_docs: Annotated[bool, Meta(description="no /openapi.json, /docs and /redoc (vLLM's name)")] = False
    server_dev_mode: Annotated[
        bool, Meta(description="POST /reset_prefix_cache is there for every client (VLLM_SERVER_DEV_MODE)")
    ] = False
    default_chat_template_kwargs: Annotated[
        str, Meta(description="JSON object for the chat template, under a request's chat_template_kwargs")
    ] = ""
    allowed_origins: Annotated[tuple[str, ...], Meta(description="CORS origins", extra={"json": True})] = ("*",)
    allowed_methods: Annotated[tuple[str, ...], Meta(description="CORS methods", extra={"json": True})] = ("*",)
    allowed_headers: Annotated[tuple[str, ...], Meta(description="CORS headers", extra={"json": True})] = ("*",)
    allow_credentials: Annotated[bool, Meta(description="CORS: cookies and the like")] = False
    retry_window: Annotated[
        float,
        Meta(ge=0, description="seconds that an answer with an Idempotency-Key waits for its client to come back"),
    ] = 60.0
    disable_log_requests: Annotated[bool, Meta(description="no log line per request")] = False


class NetworkConfig(Struct, frozen=True, kw_only=True):
    """Meshes of several nodes."""

    listen: Annotated[
        str,
        Meta(
            description="tcp://HOST:PORT where other nodes may join; HOST: of the private interface, the only one used"
        ),
    ] = ""
    headless: Annotated[bool, Meta(description="run only schedulers and workers, for the head that --join names")] = (
        False
    )
    join: Annotated[str, Meta(description="tcp://HOST:PORT, the head's --listen")] = ""
    key_file: Annotated[str, Meta(description="the mesh's keys, from `meshlm keys`; tcp needs them")] = ""
    mesh_port_range: Annotated[str, Meta(description="FIRST-LAST: ports of the other tcp sockets; default: any")] = ""
    advertise_host: Annotated[
        str, Meta(description="address by which other nodes reach this one, where it is not its interface's (NAT)")
    ] = ""
    peer_timeout: Annotated[
        float, Meta(ge=0.1, le=3600, description="seconds of silence after which a process of another node is lost")
    ] = 3.0


class RunConfig(Struct, frozen=True, kw_only=True):
    """The process group."""

    run_dir: Annotated[str, Meta(description="directory for sockets and state, mode 0700; default: one per port")] = ""
    drain_timeout: Annotated[float, Meta(ge=0, description="seconds that SIGTERM lets running requests finish")] = 30.0
    startup_timeout: Annotated[float, Meta(gt=0, description="seconds until all processes must be ready")] = 600.0
    max_restarts: Annotated[
        int,
        Meta(
            ge=0,
            description="restarts of one process within a minute before all is given up (a request that kills what has it is "
            "given up before that)",
        ),
    ] = 5
    stall_timeout: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds of silence until a process is replaced (six times that while it starts); 0: never",
        ),
    ] = 10.0
    step_timeout: Annotated[
        float, Meta(ge=0, description="seconds that one step may take until its worker is replaced; 0: any time")
    ] = 120.0
    standby_roles: Annotated[
        tuple[Literal["none", "frontend", "detokenizer", "coordinator", "scheduler", "worker"], ...],
        Meta(description="roles of which a loaded process waits to take the place of one that dies", extra=PER_NODE),
    ] = ("detokenizer", "coordinator")
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="of the processes' logs")] = (
        "info"
    )
    log_format: Annotated[Literal["console", "json"], Meta(description="of the processes' logs")] = "console"


class MeshConfig(Struct, frozen=True, kw_only=True):
    """What every process reads at start."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    worker: WorkerConfig = WorkerConfig()
    parallel: ParallelConfig = ParallelConfig()
    server: ServerConfig = ServerConfig()
    network: NetworkConfig = NetworkConfig()
    run: RunConfig = RunConfig()
    resolved: "Resolved | None" = None  # set by the supervisor before any child starts
    node: "Node | None" = None  # likewise; None: one node, no tcp

    @property
    def lockstep(self) -> bool:
        """Whether the data-parallel ranks step together. Those of dense models never do."""
        return self.worker.fake_lockstep


class Node(Struct, frozen=True, kw_only=True):
    """Where this supervisor's processes are in a mesh of several nodes: never a flag."""

    index: int  # its supervisor is supervisor/index; 0 is the head
    id: str  # of host and run directory: processes with the same one reach each other by ipc
    address: str  # numeric, of the private interface: tcp sockets and torch.distributed's store bind to it alone
    interface: str = ""  # the name of the one that has this address, for gloo and NCCL; empty: none was found
    head: str = ""  # tcp://HOST:PORT of the head's supervisor; its coordinator listens on PORT + 1. Empty on the head
    host: str = ""  # the host's name, for people
    ranks: tuple[int, int] = (0, 0)  # first and number of its schedulers
    workers: tuple[int, int] = (0, 0)


class Resolved(Struct, frozen=True, kw_only=True):
    """What the supervisor found out once, so that no child has to: never a flag."""

    spec: ModelSpec
    model_path: str  # folder or .gguf file
    tokenizer_path: str  # folder, tokenizer.json or .gguf file
    chat_templates: dict[str, str]  # Jinja sources by name; none if the model has none
    served_names: tuple[str, ...]
    generation_defaults: dict[str, float | int]  # temperature, top_p, top_k, min_p, repetition_penalty, max_tokens
    max_output_tokens: int | None = None  # that no request passes, by a generation config that the user gave
    load_format: Literal["safetensors", "gguf", "pt", "dummy"]
    device: Literal["cpu", "cuda", "fake"]
    dtype: Literal["float32", "float16", "bfloat16"]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    digest: str  # of everything above and the flags: names a run's configuration in logs
