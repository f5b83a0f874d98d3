"""GET /server_info and GET /tokenizer_info: what the server and its tokenizer are. Called in a thread, since they read files."""

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from meshlm.frontend.http.errors import field_error
from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.protocol.weights import WeightsVersion
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.json_files import read_json

# In the name of a setting or variable whose value nobody is told.
SECRET = ("api_key", "hf_token", "password", "secret")
PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "numpy"),
    *("pyzmq", "msgspec", "uvloop", "starlette", "uvicorn"),
)
# Of vLLM's configuration.
NOT_THERE = tuple(f"{kind}_config" for kind in ("kv_transfer", "ec_transfer"))
LOCAL = ("vocab_file", "merges_file", "name_or_path")  # paths of the host where the file was made


def server(config: MeshConfig, query: Mapping[str, str], weights: WeightsVersion) -> dict[str, Any]:
    """The configuration without its keys, the environment's MESHLM_ variables, and the versions, that of the weights too."""
    wanted = query.get("config_format", "text")
    if wanted not in ("text", "json"):
        raise field_error("config_format", "must be text or json")
    from importlib import metadata  # 20 ms, which the start does not need

    versions: dict[str, str | int | None] = {
        "python": sys.version,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    environment = {name: value for name, value in os.environ.items() if name.startswith(("MESHLM_", "VLLM_"))}
    found = {
        "meshlm_config": _without_secrets(msgspec.to_builtins(config)),
        "vllm_config": _without_secrets(vllm_config(config)),
    }
    if wanted == "text":
        found = {name: msgspec.json.format(msgspec.json.encode(value)).decode() for name, value in found.items()}
    return {
        **found,
        "meshlm_env": {name: value for name, value in environment.items() if not _is_secret(name)},
        "system_env": versions,
        "weight_version": weights.label,
    }


def vllm_config(config: MeshConfig) -> dict[str, Any]:
    """What of the configuration vLLM has too, as its clients look for it. null: what is not there."""
    resolved, parallel, scheduler, cache = config.require_resolved(), config.parallel, config.scheduler, config.cache
    return {
        "model_config": {
            "model": resolved.model_path,
            "served_model_name": list(resolved.served_names),
            "tokenizer": resolved.tokenizer_path,
            "skip_tokenizer_init": False,
            "trust_remote_code": config.model.trust_remote_code,
            "revision": config.model.revision or None,
            "dtype": f"torch.{resolved.dtype}",
            "max_model_len": resolved.max_model_len,
            "quantization": config.model.quantization or None,
            "enforce_eager": config.worker.enforce_eager,
            "max_logprobs": config.server.max_logprobs,
            "logprobs_mode": config.server.logprobs_mode,
            "runner_type": "generate" if resolved.pooling is None else "pooling",
            "seed": config.model.seed,
        },
        "cache_config": {
            **_named(cache, "block_size", "gpu_memory_utilization", "enable_prefix_caching", "num_gpu_blocks_override"),
            "cache_dtype": cache.kv_cache_dtype,
        },
        "parallel_config": {
            **_named(parallel, "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes"),
            **_named(config.experts, "enable_expert_parallel", "enable_eplb", "all2all_backend"),
        },
        "scheduler_config": {
            **_named(resolved, "max_num_seqs", "max_num_batched_tokens"),
            "enable_chunked_prefill": scheduler.enable_chunked_prefill,
            "policy": scheduler.scheduling_policy,
            "async_scheduling": scheduler.async_depth > 1,
            "stream_interval": config.server.stream_interval,
        },
        "load_config": {"load_format": resolved.load_format, "download_dir": config.model.download_dir or None},
        "device_config": {"device": resolved.device, "device_type": resolved.device},
        "speculative_config": _speculative(config),
        "lora_config": _adapters(config),
        "weight_transfer_config": {"backend": backend} if (backend := config.worker.weight_transfer) else None,
        **dict.fromkeys(NOT_THERE),
    }


def _adapters(config: MeshConfig) -> dict[str, Any] | None:
    """What adapters may be; null: there are none."""
    adapters = config.adapters
    if not adapters.enable_lora:
        return None
    names = ("max_lora_rank", "max_loras", "fully_sharded_loras", "lora_dtype")
    return {**_named(adapters, *names), "max_cpu_loras": adapters.num_kept}


def _speculative(config: MeshConfig) -> dict[str, Any] | None:
    """What drafts tokens; null: nothing does."""
    drafts, of = config.speculative, {"ngram": "prompt_lookup_", "suffix": "suffix_decoding_"}
    if not drafts.method:
        return None
    own = [name for name in drafts.__struct_fields__ if name.startswith(of.get(drafts.method, "_"))]
    found = _named(drafts, "method", "num_speculative_tokens", *own, "rejection_sample_method")
    return found | {"synthetic_acceptance_rates": list(drafts.synthetic_acceptance_rates) or None}


def _named(settings: Struct, *names: str) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in names}


def tokenizer(resolved: Resolved) -> dict[str, Any]:
    """The tokenizer_config.json, with the chat template that is used; of a tokenizer without such a file its class alone."""
    folder = Path(resolved.tokenizer_path)
    file = (folder if folder.is_dir() else folder.parent) / "tokenizer_config.json"
    try:
        found = read_json(file) if file.exists() else {}
    except ModelFilesError:
        found = {}
    found = {name: value for name, value in found.items() if name not in LOCAL}
    found.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    if (template := resolved.chat_templates.get("default")) is not None:
        found["chat_template"] = template
    return found


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: "***" if _is_secret(name) and inner else _without_secrets(inner) for name, inner in value.items()}
    return [_without_secrets(inner) for inner in value] if isinstance(value, list) else value


def _is_secret(name: str) -> bool:
    lower = name.lower()
    return any(lower.endswith(word) for word in SECRET)
