"""--weight-transfer-config: how a trainer sends weights, as vLLM's JSON says; and what cannot have it. Called by resolve.py."""

import difflib
import json
from typing import Any

from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.weight_transfer import BACKENDS, SPARSE
from meshlm.supervisor.errors import UsageError, raised_as
from meshlm.supervisor.settings.flag_rules import Facts
from meshlm.supervisor.settings.rules import Rules, check

FLAG = "--weight-transfer-config"
KEYS = ("backend",)


def settled(config: MeshConfig) -> MeshConfig:
    """The same settings with what the flag comes to. UsageError names the key or backend that cannot be honoured."""
    text = config.worker.weight_transfer_config
    if not text:
        return config
    with raised_as(UsageError, ValueError, of=f"{FLAG} {text}"):
        given = json.loads(text)
    if not isinstance(given, dict):
        raise UsageError(f"{FLAG} {text}: a JSON object is expected")
    check(_keys(given))
    backend = given.get("backend", "nccl")
    return replace(config, worker=replace(config.worker, weight_transfer="nccl" if backend == SPARSE else backend))


def rules(c: MeshConfig, f: Facts, *, pools: bool) -> Rules:
    """What no trainer can send weights to. Of a settled configuration; pools: the model gives vectors."""
    if not c.worker.receives_weights:
        return
    backend = c.worker.weight_transfer
    of_flag = f"{FLAG}: backend {backend}"
    yield pools, of_flag, f"{f.spec.architecture} gives vectors here, and its weights are not read again; leave it out"
    yield (
        f.spec.audio_encoder is not None,
        of_flag,
        f"weights of {f.spec.architecture} are not read again; leave it out",
    )
    yield f.spec.transformers is not None, of_flag, "weights are not read again with --model-impl transformers"
    several = c.parallel.nnodes > 1 or c.network.headless or bool(c.network.listen)
    yield (
        several,
        of_flag,
        "tensors are received on one host, and this mesh has several; the backend disk is for folders",
    )
    yield (
        f.device != "cuda" and backend == "nccl",
        of_flag,
        f"NCCL needs GPUs; on --device {f.device} gloo does the same",
    )
    of_model = c.model.load_format
    text = f"tensors are kept as safetensors, and --load-format {of_model} has other names or shapes"
    yield of_model in ("gguf", "sharded_state"), of_flag, text


def _keys(given: dict[str, Any]) -> Rules:
    for key in given:
        close = difflib.get_close_matches(key, KEYS, 1)
        yield key not in KEYS, f"{FLAG}: {key}", "unknown" + (f"; {close[0]} is one" if close else "")
    backend = given.get("backend", "nccl")
    yield (
        backend not in (*BACKENDS, SPARSE),
        f"{FLAG}: backend {json.dumps(backend)}",
        f"unknown; there are {', '.join(BACKENDS)}",
    )
