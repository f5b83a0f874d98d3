"""GET /server_info and GET /tokenizer_info: what the server and its tokenizer are. Called in a thread, since they read files."""

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from meshlm.frontend.errors import HttpError
from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.json_files import read_json

SECRET = (
    "api_key",
    "hf_token",
    "password",
    "secret",
)  # in the name of a setting or variable whose value nobody is told
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "numpy",
    "pyzmq",
    "msgspec",
    "uvloop",
    "starlette",
    "uvicorn",
)
LOCAL = ("vocab_file", "merges_file", "name_or_path")  # paths of the host where the file was made


class Serves(Protocol):
    """The part of the frontend that is told of."""

    config: MeshConfig


def server(backend: Serves, query: Mapping[str, str]) -> dict[str, Any]:
    """The configuration without its keys, the environment's MESHLM_ variables, and the versions."""
    wanted = query.get("config_format", "text")
    if wanted not in ("text", "json"):
        raise HttpError(400, "config_format: must be text or json", "config_format")
    from importlib import metadata  # 20 ms, which the start does not need

    config = _without_secrets(msgspec.to_builtins(backend.config))
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
    return {
        "meshlm_config": config if wanted == "json" else msgspec.json.format(msgspec.json.encode(config)).decode(),
        "meshlm_env": {name: value for name, value in environment.items() if not _is_secret(name)},
        "system_env": versions,
    }


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
