"""What `meshlm serve --dry-run` prints: the configuration as it was resolved, the memory, and which processes would start where.

No GPU is asked for anything but its size. What processes would refuse at their start is told by a process of each kind, which ends with
its answer: detokenizer/check.py, workers/check.py and frontend/check.py.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.model import AUTO_LEN
from meshlm.protocol.wire.ids import Role
from meshlm.runtime import nvidia_smi, platforms
from meshlm.runtime.model_files.gguf_files import files_of
from meshlm.runtime.model_files.object_store import AnyPath, folder_of
from meshlm.runtime.process.readable import readable
from meshlm.supervisor.errors import StartError
from meshlm.supervisor.processes.children import config_file, variables_of
from meshlm.supervisor.settings import addresses, flags, placement

GIB = 1 << 30
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_SECRET = ("api_key", "admin_api_key")
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pt")


def lines(config: MeshConfig, run_dir: Path) -> Iterator[str]:
    """Of a resolved and settled configuration."""
    resolved = config.require_resolved()
    yield f"{resolved.served_names[0]}: {resolved.spec.architecture} from {resolved.model_path} ({resolved.load_format})"
    yield f"on {resolved.device} in {resolved.dtype}, context {resolved.max_model_len}, {resolved.max_num_seqs} requests at a time,"
    yield f"    {resolved.max_num_batched_tokens} tokens a step"
    yield ""
    yield "settings that are not the default:"
    for setting in flags.settings():
        value = getattr(getattr(config, setting.section), setting.name)
        if value != setting.default:
            yield f"    {setting.flag:<32} {'***' if setting.name in _SECRET else readable(str(_shown(value)))}"
    yield ""
    yield "memory of each worker:"
    yield from (f"    {name:<32} {text}" for name, text in memory(config))
    if (size := config.kv_transfer.kv_offloading_size) is not None:
        below = config.kv_transfer.kv_offloading_path
        yield ""
        yield f"memory of the store: {size:g} GiB of this host's" + (
            f", and behind it {readable(below)}" if below else ""
        )
    yield ""
    yield "processes of this node:"
    for role, names in processes(config):
        yield f"    {len(names):>3} {role:<14} {', '.join(names)}"
    yield f"    {'':>3} run directory  {run_dir}"
    yield ""
    yield "ports:"
    yield from (f"    {name:<32} {text}" for name, text in ports(config))


def _shown(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, tuple) else value


def memory(config: MeshConfig) -> Iterator[tuple[str, str]]:
    """What the weights and the KV cache take, about: what a step needs beside them is known when it has run."""
    resolved = config.require_resolved()
    parallel, spec = config.parallel, resolved.spec
    share = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    where = folder_of(resolved.weights_url) if resolved.weights_url else Path(resolved.model_path)
    weights = weight_bytes(where) // share
    width = 1 if config.cache.kv_cache_dtype != "auto" else _BYTES.get(resolved.dtype, 4)
    per_token = max(1, spec.kv_bytes_per_token_f32 * width // 4 // share)
    if resolved.load_format != "dummy":
        yield "weights", f"{_size(weights)}, as they are in the files"
    if spec.encoder_only:
        yield "KV cache", "none"
        return
    yield "KV cache of a token", f"{per_token} bytes, over all layers"
    encoder = 0 if spec.audio_encoder is None else spec.audio_encoder.max_source_positions
    longest = per_token * (resolved.max_model_len + encoder)
    said = f"{resolved.max_model_len} tokens" + (f", and {encoder} encoder states" if encoder else "")
    yield "KV cache of the longest request", f"{_size(longest)} ({said})"
    if config.cache.num_gpu_blocks_override is not None:
        yield "KV cache", f"{config.cache.num_gpu_blocks_override} blocks (--num-gpu-blocks-override)"
        return
    budget, why = _budget(config, weights)
    if budget is None:
        yield "KV cache", why
    elif budget < longest:
        is_auto = config.model.max_model_len == AUTO_LEN
        advice = "the context will be shorter" if is_auto else "--max-model-len, or more memory"
        yield "KV cache", f"{_size(max(budget, 0))} ({why}): too little for the longest request; {advice}"
    else:
        tokens = "" if encoder else f"{budget // per_token} tokens, "
        yield "KV cache", f"{_size(budget)} ({why}): {tokens}{budget // longest} requests at their longest"


def _budget(config: MeshConfig, weights: int) -> tuple[int | None, str]:
    """Bytes of the KV cache of one worker, about, and where the number comes from."""
    if config.cache.kv_cache_memory:
        return config.cache.kv_cache_memory, "--kv-cache-memory"
    device = config.require_resolved().device
    platform = platforms.named(device)
    if (budget := platform.kv_cache_bytes()) is not None:
        of_cpu = "a quarter of the available memory, 4 GiB at most"
        return budget, of_cpu if device == "cpu" else f"as --device {device} has it"
    if not platform.has_weights:
        return None, "none; the fake device keeps no tensors"
    if (total := gpu_bytes()) is None:
        return None, "not known: no GPU tells its size here"
    utilization = config.cache.gpu_memory_utilization
    text = f"{utilization:g} of {_size(total)}, less the weights; a step takes some of it"
    return int(total * utilization) - weights, text


def gpu_bytes() -> int | None:
    """The memory of the smallest GPU; None without one."""
    try:
        return min(int(line.removesuffix(" MiB")) for line in nvidia_smi.query("memory.total") or ()) << 20
    except (OSError, ValueError):
        return None


def weight_bytes(path: AnyPath) -> int:
    """Bytes of the files of one format: a folder may hold the weights twice."""
    if isinstance(path, Path) and path.is_file():
        return sum(file.stat().st_size for file in files_of(path))
    each = (sum(file.stat().st_size for file in path.glob(pattern)) for pattern in _WEIGHTS)
    return next((count for count in each if count), 0)


def processes(config: MeshConfig) -> list[tuple[str, list[str]]]:
    """The names of the processes by role, the supervisor first."""
    identities = placement.identities(config)
    found = [("supervisor", [f"supervisor/{placement.node_index(config)}"])]
    for role in Role:
        names = [str(identity) for identity in identities if identity.role is role]
        if names:
            found.append((role.value, names))
    standbys = [role for role in config.run.standby_roles if any(role == name for name, _ in found)]
    if standbys:
        found.append(("standby", list(standbys)))
    return found


def ports(config: MeshConfig) -> Iterator[tuple[str, str]]:
    server, network, parallel = config.server, config.network, config.parallel
    if not network.headless:
        kind = "gRPC" if server.grpc else "HTTPS" if server.ssl_certfile else "HTTP"
        yield kind, f"{server.address}:{server.port}" + ("" if server.has_keys else ", without a key")
    if network.listen:
        yield "other nodes (--listen)", f"{network.listen}, and the next port"
    if network.join:
        yield "the head (--join)", network.join
    if network.mesh_port_range:
        yield "links between nodes", network.mesh_port_range
    if addresses.meeting_ports(config):
        yield "torch.distributed", f"from --master-port {parallel.master_port}"
    if not network.listen and not network.join:
        yield "between processes", "none: sockets in the run directory"


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB // 10 else f"{count / 2**20:.1f} MiB"


def as_json(config: MeshConfig, run_dir: Path) -> bytes:
    """The same for machines, with the whole configuration."""
    tree = msgspec.to_builtins(config)
    for name in _SECRET:
        tree["server"][name] = ["***"] * len(tree["server"][name])
    found = {
        "config": tree,
        "memory": dict(memory(config)),
        "processes": dict(processes(config)),
        "ports": dict(ports(config)),
        "run_dir": str(run_dir),
    }
    return msgspec.json.format(msgspec.json.encode(found))


MODULES = {
    Role.DETOKENIZER: "meshlm.detokenizer.check",
    Role.WORKER: "meshlm.workers.check",
    Role.FRONTEND: "meshlm.frontend.check",
}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # what is asked for needs none


def check(config: MeshConfig) -> None:
    """Of a resolved configuration: StartError with the first refusal of a process of this node."""
    roles = {identity.role for identity in placement.identities(config)}
    if not config.server.io_processor_plugin:  # all else that a frontend needs is the supervisor's to know
        roles.discard(Role.FRONTEND)
    asked = {role: _ask(role, config) for role in MODULES if role in roles}
    answers = {role: process.communicate(timeout=config.run.startup_timeout)[0] for role, process in asked.items()}
    for role, said in answers.items():
        if said.strip():
            raise StartError(f"{role.value}: {json.loads(said.splitlines()[-1])['error']}")
        if asked[role].returncode:
            raise StartError(f"{role.value}: the process that looks what it would refuse has failed")


def _ask(role: Role, config: MeshConfig) -> subprocess.Popen[bytes]:
    """A process with what one of this role gets: no key of the API."""
    descriptor = config_file(config, role)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", MODULES[role]],
            stdin=descriptor,
            stdout=subprocess.PIPE,
            env={**variables_of(role, config, os.environ, {}), **NO_GPU},
        )
    finally:
        os.close(descriptor)
