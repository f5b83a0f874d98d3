"""vLLM's --compilation-config (-cc) as our settings: what means the same is taken, everything else is refused by name."""

import difflib
import json
from typing import Any, get_args, get_type_hints

from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.engine import WorkerConfig
from meshlm.supervisor.errors import UsageError

FLAG = "--compilation-config"
MODES = get_args(get_args(get_type_hints(WorkerConfig, include_extras=True)["cudagraph_mode"])[0])
NONE, COMPILE = (0, "NONE"), (3, "VLLM_COMPILE")
_WHOLE = "steps are captured whole, attention too (docs/adr/0004); leave it out"
# Key -> values that ask for what is the case anyway, and why others are refused.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "backend": (("", "inductor"), "there are inductor and eager; --compile is the setting"),
    "splitting_ops": ((None,), _WHOLE),
    "use_inductor_graph_partition": ((None, False), _WHOLE),
    "compile_sizes": (
        (None, []),
        "--compile inductor has one function for any number of tokens, and one for one token",
    ),
    "compile_ranges_endpoints": ((None, []), "--compile inductor has one function for any number of tokens"),
    "custom_ops": (([],), "--compile inductor takes torch's operations, --compile none our kernels"),
    "pass_config": (({},), "what can be fused is fused by our kernels"),
    "inductor_passes": (({},), "torch's own passes are run alone"),
    "inductor_compile_config": (({},), "TORCHINDUCTOR_ variables reach the workers"),
    "cudagraph_copy_inputs": ((False,), "inputs are always written where graphs read them"),
    "cudagraph_num_of_warmups": ((0, 1), "each kernel is launched once before a capture"),
    "debug_dump_path": ((None,), "TORCH_TRACE names a folder for tlparse (docs/profiling.md)"),
    "cache_dir": (("",), "compiled functions are kept below $XDG_CACHE_HOME/meshlm/inductor"),
    "compile_cache_save_format": (("binary",), "the folder of compiled functions has torch's files as they are"),
    "fast_moe_cold_start": ((None,), "experts are never compiled"),
}
TAKEN = ("mode", "level", "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
KNOWN = (*TAKEN, "dynamic_shapes_config", *ONLY)


def settled(config: MeshConfig) -> MeshConfig:
    """The same settings with what --compilation-config says. UsageError names the key that cannot be honoured."""
    text = config.worker.compilation_config
    if not text:
        return config
    try:
        given = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{FLAG} {text}: {error}") from None
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
    return replace(config, worker=replace(config.worker, **changes))


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
