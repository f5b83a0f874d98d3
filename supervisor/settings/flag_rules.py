"""Flags that do not go together, or not with this model or device: the tables of one mesh. Read by resolve.py.

A worker says the rest: what a GPU's kernels cannot do, or get wrong.
"""

import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.server import STORE_OFF
from meshlm.protocol.model import ModelSpec
from meshlm.runtime import io_processors, platforms, plugins
from meshlm.runtime.attention_packages import PACKAGES
from meshlm.runtime.extras import how_to_install
from meshlm.runtime.platforms import Platform
from meshlm.runtime.process import host_memory
from meshlm.supervisor.settings import placement
from meshlm.supervisor.settings.rules import Rules

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
EXPORTERS = {"grpc": "grpc", "http/protobuf": "http"}
COMMUNICATORS = {"cpu": "torch_gloo", "cuda": "torch_nccl"}
EP = "--enable-expert-parallel"
BACKENDS = ("auto", "cpu", "torch", "triton", *PACKAGES)  # of attention; plug-ins add theirs
NO_FP8 = ("cpu", *PACKAGES)  # backends of attention that read a KV cache of the model's dtype


class Facts(NamedTuple):
    """What decides beside the configuration."""

    spec: ModelSpec
    platform: Platform
    load_format: str = "auto"
    compiles: bool = True  # whether the model's family can be compiled

    @property
    def device(self) -> str:
        return self.platform.name


def names(c: MeshConfig) -> Rules:
    """Of a device and a backend of attention, which must be there."""
    backend, known = c.worker.attention_backend, [*BACKENDS, *plugins.names(plugins.BACKENDS, os.environ)]
    yield backend not in known, f"--attention-backend {backend}", f"there are {', '.join(known)}"
    if (package := PACKAGES.get(backend)) is not None:
        missing = package.missing()
        yield missing, f"--attention-backend {package.flag}", missing
    device, devices = c.worker.device, platforms.names()
    yield device not in devices, f"--device {device}", f"there are {', '.join(devices)}"


def logprobs(c: MeshConfig, f: Facts) -> Rules:
    """What cannot be told of tokens. A GPU verifies drafts by lines whose rows only it knows."""
    mode = c.server.logprobs_mode
    drafts = bool(c.speculative.speculative_config) and f.device == "cuda"
    why = "drafts of a GPU are verified by lines that are not processed again; raw_logprobs and raw_logits can be had with them"
    yield drafts and mode.startswith("processed"), f"--logprobs-mode {mode}", why


def processors(c: MeshConfig, *, pools: bool) -> Rules:
    """Of classes of plug-ins. That logits processors can be imported the workers see, whose libraries they need. PluginError."""
    if name := c.server.io_processor_plugin:
        flag, there = f"--io-processor-plugin {name}", plugins.names(plugins.IO_PROCESSORS, os.environ)
        yield not pools, flag, "it is for models of vectors (--runner pooling)"
        why = f"no installed package has it; there are: {', '.join(there) or 'none'}"
        yield not io_processors.known(name, os.environ), flag, why
    for name in c.worker.logits_processors:
        parts = name.replace(":", ".").split(".")
        is_class = len(parts) > 1 and all(map(str.isidentifier, parts))
        yield not is_class, f"--logits-processors {name}", "must be module:Class"


def store(file: str) -> Rules:
    """Of a file of responses, which frontends write."""
    path = Path(file)
    can_be = path.parent.is_dir() and not path.is_dir()
    writes = can_be and os.access(path if path.exists() else path.parent, os.W_OK)
    yield file not in ("", STORE_OFF) and not writes, f"--responses-store {file}", "this file cannot be written"


def recordings(folder: str) -> Rules:
    """Of a folder of recordings, which frontends write."""
    path = Path(folder) if os.path.exists(folder) else Path(folder).parent
    why = "no file can be written there"
    yield folder != "" and not (path.is_dir() and os.access(path, os.W_OK)), f"--record-requests {folder}", why


def server(c: MeshConfig) -> Rules:
    grpc, auto = c.server.grpc, c.server.enable_auto_tool_choice
    yield auto and not c.server.tool_call_parser, "--enable-auto-tool-choice", "needs --tool-call-parser"
    detailed, endpoint = c.observability.collect_detailed_traces, c.observability.otlp_traces_endpoint
    yield detailed and not endpoint, "--collect-detailed-traces", "needs --otlp-traces-endpoint"
    missing = grpc and not importlib.util.find_spec("smg_grpc_proto")
    yield missing, "--grpc", f"its packages are not installed; {how_to_install('grpc')}"
    is_path = re.fullmatch(r"(/[^/?#\s]+)*", c.server.root_path)
    yield not is_path, f"--root-path {c.server.root_path}", "must be like /llm or /a/b, without a slash at its end"
    yield bool(grpc and c.server.root_path), "--root-path", "it is for HTTP, not for --grpc; leave it out"
    metrics = c.server.enable_per_request_metrics
    yield grpc and metrics, "--enable-per-request-metrics", "it is for HTTP, not for --grpc; leave it out"
    drafts = c.speculative.per_request_spec_decode_metrics
    flag = f"--per-request-spec-decode-metrics {drafts}"
    yield grpc and drafts != "none", flag, "it is for HTTP, not for --grpc; leave it out"
    custom = c.server.fingerprint_mode == "custom"
    one_alone = custom != bool(c.server.fingerprint_value)
    yield one_alone, "--fingerprint-value", "goes with --fingerprint-mode custom, and the other way round"


def traces(c: MeshConfig) -> Rules:
    """What --otlp-traces-endpoint needs, told at once and not by a process that dies."""
    endpoint = c.observability.otlp_traces_endpoint
    if not endpoint:
        return
    protocol, flag = os.environ.get(PROTOCOL, "grpc"), f"--otlp-traces-endpoint {endpoint}"
    yield protocol not in EXPORTERS, PROTOCOL, f"{protocol!r} must be one of {', '.join(EXPORTERS)}"
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    is_address = is_url or (protocol == "grpc" and endpoint.rpartition(":")[2].isdecimal())
    yield not is_address, flag, "give a URL, http://HOST:4317 say"
    needed = ("opentelemetry.sdk", f"opentelemetry.exporter.otlp.proto.{EXPORTERS[protocol]}")
    yield not all(map(_is_there, needed)), flag, f"its packages are not installed; {how_to_install('otel')}"


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package that it is in
        return False


def speech(c: MeshConfig, f: Facts, *, pools: bool) -> Rules:
    """Of a model that transcribes audio. pools: the server is to give vectors."""
    if f.spec.audio_encoder is None:
        return
    name, p, kept = f.spec.architecture, c.parallel, c.cache.kv_cache_dtype
    yield pools, "--runner pooling", f"{name} transcribes audio, and gives no vectors; leave it out"
    for flag, size in (("tensor", p.tensor_parallel_size), ("pipeline", p.pipeline_parallel_size)):
        why = f"one worker has all of {name}; use --data-parallel-size for more of them"
        yield size > 1, f"--{flag}-parallel-size {size}", why
    why = f"keys and values of the encoder of {name} are not kept in 8 bits; use auto"
    yield kept != "auto", f"--kv-cache-dtype {kept}", why
    if f.spec.quantization is not None:
        yield True, f"--quantization {f.spec.quantization.method}", f"it is not there for {name}; leave it out"
    yield c.server.grpc, "--grpc", f"its service takes no audio, which {name} needs; leave it out"


def audio(c: MeshConfig) -> Rules:
    """Of frontends that read the audio of a model that transcribes it. Of a resolved configuration."""
    assert c.resolved is not None
    missing = [name for name in ("av", "python_multipart") if not importlib.util.find_spec(name)]
    reads = c.resolved.speech is not None and not c.network.headless
    why = f"packages that read audio are not installed; {how_to_install('audio')}"
    yield reads and bool(missing), c.resolved.spec.architecture, why


def vectors(c: MeshConfig, spec: ModelSpec) -> Rules:
    several, tokens = c.parallel.workers_per_rank > 1, () if spec.head is None else spec.head.token_ids
    beyond = max(tokens, default=-1) >= spec.vocab_size
    yield beyond, "--pooler-config", f"returned_token_ids: the vocabulary has {spec.vocab_size} tokens"
    flags = "--tensor-parallel-size, --pipeline-parallel-size"
    yield spec.encoder_only and several, flags, "one worker has all of an encoder; use --data-parallel-size"
    why = "classifier_from_token and returned_token_ids need the whole output projection in one worker"
    yield bool(tokens and several), "--tensor-parallel-size", why
    if not spec.encoder_only:
        return
    way, blocks, kept = c.worker.compile, c.cache.num_gpu_blocks_override, c.cache.kv_cache_dtype
    yield way != "none", f"--compile {way}", "it is not there for encoders; use none"
    packed = c.model.gguf_weights == "packed"
    yield packed, "--gguf-weights packed", "weights of an encoder are decoded; use auto"
    yield blocks is not None, f"--num-gpu-blocks-override {blocks}", "an encoder has no KV cache; leave it out"
    yield kept != "auto", f"--kv-cache-dtype {kept}", "an encoder has no KV cache; use auto"


def experts(c: MeshConfig, f: Facts) -> Rules:
    """Of a mixture of experts that is spread over ranks."""
    e, p = c.experts, c.parallel
    yield from _balancing(c, f)
    yield e.enable_dbo and not e.enable_expert_parallel, "--enable-dbo", f"it needs {EP}"
    if not e.enable_expert_parallel:
        return
    yield f.spec.moe is None, EP, f"{f.spec.architecture} has no experts; leave it out"
    assert f.spec.moe is not None
    ranks, count = p.data_parallel_size * p.tensor_parallel_size, f.spec.moe.num_experts
    fit = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
    sizes = f"--data-parallel-size {p.data_parallel_size} x --tensor-parallel-size {p.tensor_parallel_size}"
    yield count % ranks, EP, f"{ranks} ranks ({sizes}) do not divide the model's {count} experts; {fit} do"
    alone = e.enable_dbo and p.data_parallel_size == 1
    yield alone, "--enable-dbo", "it needs --data-parallel-size 2 or more; without, no tokens travel"
    outer = p.data_parallel_external_lb or p.data_parallel_hybrid_lb
    yield outer, EP, "the ranks of several meshes behind an outer balancer cannot share experts"
    if not c.lockstep:
        return
    backend, why = "--all2all-backend peer_memory", "it needs GPUs; use allgather_reducescatter or all_to_all"
    yield e.all2all_backend == "peer_memory" and f.device == "cpu", backend, why
    why = "it writes into the memory of GPUs of one host; use allgather_reducescatter or all_to_all"
    yield e.all2all_backend == "peer_memory" and placement.has_others(c), backend, why
    why = "with --data-parallel-size above 1 there is no pipeline; leave out -pp"
    yield p.pipeline_parallel_size > 1, EP, why


def _balancing(c: MeshConfig, f: Facts) -> Rules:
    """Experts that move between ranks."""
    e, p = c.experts, c.parallel
    try:
        eplb = e.eplb
    except msgspec.DecodeError as error:
        yield True, f"--eplb-config {e.eplb_config}", str(error)
        return
    given = e.eplb_config != type(e)().eplb_config
    yield given and not e.enable_eplb, "--eplb-config", "it goes with --enable-eplb"
    if not e.enable_eplb:
        return
    yield not e.enable_expert_parallel, "--enable-eplb", f"it needs {EP}"
    ranks = p.data_parallel_size * p.tensor_parallel_size
    why = "it needs --data-parallel-size or --tensor-parallel-size 2; experts move between ranks"
    yield ranks == 1, "--enable-eplb", why
    spread = p.data_parallel_size == 1 and (p.pipeline_parallel_size > 1 or placement.has_others(c))
    yield spread, "--enable-eplb", "tensor-parallel ranks that move experts are one stage, on one node"
    why = "experts move between two steps, not beside them; leave it out"
    yield eplb.use_async, "--eplb-config use_async", why
    why = f"with --device {f.device} it is torch_gloo on CPUs, torch_nccl on GPUs"
    wrong = eplb.communicator not in (None, COMMUNICATORS.get(f.device))
    yield wrong, f"--eplb-config communicator {eplb.communicator}", why
    redundant = eplb.num_redundant_experts
    flag = f"--eplb-config num_redundant_experts {redundant}"
    yield redundant % ranks, flag, f"{ranks} ranks that share experts do not divide it; give a multiple"
    copies = (p.data_parallel_size if p.data_parallel_size > 1 else p.tensor_parallel_size) - 1
    most = 0 if f.spec.moe is None else f.spec.moe.num_experts * copies
    yield redundant > most, flag, f"with {most} every rank has all experts; give at most that"


def steps(c: MeshConfig, f: Facts) -> Rules:
    """Of how ranks step and load."""
    sharded = f.load_format == "sharded_state" and (c.experts.enable_expert_parallel or c.experts.enable_eplb)
    yield sharded, "--load-format sharded_state", f"leave out {EP} and --enable-eplb"
    flag, fake = "--fake-lockstep", c.worker.fake_lockstep
    yield fake and f.device != "fake", flag, "it needs --device fake"
    yield fake and c.parallel.pipeline_parallel_size > 1, flag, "it needs no pipeline"


def caches(c: MeshConfig, f: Facts) -> Rules:
    """Of keys and values in 8 bits."""
    name, wanted = f.spec.architecture, c.cache.kv_cache_dtype
    flag, narrow = f"--kv-cache-dtype {wanted}", wanted != "auto"
    why = f"--device {f.device} keeps no keys and values in 8 bits; use auto"
    yield narrow and not f.platform.stores_fp8, flag, why
    yield narrow and f.spec.mla is not None, flag, f"the latents of {name} are not kept in 8 bits; use auto"
    flag, scales = "--calculate-kv-scales", c.cache.calculate_kv_scales
    yield scales and not narrow, flag, "it needs --kv-cache-dtype fp8 or fp8_e5m2"
    states = scales and f.spec.state is not None
    yield states, flag, f"it is not there for models with recurrent states ({name})"
    why = "experts of other ranks cannot be asked before the first step; take a checkpoint with scales, or leave it out"
    yield scales and c.lockstep, flag, why


def states(c: MeshConfig, spec: ModelSpec) -> Rules:
    cache = c.cache
    for flag, value, plain in (
        ("--mamba-cache-mode", cache.mamba_cache_mode, ("auto", "none")),
        ("--mamba-block-size", cache.mamba_block_size, (None,)),
        ("--mamba-cache-dtype", cache.mamba_cache_dtype, ("auto",)),
        ("--mamba-ssm-cache-dtype", cache.mamba_ssm_cache_dtype, ("auto",)),
    ):
        given, checkpoints = value not in plain, not flag.endswith("dtype")
        why = f"{spec.architecture} has no state-space layers; leave it out"
        yield given and spec.state is None, f"{flag} {value}", why
        needed = given and checkpoints and not cache.enable_prefix_caching
        yield needed, f"{flag} {value}", "it needs --enable-prefix-caching"
    none = bool(cache.mamba_block_size) and cache.mamba_cache_mode == "none"
    flag = f"--mamba-block-size {cache.mamba_block_size}"
    yield none, flag, "there are no checkpoints with --mamba-cache-mode none"


def workers(c: MeshConfig, f: Facts) -> Rules:
    """Of what workers compute with."""
    way, name = c.worker.compile, f.spec.architecture
    flag, compiled = f"--compile {way}", way != "none"
    yield compiled and not f.platform.runs_inductor, flag, f"it needs a GPU, not --device {f.device}; use none"
    several = compiled and c.parallel.workers_per_rank > 1
    yield several, flag, "it needs --tensor-parallel-size 1 and --pipeline-parallel-size 1; use none"
    yield compiled and not f.compiles, flag, f"it is not there for {name}; use none"
    copy, why = c.model.decoded_copy, f"it is for a GPU, not for --device {f.device}; leave it out"
    yield copy != "auto" and f.device != "cuda", f"--decoded-copy {copy}", why
    yield from _offload(c, f)
    why = f"it is for products on a CPU, not for --device {f.device}; leave it out"
    yield c.model.cpu_exact and f.device != "cpu", "--cpu-exact", why
    packed = compiled and f.load_format == "gguf" and c.model.gguf_weights != "decoded"
    yield packed, flag, "it needs --gguf-weights decoded for a .gguf file"
    flag, ranges = "--profile-layers", c.worker.profile_layers  # layers that the host launches one after the other
    why = f"it needs a GPU, not --device {f.device}; --profiler-dir takes traces"
    yield ranges and f.device != "cuda", flag, why
    yield ranges and compiled, flag, f"--compile {way} runs no layers; use --compile none"
    why = "with --enable-dbo halves of a step take turns within layers; leave one out"
    yield ranges and c.experts.enable_dbo, flag, why
    ids, why = c.worker.device_ids, f"it is for GPUs, not for --device {f.device}; leave it out"
    yield bool(ids) and f.device != "cuda", f"--device-ids {ids}", why


def _offload(c: MeshConfig, f: Facts) -> Rules:
    """Of weights that stay on the host."""
    wanted, names = c.model.cpu_offload_gb, "--cpu-offload-params"
    yield (
        c.model.cpu_offload_params and not wanted,
        names,
        "it says which weights --cpu-offload-gb leaves on the host; give both",
    )
    if not wanted:
        return
    flag = f"--cpu-offload-gb {wanted:g}"
    yield (
        f.device != "cuda",
        flag,
        f"it is for GPUs; with --device {f.device} weights are in the host's memory; leave it out",
    )
    others = {
        "--speculative-config": bool(c.speculative.method),
        "--compile": c.worker.compile != "none",
        "--enable-dbo": c.experts.enable_dbo,
        "--enable-expert-parallel": c.experts.enable_expert_parallel,
        "--enable-eplb": c.experts.enable_eplb,
        "--enable-sleep-mode": c.worker.enable_sleep_mode,
        "--deterministic": c.worker.deterministic,
        "--model-impl transformers": f.spec.transformers is not None,
    }
    for other, is_there in others.items():
        yield is_there, flag, f"with {other} weights stay on the GPU; leave one out"
    free = host_memory.available() / 2**30
    why = f"this machine has {free:.1f} GiB left for the weights of {c.parallel.workers_per_rank} workers; give less"
    yield wanted * c.parallel.workers_per_rank > free, flag, why


def attention(c: MeshConfig, spec: ModelSpec, device: str, dtype: str) -> Rules:
    """Of a backend that is asked for by name, as far as that is known before a worker has a GPU."""
    wanted, kept = c.worker.attention_backend, c.cache.kv_cache_dtype
    if wanted not in ("cpu", "torch", "triton", *PACKAGES) or device not in ("cpu", "cuda"):
        return
    flag, gpu, package = f"--attention-backend {wanted}", wanted in ("triton", *PACKAGES), PACKAGES.get(wanted)
    yield spec.encoder_only and wanted != "torch", flag, "an encoder has no KV cache; use auto"
    yield wanted == "cpu" and device != "cpu", flag, "it computes on the CPU; use auto"
    yield wanted == "cpu" and dtype != "float32", flag, "it computes in float32; use auto"
    yield gpu and device != "cuda", flag, "it needs a CUDA device; use auto"
    why = "it computes in --dtype float16 or bfloat16, not float32; use auto"
    yield gpu and dtype == "float32", flag, why
    latent = package is not None and spec.mla is not None
    yield latent, flag, "it has no multi-head latent attention here; use auto"
    if package is not None:
        sizes = ", ".join(map(str, package.head_dims))
        why = f"it is used for heads of {sizes} numbers, this model has {spec.head_dim}; use auto"
        yield spec.head_dim not in package.head_dims, flag, why
    why = f"the attention backend {wanted} cannot read it; use auto"
    yield kept != "auto" and wanted in NO_FP8, f"--kv-cache-dtype {kept}", why
