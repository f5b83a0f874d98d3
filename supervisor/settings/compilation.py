"""vLLM's --compilation-config (-cc) as our settings: what means the same is taken, everything else is refused by name."""

import difflib
import json
from typing import Any, get_args, get_type_hints

from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.engine import WorkerConfig
from meshlm.runtime import graph_sizes
from meshlm.supervisor.errors import UsageError, raised_as

FLAG = "--compilation-config"
MODES = get_args(get_args(get_type_hints(WorkerConfig, include_extras=True)["cudagraph_mode"])[0])
NONE, COMPILE = (0, "NONE"), (3, "VLLM_COMPILE")
_FUSED = "since MeshLM's fused kernels stand where vLLM compiles"
_WHOLE_MODES = {
    "PIECEWISE": "no step is captured in pieces: those with prompts are captured whole, and decodes, which have no graphs of "
    "their own, are padded to them; FULL has both",
    "FULL_AND_PIECEWISE": "it is taken as FULL: steps with prompts are captured whole, too",
}
_OF_GRAPHS = ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
_ONE_FUNCTION = "--compile inductor has one function for any number of tokens"
_WHOLE = "steps are captured whole, attention too (docs/adr/0004); leave it out"
# Key -> values that ask for what is the case anyway, and why others are refused.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "backend": (("", "inductor"), "there are inductor and eager; --compile is the setting"),
    "splitting_ops": ((None,), _WHOLE),
    "use_inductor_graph_partition": ((None, False), _WHOLE),
    "compile_sizes": ((None, []), f"{_ONE_FUNCTION}, and one for one token"),
    "compile_ranges_endpoints": ((None, []), _ONE_FUNCTION),
    "custom_ops": (([],), "--compile inductor takes torch's operations, --compile none our kernels"),
    "pass_config": (({},), "what can be fused is fused by our kernels"),
    "inductor_passes": (({},), "torch's own passes are run alone"),
    "inductor_compile_config": (({},), "TORCHINDUCTOR_ variables reach the workers"),
    "cudagraph_copy_inputs": ((False,), "inputs are always written where graphs read them"),
    "cudagraph_num_of_warmups": ((0, 1), "each kernel is launched once before a capture"),
    "debug_dump_path": ((None,), "TORCH_TRACE names a folder for tlparse (docs/profiling.md)"),
    "cache_dir": (("",), "compiled functions are kept below $XDG_CACHE_HOME/meshlm/inductor"),
    "compile_cache_save_format": (("binary", "unpacked"), "compiled functions are torch's files, as they are"),
    "fast_moe_cold_start": ((None,), "experts are never compiled"),
}
# Keys of older vLLMs, and what their values ask of cudagraph_mode; None: what is the case without it.
OLDER: dict[str, dict[bool, str | None]] = {
    "full_cuda_graph": {True: "FULL", False: None},
    "use_cudagraph": {True: None, False: "NONE"},
}
TAKEN = ("mode", "level", "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
KNOWN = (*TAKEN, "dynamic_shapes_config", *OLDER, *ONLY)


def settled(config: MeshConfig) -> MeshConfig:
    """The same settings with what --compilation-config says. UsageError names the key that cannot be honoured."""
    text = config.worker.compilation_config
    if not text:
        return config
    with raised_as(UsageError, ValueError, of=f"{FLAG} {text}"):
        given = json.loads(text)
    if isinstance(given, int) and not isinstance(given, bool):  # vLLM takes a mode alone
        given = {"mode": given}
    if not isinstance(given, dict):
        raise UsageError(f"{FLAG} {text}: a JSON object is expected")
    changes: dict[str, Any] = {}
    for key, value in given.items():
        changes |= _change(key, value)
    default = WorkerConfig()
    for name, value in changes.items():
        said = getattr(config.worker, name)
        if said != getattr(default, name) and said != value:
            raise UsageError(f"{FLAG}: {name} {value} is not what --{name.replace('_', '-')} says; give one of them")
    config = replace(config, worker=replace(config.worker, **changes))
    if _asked_mode(config.worker) in NONE and (way := config.worker.compile) != "none":
        raise UsageError(f"{FLAG}: mode 0 compiles nothing, and --compile {way} does; give one of them")
    return config


def without_compiler(config: MeshConfig) -> tuple[MeshConfig, list[str]]:
    """With --enforce-eager nothing is compiled, as in vLLM, and a line says so."""
    worker = config.worker
    if not worker.enforce_eager or worker.compile == "none":
        return config, []
    said = f"--enforce-eager: nothing is compiled, so --compile {worker.compile} has no effect"
    only = "--cudagraph-mode NONE takes the graphs alone"
    return replace(config, worker=replace(worker, compile="none")), [f"{said}; {only}"]


def notes(config: MeshConfig, device: str) -> list[str]:
    """What is not done as vLLM does it by the same name. Of a settled configuration."""
    worker, found = config.worker, list[str]()
    if _asked_mode(worker) in COMPILE and worker.compile == "none" and not worker.enforce_eager:
        found.append(f"{FLAG}: mode 3: nothing is compiled, {_FUSED}; --compile inductor is the setting")
    if worker.cudagraph_mode in _WHOLE_MODES and not worker.enforce_eager:
        found.append(f"cudagraph_mode {worker.cudagraph_mode}: {_WHOLE_MODES[worker.cudagraph_mode]}")
    if device in ("cpu", "fake"):
        asked = [name for name in _OF_GRAPHS if getattr(worker, name) != getattr(WorkerConfig(), name)]
        found = [note for note in found if not note.startswith("cudagraph_mode")]
        found += [f"{name} has no effect: there are no CUDA graphs on --device {device}" for name in asked]
    return found


def check_sizes(worker: WorkerConfig, max_num_seqs: int, max_num_batched_tokens: int) -> list[str]:
    """What is to be said of --cudagraph-capture-sizes. UsageError where no graph, or none of one kind that is asked for, fits."""
    mode, most = worker.cudagraph_mode, worker.max_cudagraph_capture_size
    given = worker.cudagraph_capture_sizes
    if not given or worker.enforce_eager or mode == "NONE":
        return []
    flag = f"--cudagraph-capture-sizes {' '.join(map(str, given))}"
    sizes = [size for size in given if most is None or size <= most]
    decodes = graph_sizes.of_decodes(sizes, max_num_seqs) if mode != "PIECEWISE" else []
    mixed = graph_sizes.of_mixed(sizes, max_num_batched_tokens) if mode != "FULL_DECODE_ONLY" else []
    if not decodes and not mixed:
        limit = "" if most is None else f", none above --max-cudagraph-capture-size {most}"
        raise UsageError(
            f"{flag}: none of these is the size of a graph with --cudagraph-mode {mode}: of decodes they are at most --max-num-seqs "
            f"({max_num_seqs}), of steps with prompts {graph_sizes.LEAST_MIXED} to --max-num-batched-tokens "
            f"({max_num_batched_tokens}){limit}"
        )
    found = []
    if unused := [size for size in given if size not in decodes and size not in mixed]:
        found.append(f"--cudagraph-capture-sizes: no step has a graph of {', '.join(map(str, unused))} tokens")
    if not decodes and mode != "PIECEWISE":
        found.append(f"{flag}: steps of decodes are padded to {mixed[0]} tokens; a size up to --max-num-seqs is theirs")
    if not mixed and mode != "FULL_DECODE_ONLY":
        least = graph_sizes.LEAST_MIXED
        found.append(f"{flag}: steps with prompts have no graph; one of {least} tokens or more is theirs")
    return found


def _asked_mode(worker: WorkerConfig) -> Any:
    """What `mode` of --compilation-config asks for, in the form of NONE and COMPILE; None where it is not there."""
    given = json.loads(worker.compilation_config or "{}")
    if isinstance(given, dict):
        given = given.get("mode", given.get("level"))
    return given.upper() if isinstance(given, str) else given


def _change(key: str, value: Any) -> dict[str, Any]:
    """Our setting and its value, for one key."""
    if key in ("mode", "level"):
        return _mode(key, value)
    if key == "cudagraph_mode":
        if value is not None and str(value).upper() not in MODES:
            raise UsageError(f"{FLAG}: {key} {value}: there are {', '.join(MODES)}")
        return {} if value is None else {key: str(value).upper()}
    if key == "cudagraph_capture_sizes":
        if value is not None and not (isinstance(value, list) and value and all(map(_counts, value))):
            raise UsageError(f"{FLAG}: {key} {value}: a list of numbers from 1 up is expected")
        return {} if value is None else {key: tuple(sorted(set(value)))}
    if key == "max_cudagraph_capture_size":
        if value is not None and not _counts(value):
            raise UsageError(f"{FLAG}: {key} {value}: a number from 1 up is expected")
        return {} if value is None else {key: value}
    if key in OLDER:
        if not isinstance(value, bool):
            why = "true or false is expected; cudagraph_mode is its newer name"
            raise UsageError(f"{FLAG}: {key} {json.dumps(value)}: {why}")
        return {} if (mode := OLDER[key][value]) is None else {"cudagraph_mode": mode}
    if key == "dynamic_shapes_config":
        return _shapes(value)
    if key == "backend" and value == "eager":
        return {"compile": "eager"}
    if key not in ONLY:
        close = difflib.get_close_matches(key, KNOWN, n=1)
        raise UsageError(f"{FLAG}: unknown key {key}" + (f"; did you mean {close[0]}?" if close else ""))
    values, why = ONLY[key]
    if value not in values:
        raise UsageError(f"{FLAG}: {key} {json.dumps(value)}: {why}")
    return {}


def _mode(key: str, value: Any) -> dict[str, Any]:
    """3 asks for fusion, which our kernels do; --compile has torch do it."""
    meant = value.upper() if isinstance(value, str) else value
    if isinstance(meant, bool) or meant not in (*NONE, *COMPILE, None):
        raise UsageError(f"{FLAG}: {key} {value}: there are 0 (NONE) and 3 (VLLM_COMPILE); --compile is the setting")
    return {}


def _shapes(value: Any) -> dict[str, Any]:
    known = get_args(get_args(get_type_hints(WorkerConfig, include_extras=True)["compile_dynamic_shapes"])[0])
    if not isinstance(value, dict) or value.keys() - {"type"}:
        raise UsageError(f'{FLAG}: dynamic_shapes_config {json.dumps(value)}: {{"type": NAME}} is expected')
    kind = value.get("type", known[0])
    if kind not in known:
        raise UsageError(f"{FLAG}: dynamic_shapes_config: type {kind}: there are {', '.join(known)}")
    return {"compile_dynamic_shapes": kind}


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
