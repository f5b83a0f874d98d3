"""The environment of `vllm serve`: variables that mean what one of our settings means are honoured, the others that are set are named.

A flag and a file (--config) win over a variable, MESHLM_API_KEY over VLLM_API_KEY. Called by serve.py.
"""

import re
from collections.abc import Callable, Mapping

from meshlm.protocol.config.server import STORE_OFF
from meshlm.supervisor.errors import UsageError, raised_as

LEVELS = {"critical": "error", "fatal": "error", "warn": "warning"}
OURS = ("debug", "info", "warning", "error")


def _level(text: str) -> str:
    level = LEVELS.get(text.lower(), text.lower())
    if level not in OURS:
        raise ValueError(f"one of {', '.join(OURS)} is expected")
    return level


def _color(text: str) -> str:
    found = {"auto": "auto", "1": "always", "0": "never"}.get(text.lower())
    if found is None:
        raise ValueError("auto, 0 or 1 is expected")
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number is expected") from None


def _whole(text: str) -> int:
    return int(_number(text))


def _switch(text: str) -> bool:
    try:
        return bool(int(text))
    except ValueError:
        raise ValueError("0 or 1 is expected") from None


HONOURED: dict[str, tuple[str, Callable[[str], object]]] = {
    "VLLM_LOGGING_LEVEL": ("log_level", _level),
    "VLLM_LOGGING_COLOR": ("log_color", _color),
    "VLLM_BATCH_INVARIANT": ("deterministic", _switch),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": ("allow_runtime_lora_updating", _switch),
    "VLLM_LORA_RESOLVER_CACHE_DIR": ("lora_resolver_dir", str),
    "VLLM_TORCH_PROFILER_DIR": ("profiler_dir", str),
    "VLLM_ENGINE_READY_TIMEOUT_S": ("startup_timeout", _number),
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": ("step_timeout", _number),
    "VLLM_SERVER_DEV_MODE": ("server_dev_mode", _switch),
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": ("max_audio_bytes", lambda text: int(_number(text) * (1 << 20))),
    "VLLM_MAX_AUDIO_DECODE_DURATION_S": ("max_audio_seconds", _whole),
    "VLLM_ENABLE_RESPONSES_API_STORE": ("responses_store", lambda text: "" if _switch(text) else STORE_OFF),
}
"""Variable -> our setting, and how its text is read."""

API_KEYS = ("MESHLM_API_KEY", "VLLM_API_KEY")
"""The first that is set counts, where no flag or file gives a key."""

ADMIN_API_KEYS = ("MESHLM_ADMIN_API_KEY",)
"""Likewise, for --admin-api-key."""

_ON, _OFF = ("1", "true"), ("0", "false")
_BUILD = "it says how vLLM was built"
_ANY: tuple[str, ...] = ()

FULFILLED: dict[str, tuple[tuple[str, ...], str]] = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": (_OFF, "the model's context is the limit"),
    **dict.fromkeys(("VLLM_BUILD_COMMIT", "VLLM_BUILD_PIPELINE", "VLLM_BUILD_URL"), (_ANY, _BUILD)),
    "VLLM_CONFIGURE_LOGGING": (_ON, "--log-level and --log-format"),
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": (_OFF, "answers are never logged"),
    "VLLM_DISABLE_LOG_LOGO": (_ON, "there is no logo"),
    "VLLM_DOCKER_BUILD_CONTEXT": (_ANY, _BUILD),
    "VLLM_DO_NOT_TRACK": (_ON, "nothing is collected or sent"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": (_ON, "every part is a process of its own"),
    **dict.fromkeys(("VLLM_IMAGE_TAG", "VLLM_MAIN_CUDA_VERSION", "VLLM_TARGET_DEVICE"), (_ANY, _BUILD)),
    "VLLM_LOGGING_STREAM": (("ext://sys.stderr",), "logs go to stderr"),
    "VLLM_NO_USAGE_STATS": (_ON, "nothing is collected or sent"),
    "VLLM_PLUGINS": (_ANY, "it is read where plug-ins are loaded"),
    "VLLM_USAGE_SOURCE": (_ANY, "nothing is collected or sent"),
    "VLLM_USE_MODELSCOPE": (_OFF, "models come from the Hugging Face hub"),
    "VLLM_USE_V1": (_ON, "there is one engine"),
    "VLLM_WORKER_MULTIPROC_METHOD": (("spawn",), "processes are programs of their own, none is forked"),
}
"""Variable -> values that ask for what is the case (_ANY: all of them), and what is the case, for whoever asks for another."""

INSTEAD = {
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "see --disable-custom-all-reduce",
    "VLLM_ATTENTION_BACKEND": "--attention-backend",
    "VLLM_CACHE_ROOT": "XDG_CACHE_HOME and TRITON_CACHE_DIR",
    "VLLM_COMPILE_CACHE_SAVE_FORMAT": "compiled functions are torch's files, below $XDG_CACHE_HOME/meshlm/inductor",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-cache-memory 4G",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "--cpu-threads",
    "VLLM_CPU_OMP_THREADS_BIND": "--cpu-threads",
    "VLLM_CUSTOM_SCOPES_FOR_PROFILING": "--profile-layers",
    "VLLM_DEBUG_DUMP_PATH": "TORCH_TRACE names a folder for tlparse",
    "VLLM_DISABLE_COMPILE_CACHE": "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1",
    "VLLM_DP_MASTER_IP": "--master-addr",
    "VLLM_DP_MASTER_PORT": "--master-port",
    "VLLM_DP_RANK": "--data-parallel-start-rank",
    "VLLM_DP_RANK_LOCAL": "--device-ids",
    "VLLM_DP_SIZE": "--data-parallel-size",
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": "--step-timeout",
    "VLLM_HOST_IP": "--listen, --advertise-host",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "idle connections stay open for 75 s",
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "what dies is started again",
    "VLLM_LOGGING_CONFIG_PATH": "--log-level and --log-format",
    "VLLM_LOGGING_PREFIX": "each line names its process",
    "VLLM_LOG_MODEL_INSPECTION": "meshlm serve --dry-run shows what is read of a model",
    "VLLM_LOG_STATS_INTERVAL": "GET /metrics",
    "VLLM_LORA_RESOLVER_HF_REPO_LIST": "--lora-resolver-dir, with adapters that were downloaded",
    "VLLM_MODEL_REDIRECT_PATH": "MODEL is the folder to serve",
    "VLLM_NVTX_SCOPES_FOR_PROFILING": "--profile-layers",
    "VLLM_PORT": "--mesh-port-range",
    "VLLM_PP_LAYER_PARTITION": "stages have equal numbers of layers",
    "VLLM_PROCESS_NAME_PREFIX": "processes are called meshlm: ROLE/NUMBER",
    "VLLM_RPC_BASE_PATH": "--run-dir",
    "VLLM_TORCH_CUDA_PROFILE": "--profiler-dir",
    "VLLM_TUNED_CONFIG_FOLDER": "--tuning-dir",
    "VLLM_XGRAMMAR_CACHE_MB": "grammars are llguidance's",
}
"""Without effect, and what there is instead."""

KUBERNETES = re.compile(r"VLLM(_\w+)?_(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
"""It sets these in every container where there is a service with such a name, and VLLM_PORT=tcp://..."""


def settings_of(environment: Mapping[str, str]) -> dict[str, object]:
    """The settings that the environment gives, by name. UsageError names the variable."""
    found: dict[str, object] = {}
    for variable, (setting, read) in HONOURED.items():
        if text := environment.get(variable):
            with raised_as(UsageError, ValueError, of=f"{variable}={text}"):
                found[setting] = read(text)
    return found


def api_keys(environment: Mapping[str, str], variables: tuple[str, ...] = API_KEYS) -> tuple[str, ...]:
    """The key of the environment. UsageError for one that is set and empty: the server would be open."""
    for variable in variables:
        if variable in environment:
            check_key(variable, environment[variable])
            return (environment[variable],)
    return ()


def check_key(where: str, key: str) -> None:
    """UsageError unless clients can send it."""
    if not key:
        raise UsageError(f"{where}: the key is empty; give one, or leave it out for a server that is open to all")
    if key != key.strip() or not key.isprintable():
        why = "no client can send a key with a line break, or with a space at its beginning or end"
        raise UsageError(f"{where}: {why}")


def without_effect(environment: Mapping[str, str]) -> str:
    """One line that names the variables that are set and do nothing; "" when there are none."""
    known = {*HONOURED, *API_KEYS}
    found = {name: environment[name] for name in sorted(environment) if name.startswith("VLLM_") and name not in known}
    said = [told for name, text in found.items() if (told := _told(name, text))]
    return f"set in the environment and without effect: {', '.join(said)}" if said else ""


def _told(name: str, text: str) -> str:
    """A variable that does nothing, and what there is instead; "" where it asks for what is the case, or is not vLLM's."""
    if KUBERNETES.fullmatch(name) or (name.endswith("_PORT") and "://" in text):
        return ""
    if name not in FULFILLED:
        return name + (f" ({INSTEAD[name]})" if name in INSTEAD else "")
    values, so = FULFILLED[name]
    return "" if values == _ANY or _is_one_of(text, values) else f"{name}={text} ({so})"


def _is_one_of(text: str, values: tuple[str, ...]) -> bool:
    """An empty text asks for nothing."""
    return text.strip().lower() in ("", *values)
