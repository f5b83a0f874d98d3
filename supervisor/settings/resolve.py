"""What must be known before any process starts, found out once: model files, limits, device, names.

Torch is not imported here: `meshlm serve` must answer a wrong flag at once.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import replace

from meshlm.architectures.family import Family, Serves
from meshlm.architectures.registry import family_of
from meshlm.protocol.config import MeshConfig, Resolved, ServerConfig
from meshlm.protocol.config.model import AUTO_LEN
from meshlm.runtime import logits_processors, platforms, plugins
from meshlm.runtime.errors import ModelFilesError, RequestError
from meshlm.runtime.mesh.messages import check_template_kwargs
from meshlm.runtime.model_files import generation_config, model_files
from meshlm.runtime.model_files.digest import digest_of
from meshlm.runtime.parsers import registry
from meshlm.runtime.platforms import Platform
from meshlm.runtime.process import numa, streams
from meshlm.supervisor.errors import ContextDoesNotFit, StartError, UsageError, raised_as
from meshlm.supervisor.settings import (
    adapters,
    compilation,
    determinism,
    flag_rules,
    kv_events,
    kv_transfer,
    media,
    notes,
    parallel,
    placement,
    quantization,
    speculative,
    weight_transfer,
)
from meshlm.supervisor.settings.drafter import with_drafter
from meshlm.supervisor.settings.rules import check
from meshlm.supervisor.settings.vectors import head_tokens, pooling_of

Dtype = Literal["float32", "float16", "bfloat16"]
DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def resolve(config: MeshConfig, at_most: int | None = None) -> MeshConfig:
    """The same tree with `resolved` set. UsageError for a wrong flag or file. at_most: of --max-model-len auto, tokens that fit."""
    config = compilation.settled(placement.settled(config))
    for section in (speculative, kv_transfer, kv_events, weight_transfer):
        config = section.settled(config)
    config, said = compilation.without_compiler(config)
    files, generation = _read_files(config)
    files, blind = media.settled(config, files)
    family = family_of(files.spec.architecture)
    assert family is not None  # its files were read with it
    if family.serves is Serves.DRAFTS:
        raise UsageError(f"{files.path}: {family.architecture} drafts for another; it is a model of {speculative.FLAG}")
    with raised_as(UsageError, plugins.PluginError):
        platform = _platform(config.worker.device)
    pooling = pooling_of(config, files)
    pools = pooling is not None
    config = replace(config, server=_with_parsers(config.server, family, pools=pools))
    facts = flag_rules.Facts(files.spec, platform)
    check(flag_rules.speech(config, facts, pools=pools))
    for table in (speculative, kv_transfer, kv_events, adapters, weight_transfer, media):
        check(table.rules(config, facts, pools=pools))
    _check_flags(config, files, platform, family)
    with raised_as(UsageError, plugins.PluginError):
        check(flag_rules.processors(config, pools=pools))
        processors = logits_processors.names(config.worker.logits_processors, os.environ)
    limit = files.spec.max_position_embeddings
    longest = min(limit, pooling.max_tokens if pooling and pooling.max_tokens else limit)
    max_model_len = _context_length(config, longest if at_most is None else min(longest, at_most))
    if max_model_len > limit:
        raise UsageError(f"--max-model-len {max_model_len}: the model's context is {limit}; give at most that")
    said += [*blind, *notes.of_rotation(files.spec, max_model_len)]
    max_num_seqs = config.scheduler.max_num_seqs or platform.max_num_seqs
    budget = _token_budget(config, platform, max_num_seqs, max_model_len, whole=files.spec.encoder_only)
    said += [*compilation.notes(config, platform.name), *compilation.check_sizes(config.worker, max_num_seqs, budget)]
    said += notes.of_halves(config, max_num_seqs, budget)
    said += notes.of_drafting_layers(config, files.spec)
    said += notes.of_idle(config, notes.Facts(platform.name, files.speech is not None, files.spec.media))
    for note in (*said, *files.notes, *generation.notes):
        print(f"meshlm: {note}", file=sys.stderr)
    dtype = _dtype(config, platform, files.spec.dtype, family)
    check(flag_rules.attention(config, files.spec, platform.name, dtype))
    served_names = config.model.served_model_name or (files.name,)
    resolved = Resolved(
        spec=files.spec,
        model_path=str(files.path),
        weights_url=files.weights_url,
        weights_digest=_weights_digest(files),
        tokenizer_path=str(files.tokenizer_path),
        chat_templates=files.chat_templates,
        served_names=served_names,
        adapters=adapters.read(config, facts, served_names),
        generation_defaults=generation.defaults,
        max_output_tokens=generation.max_output_tokens,
        load_format=files.load_format,
        device=platform.name,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        eos_token_ids=generation.eos_token_ids,
        num_speculative_tokens=speculative.most(config, platform.name),
        speech=files.speech,
        pooling=pooling,
        logits_processors=processors,
        general_plugins=bool(plugins.names(plugins.GENERAL, os.environ)),
        stat_loggers=bool(plugins.names(plugins.STAT_LOGGERS, os.environ)),
        transfers_kv=config.kv_transfer.asks_by_request,
        kv_remote_hosts=None if (transfer := config.kv_transfer.transfer) is None else transfer.remote_hosts,
        digest="",
    )
    check(determinism.rules(config, resolved, family))
    resolved = with_drafter(config, resolved)
    config = kv_transfer.with_fingerprint(replace(config, resolved=resolved))
    digest = hashlib.sha256(msgspec.json.encode(config)).hexdigest()[:12]
    return replace(config, resolved=replace(resolved, digest=digest))


def for_mesh(config: MeshConfig, at_most: int | None = None) -> MeshConfig:
    """The same for a mesh, whose detokenizers need a tokenizer; what is wrong with it they say, who read it."""
    config = resolve(config, at_most)
    path = Path(config.require_resolved().tokenizer_path)
    if config.network.headless:
        return config
    folder = path if path.is_dir() else path.parent
    if path.suffix != ".gguf" and not (path / "tokenizer.json" if path.is_dir() else path).is_file():
        raise UsageError(f"{folder}: no tokenizer.json there; give a folder or file that has one with --tokenizer")
    return config


def _read_files(config: MeshConfig) -> tuple[model_files.ModelFiles, generation_config.GenerationConfig]:
    """The model's files and its generation config, with plug-ins known before. UsageError for what cannot be read."""
    with raised_as(UsageError, ModelFilesError, plugins.PluginError, registry.ParserError):
        plugins.check_names(os.environ)
        plugins.run_general(os.environ)
        plugins.load_descriptions(os.environ)
        _check_parsers(config.server)
        _check_structured_outputs(config.server)
        check(flag_rules.names(config))
        files = model_files.resolve_model(config.model, head_tokens(config))
        files = quantization.as_asked(config, files)
        named, overriding = config.model.generation_config, config.model.override_generation_config
        generation = generation_config.chosen(files.generation, named, overriding)
        return files, generation_config.with_eos(generation, files.tokenizer_eos, files.spec.vocab_size)


def _check_flags(config: MeshConfig, files: model_files.ModelFiles, platform: Platform, family: Family) -> None:
    """UsageError for flags that do not fit each other, the device or the model."""
    facts = flag_rules.Facts(files.spec, platform, files.load_format, compiles=family.compiles)
    check(flag_rules.server(config))
    check(flag_rules.traces(config))
    _check_template_kwargs(config.server.default_chat_template_kwargs)
    check(flag_rules.store(config.server.responses_store))
    check(flag_rules.recordings(config.server.record_requests))
    for table in (flag_rules.experts, flag_rules.steps, flag_rules.caches, flag_rules.logprobs):
        check(table(config, facts))
    check(flag_rules.states(config, files.spec))
    here, whole = len(placement.local_ranks(config)[1]), config.experts.enable_expert_parallel
    with raised_as(UsageError, numa.NumaError, ValueError):
        numa.check(config, here)
        check(flag_rules.workers(config, facts))
        devices = platforms.with_devices(config.worker.device_ids, os.environ)
    parallel.check(config.parallel, files.spec, platform.name, here, whole_experts=whole, environment=devices)


def _check_parsers(server: ServerConfig) -> None:
    """PluginError or ParserError for parsers that are not there."""
    registry.load(os.environ, server.tool_parser_plugin, server.reasoning_parser_plugin)
    if server.tool_call_parser:
        registry.tool_parser(server.tool_call_parser)
    if server.reasoning_parser:
        registry.reasoning_parser(server.reasoning_parser)


def _with_parsers(server: ServerConfig, family: Family, *, pools: bool) -> ServerConfig:
    """With the parsers that answers of this family need, where no other is asked for. UsageError for two that do not go together."""
    calls, reasoning = family.parsers
    if calls and not pools and server.tool_call_parser in ("", calls) and server.reasoning_parser in ("", reasoning):
        parsers = {"tool_call_parser": calls, "reasoning_parser": reasoning}
        server = replace(server, **parsers, enable_auto_tool_choice=True)
    with raised_as(UsageError, registry.ParserError):
        registry.check_pair(server.tool_call_parser, server.reasoning_parser)
    return server


def _check_structured_outputs(server: ServerConfig) -> None:
    try:
        assert server.structured_outputs
    except msgspec.DecodeError as error:
        hint = "; --reasoning-parser is the setting" if "reasoning_parser" in str(error) else ""
        raise UsageError(f"--structured-outputs-config {server.structured_outputs_config}: {error}{hint}") from None


def _check_template_kwargs(text: str) -> None:
    try:
        check_template_kwargs(msgspec.json.decode(text or "{}", type=dict[str, object]))
    except msgspec.MsgspecError as error:
        raise UsageError(f"--default-chat-template-kwargs: {error}; a JSON object is expected") from None
    except RequestError as error:
        raise UsageError(f"--default-{error.message.replace('_', '-', 2)}") from None


def _context_length(config: MeshConfig, usual: int) -> int:
    wanted, parallel = config.model.max_model_len, config.parallel
    if wanted == 0:
        raise UsageError("--max-model-len 0: must be at least 1, or auto")
    if wanted != AUTO_LEN:
        return wanted or usual
    if config.network.headless or config.network.listen or parallel.nnodes > 1:
        raise UsageError("--max-model-len auto: the nodes of a mesh need a number, the same for all")
    return usual


def _token_budget(config: MeshConfig, platform: Platform, max_num_seqs: int, max_model_len: int, *, whole: bool) -> int:
    """whole: prompts are computed in one step each, as encoders need it."""
    budget = config.scheduler.max_num_batched_tokens or max(platform.max_num_batched_tokens, max_num_seqs)
    flag = f"--max-num-batched-tokens {budget}"
    if budget < max_num_seqs:
        raise UsageError(f"{flag}: at least --max-num-seqs ({max_num_seqs}), one token per request")
    if (whole or not config.scheduler.enable_chunked_prefill) and budget < max_model_len:
        if config.scheduler.max_num_batched_tokens:
            why = "an encoder's prompts are not split, so" if whole else "without chunked prefill"
            raise UsageError(f"{flag}: {why} at least --max-model-len ({max_model_len})")
        budget = max_model_len
    return budget


def _weights_digest(files: model_files.ModelFiles) -> str:
    """Of the model's files; empty where no weights are read from a disk."""
    if files.load_format == "dummy" or files.weights_url:
        return ""
    try:
        return digest_of(str(files.path))
    except OSError:  # there are none: whoever reads them says so
        return ""


def _platform(wanted: str) -> Platform:
    """auto: a GPU where the driver shows one and torch can use it. PluginError."""
    if wanted != "auto":
        return platforms.named(wanted)
    try:
        cpu_build = importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        raise StartError("torch is not installed") from None
    return platforms.named("cuda" if Path("/dev/nvidiactl").exists() and not cpu_build else "cpu")


def _dtype(config: MeshConfig, platform: Platform, of_model: str, family: Family) -> Dtype:
    wanted = DTYPE_ALIASES.get(config.model.dtype, config.model.dtype)
    if wanted == "auto":
        wanted = platform.default_dtype(of_model, float16=family.float16)
    if wanted not in ("float32", "float16", "bfloat16"):
        raise UsageError(f"--dtype {wanted}: float32, float16 or bfloat16")
    if wanted == "float16" and not family.float16:
        raise UsageError(f"--dtype float16: the residual of {family.architecture} outgrows it; use bfloat16")
    return wanted  # type: ignore[return-value]


def claim_port(host: str, port: int) -> contextlib.ExitStack:
    """Hold the port for this mesh until the stack is closed. StartError when somebody has it.

    The first bind, without SO_REUSEPORT, fails for any other listener; the second lets our frontends in beside us. Until they listen
    neither would keep out a second mesh of this user, which then shared the port: the name does."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = host or "0.0.0.0"
    with contextlib.ExitStack() as claims, raised_as(StartError, OSError, of=f"--host {host} --port {port}"):
        name = claims.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        name.bind(f"\0meshlm-{os.getuid()}-{address}-{port}")
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
        claims.enter_context(_beside_frontends(family, address, port))
        return claims.pop_all()


def claim_again(host: str, port: int) -> contextlib.ExitStack:
    """Hold the port of a mesh that is taken over: its frontends have it. Where somebody is quicker for a moment they keep it alone."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = host or "0.0.0.0"
    with contextlib.ExitStack() as claims:
        with contextlib.suppress(OSError):
            name = claims.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            name.bind(f"\0meshlm-{os.getuid()}-{address}-{port}")
            claims.enter_context(_beside_frontends(family, address, port))
        return claims.pop_all()


def _beside_frontends(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    """A bound socket, which lets our frontends in beside it."""
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((address, port))
    return held


T = TypeVar("T")


def fitting(start: Callable[[int | None], T]) -> T:
    """What start(tokens of context at most; None: the model's) gives, once it fits. Errors as of `start`."""
    at_most: int | None = None
    while True:
        try:
            return start(at_most)
        except ContextDoesNotFit as error:
            if at_most is not None and error.fits >= at_most:
                raise
            at_most = error.fits
            streams.complain(f"meshlm: --max-model-len auto: {at_most} tokens fit; starting again with that", "warning")
