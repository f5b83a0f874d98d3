"""What Ollama's clients ask of a model: names, sizes, what it can. Called in a thread, since it looks at files."""

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshlm.frontend.ollama import schema
from meshlm.frontend.ollama.format import timestamp
from meshlm.protocol.config import MeshConfig, Resolved

WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt")
NEVER = "2318-01-01T00:00:00Z"  # when a model is unloaded that stays


def tags(names: Sequence[str], resolved: Resolved) -> schema.Tags:
    size, changed = _files(resolved)
    digest, details = _digest(resolved), _details(resolved)
    return schema.Tags([schema.Listed(name, name, timestamp(changed), size, digest, details) for name in names])


def running(names: Sequence[str], resolved: Resolved) -> schema.RunningList:
    size, _ = _files(resolved)
    digest, details = _digest(resolved), _details(resolved)
    in_vram = 0 if resolved.device == "cpu" else size
    return schema.RunningList(
        [schema.Running(name, name, size, digest, details, NEVER, in_vram, resolved.max_model_len) for name in names]
    )


def shown(config: MeshConfig) -> schema.Shown:
    resolved = config.require_resolved()
    spec, family = resolved.spec, _family(resolved)
    info: dict[str, Any] = {
        "general.architecture": family,
        f"{family}.context_length": resolved.max_model_len,
        f"{family}.embedding_length": spec.hidden_size,
        f"{family}.block_count": len(spec.layers),
        f"{family}.attention.head_count": spec.num_attention_heads,
        f"{family}.vocab_size": spec.vocab_size,
    }
    defaults = "\n".join(f"{name:30} {value}" for name, value in resolved.generation_defaults.items())
    template = resolved.chat_templates.get("default", next(iter(resolved.chat_templates.values()), ""))
    _, changed = _files(resolved)
    return schema.Shown(
        _details(resolved), info, capabilities(config), timestamp(changed), "", defaults, template, license=""
    )


def capabilities(config: MeshConfig) -> list[str]:
    """What clients offer their users: calls and reasoning where the server has a parser for them."""
    resolved, server = config.require_resolved(), config.server
    if resolved.pooling is not None:
        return ["embedding"] if "embed" in resolved.pooling.tasks else []
    if resolved.speech is not None:
        return []
    wanted = {
        "completion": True,
        "tools": bool(server.tool_call_parser),
        "thinking": bool(server.reasoning_parser),
        "vision": resolved.spec.media is not None,
    }
    return [name for name, has in wanted.items() if has]


def _family(resolved: Resolved) -> str:
    return resolved.spec.architecture.lower()


def _details(resolved: Resolved) -> schema.Details:
    family, quantization = _family(resolved), resolved.spec.quantization
    kind = "gguf" if resolved.load_format == "gguf" else "safetensors"
    level = resolved.dtype if quantization is None else str(quantization.method)
    return schema.Details("", kind, family, [family], "", level)


def _digest(resolved: Resolved) -> str:
    """A name of the weights: clients show its first digits."""
    return hashlib.sha256(f"{resolved.model_path} {resolved.weights_digest}".encode()).hexdigest()


def _files(resolved: Resolved) -> tuple[int, float]:
    """Bytes of the weights' files, and when the newest was written; zero and now where there are none."""
    path = Path(resolved.model_path)
    files = [one for one in path.iterdir() if one.suffix in WEIGHTS] if path.is_dir() else [path]
    found = [file.stat() for file in files if file.is_file()]
    return sum(one.st_size for one in found), max((one.st_mtime for one in found), default=time.time())
