"""What all nodes of a mesh must have in common, and in which words a difference is told.

Pure but for reading samples of the weights. Settings marked PER_NODE in protocol/config/ (`per_node.py`) may differ; all others of the
sections below may not.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from meshlm import __version__
from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.protocol.wire.parts import joined
from meshlm.runtime.model_files.gguf_files import files_of
from meshlm.runtime.model_files.object_store import AnyPath, folder_of
from meshlm.supervisor.settings import flags

SECTIONS = ("model", "cache", "scheduler", "worker", "parallel")
SAMPLE_BYTES = 64 << 10
WEIGHTS = {".safetensors", ".gguf", ".bin", ".pt", ".pth"}


def facts(config: MeshConfig) -> dict[str, str]:
    """The facts that are compared, by the names that users know."""
    resolved = config.resolved
    assert resolved is not None
    found = {"the version": __version__, "the model": f"{_model_digest(config, resolved)} ({resolved.served_names[0]})"}
    for setting in flags.settings():
        if setting.section in SECTIONS and not ((setting.meta and setting.meta.extra) or {}).get("per_node"):
            value = getattr(resolved, setting.name, getattr(getattr(config, setting.section), setting.name))
            found[setting.flag] = str(value).replace(" ", "")
    return found


def differences(head: dict[str, str], node: dict[str, str]) -> str:
    """'--max-model-len is 4096 on the head and 2048 on the node; ...', "" when there are none."""
    told = [
        f"{name} is {head.get(name, 'unknown')} on the head and {node.get(name, 'unknown')} on the node"
        for name in {**head, **node}
        if head.get(name, "").partition(" ")[0] != node.get(name, "").partition(" ")[0]
    ]
    return "; ".join(told)


def _model_digest(config: MeshConfig, resolved: Resolved) -> str:
    """A digest of the architecture and of samples of the weights: equal shapes with other weights are another model."""
    digest = hashlib.sha256(msgspec.json.encode(resolved.spec))
    if resolved.load_format == "dummy":
        digest.update(b"dummy %d" % (config.model.seed or 0))
    else:
        for sample in _samples(_weights(resolved)):
            digest.update(joined(sample))
    return digest.hexdigest()[:12]


def _weights(resolved: Resolved) -> AnyPath:
    return folder_of(resolved.weights_url) if resolved.weights_url else Path(resolved.model_path)


def _samples(path: AnyPath) -> Iterator[bytes]:
    files: Sequence[AnyPath]
    if isinstance(path, Path) and not path.is_dir():
        files = files_of(path)
    else:
        files = sorted((file for file in path.iterdir() if file.suffix in WEIGHTS), key=str)
    for file in files:
        with file.open("rb") as weights:
            size = weights.seek(0, 2)
            yield size.to_bytes(8, "little")
            for start in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                weights.seek(start)
                yield weights.read(SAMPLE_BYTES)
