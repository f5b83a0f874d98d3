"""KV pages that move: tiers, ranks with roles and connectors, as their flags say; and what cannot have them. Called by resolve.py.

The keys of --kv-transfer-config are vLLM's. What is not there is refused by its key, with the reason.
"""

import difflib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from meshlm.protocol.config import KVTransferConfig, MeshConfig, Resolved
from meshlm.protocol.config.kv_transfer import num_prefill_ranks
from meshlm.runtime import plugins
from meshlm.supervisor.errors import UsageError, raised_as
from meshlm.supervisor.settings import kv_connectors, kv_store
from meshlm.supervisor.settings.flag_rules import Facts
from meshlm.supervisor.settings.rules import Rules, check

SAMPLES, SAMPLE_BYTES = 64, 16 << 10
DEVICES = ("cpu", "cuda", "fake")
FLAG, ROLES_FLAG = "--kv-transfer-config", "--dp-roles"
KEYS = (
    *("kv_connector", "kv_role", "engine_id", "kv_load_failure_policy", "kv_connector_extra_config"),
    *("kv_ip", "kv_port", "kv_rank", "kv_parallel_size", "kv_buffer_size", "kv_buffer_device"),
    *("kv_connector_module_path", "enable_permute_local_kv"),
)


def settled(config: MeshConfig) -> MeshConfig:
    """The same settings with what these flags come to. UsageError names the key or role that cannot be honoured."""
    c = config.kv_transfer
    found: dict[str, Any] = {}
    if c.dp_roles:
        with raised_as(UsageError, ValueError, of=f"{ROLES_FLAG} {c.dp_roles}"):
            found["num_prefill_ranks"] = num_prefill_ranks(c.dp_roles, config.parallel.data_parallel_size)
    if c.kv_transfer_config:
        found |= _connectors(c)
    return replace(config, kv_transfer=replace(c, **found)) if found else config


def rules(c: MeshConfig, f: Facts, *, pools: bool) -> Rules:
    """What cannot move pages. Of a settled configuration; pools: the model gives vectors."""
    kv = c.kv_transfer
    without_size = kv.kv_offloading_size is None
    yield kv.kv_offloading_path and without_size, "--kv-offloading-path", "it is a tier below --kv-offloading-size"
    yield (
        kv.kv_offloading_disk_size is not None and not kv.kv_offloading_path,
        "--kv-offloading-disk-size",
        "it is the size of --kv-offloading-path",
    )
    if not kv.moves:
        return
    flag = kv_store.SIZE_FLAG if kv.has_store else ROLES_FLAG if kv.shares_pages else FLAG
    yield (
        not c.cache.enable_prefix_caching,
        flag,
        "pages are found by their prefix; leave --no-enable-prefix-caching out",
    )
    yield from kv_store.rules(c)
    yield pools, flag, f"{f.spec.architecture} gives vectors here, and keeps no pages; leave it out"
    network = c.network
    several = c.parallel.nnodes > 1 or network.headless or bool(network.listen or network.join)
    yield kv.shares_pages and several, ROLES_FLAG, "ranks read one another's pages on one host; this mesh has several"
    why = "kv_ip is an address of one node, and this mesh has several; have a mesh on each node"
    yield kv.transfer is not None and several, FLAG, why
    by_id, size = kv.transfer is not None and kv.transfer.by_request_id, c.parallel.data_parallel_size
    yield (
        by_id and size > 1,
        f"--data-parallel-size {size}",
        "a request's id carries the address of one rank; start a mesh for each",
    )
    yield f.device not in DEVICES, flag, f"KV pages of --device {f.device} do not move; leave it out"
    why = "ranks of --device cuda have one another's memory open, and none can give its own back; leave it out"
    yield kv.shares_pages and f.device == "cuda" and c.worker.enable_sleep_mode, "--enable-sleep-mode", why
    scales = "scales that are calculated at a start are no others', whose pages are moved; leave it out"
    yield c.cache.calculate_kv_scales, "--calculate-kv-scales", scales
    yield kv.shares_pages and c.lockstep, ROLES_FLAG, "ranks that share experts step together; each has both roles"


def with_fingerprint(config: MeshConfig) -> MeshConfig:
    """The same with a digest of all that decides what KV is computed, where pages move. Of a resolved configuration."""
    if not config.kv_transfer.moves:
        return config
    digests = [_digest(config, files) for files in (_files_of, _content_of)]
    return replace(
        config, kv_transfer=replace(config.kv_transfer, fingerprint=digests[0], content_fingerprint=digests[1])
    )


def _digest(config: MeshConfig, files: Callable[[Resolved], object]) -> str:
    resolved, model = config.require_resolved(), config.model
    drafter = resolved.drafter
    said = (
        [(one.spec, files(one), one.load_format, one.dtype) for one in (resolved, drafter) if one is not None],
        (model.seed or 0 if "dummy" in (resolved.load_format, drafter and drafter.load_format) else None),
        (model.revision, model.quantization, model.gguf_weights, model.cpu_exact, model.model_impl),
        resolved.max_model_len,  # groups of layers, and some rotations, hang on it
    )
    return hashlib.sha256(msgspec.json.encode(said)).hexdigest()


def _files_of(resolved: Resolved) -> list[tuple[str, int, int]]:
    """The model's files: path, bytes, and when they were written, in ns. Of weights in object storage the URL."""
    if resolved.weights_url:
        return [(resolved.weights_url, 0, 0)]
    path = Path(resolved.model_path)
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    found = [(file, file.stat()) for file in files if file.is_file()]
    return [(str(file), status.st_size, status.st_mtime_ns) for file, status in found]


def _content_of(resolved: Resolved) -> list[tuple[str, int, str]]:
    """The weights' files: name, bytes, and a digest of SAMPLES runs of them. Of weights in object storage the URL."""
    if resolved.weights_url:
        return [(resolved.weights_url, 0, "")]
    path = Path(resolved.model_path)
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [
        (file.name, size, _sampled(file, size)) for file in files if file.is_file() and (size := file.stat().st_size)
    ]


def _sampled(file: Path, size: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as opened:
        for nth in range(SAMPLES):
            opened.seek(max(0, (size - SAMPLE_BYTES) * nth // (SAMPLES - 1)))
            digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _connectors(c: KVTransferConfig) -> dict[str, Any]:
    with raised_as(UsageError, ValueError, of=f"{FLAG} {c.kv_transfer_config}"):
        given = json.loads(c.kv_transfer_config)
    if not isinstance(given, dict):
        raise UsageError(f"{FLAG} {c.kv_transfer_config}: a JSON object is expected")
    check(_keys(given))
    options = given.get("kv_connector_extra_config", {})
    if given["kv_connector"] == kv_store.CONNECTOR:
        return kv_store.settled(given, options, c)
    policy = given.get("kv_load_failure_policy")
    found = {"engine_id": given.get("engine_id", "")} | ({} if policy is None else {"load_failure_policy": policy})
    if given["kv_connector"] in kv_connectors.NAMES:
        return found | {"transfer": kv_connectors.transfer_of(given)}
    return found | {"connectors": (given["kv_connector"],), "connector_options": json.dumps(options)}


def _keys(given: dict[str, Any]) -> Rules:
    for key in given:
        close = difflib.get_close_matches(key, KEYS, 1)
        yield key not in KEYS, f"{FLAG}: {key}", "unknown" + (f"; {close[0]} is one" if close else "")
    name = given.get("kv_connector")
    there = (kv_store.CONNECTOR, *kv_connectors.NAMES, *plugins.names(plugins.KV_CONNECTORS, os.environ))
    text = f"no such connector; there are {', '.join(there)}"
    yield name not in there, f"{FLAG}: kv_connector {json.dumps(name)}", text
    policy, policies = given.get("kv_load_failure_policy", "recompute"), ("recompute", "fail")
    yield policy not in policies, f"{FLAG}: kv_load_failure_policy {json.dumps(policy)}", "recompute or fail"
    options = given.get("kv_connector_extra_config", {})
    yield not isinstance(options, dict), f"{FLAG}: kv_connector_extra_config", "a JSON object is expected"
