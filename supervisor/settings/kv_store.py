"""The store's settings: vLLM's spelling of them, and what a store cannot have. Called by kv_transfer.py.

vLLM calls what --kv-offloading-size asks for OffloadingConnector. Its options that mean the same are taken, the others are refused by
name.
"""

import difflib
import json
import os
from pathlib import Path
from typing import Any

from meshlm.protocol.config import KVTransferConfig, MeshConfig
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.object_store import folder_of, is_url
from meshlm.runtime.process import host_memory
from meshlm.supervisor.settings.rules import Rules, check

CONNECTOR = "OffloadingConnector"
SIZE_FLAG, PATH_FLAG, CONNECTOR_FLAG = "--kv-offloading-size", "--kv-offloading-path", "--kv-transfer-config"
LEAST = {"cpu_bytes_to_use": 1, "store_threshold": 0, "max_tracker_size": 1}  # of each option
GIB = 1 << 30
_REFUSED = {
    "block_size": "a block of the store is one of the device (--block-size)",
    "num_cpu_blocks": "the store's size is given in bytes, as cpu_bytes_to_use",
    "eviction_policy": "the store has one: S3-FIFO, LRU with frequency",
    "spec_module_path": "the store is one of this package",
}


def settled(given: dict[str, Any], options: dict[str, Any], c: KVTransferConfig) -> dict[str, Any]:
    """The settings that OffloadingConnector comes to. UsageError names what cannot be honoured."""
    check(_options(given, options, c))
    found: dict[str, Any] = {"connector_options": json.dumps(options)}
    if (num_bytes := options.get("cpu_bytes_to_use")) is not None:
        found["kv_offloading_size"] = num_bytes / GIB
    return found


def _options(given: dict[str, Any], options: dict[str, Any], c: KVTransferConfig) -> Rules:
    role = given.get("kv_role", "kv_both")
    yield role != "kv_both", f"{CONNECTOR_FLAG}: kv_role {json.dumps(role)}", f"{CONNECTOR} saves and loads; kv_both"
    for key, value in options.items():
        name = f"{CONNECTOR_FLAG}: {key} {json.dumps(value)}"
        yield key in _REFUSED, name, _REFUSED.get(key, "")
        if key == "spec_name":
            yield value != "CPUOffloadingSpec", name, "CPUOffloadingSpec"
            continue
        close = difflib.get_close_matches(key, LEAST, 1)
        yield key not in LEAST, name, "unknown" + (f"; {close[0]} is one" if close else "")
        yield type(value) is not int or value < LEAST[key], name, f"a number from {LEAST[key]} on"
    has_bytes, has_size = "cpu_bytes_to_use" in options, c.kv_offloading_size is not None
    yield has_bytes and has_size, f"{CONNECTOR_FLAG}: cpu_bytes_to_use", f"{SIZE_FLAG} says the same; give one of them"
    yield (
        not has_bytes and not has_size,
        f"{CONNECTOR_FLAG}: {CONNECTOR}",
        f"cpu_bytes_to_use, or {SIZE_FLAG}, is missing",
    )


def rules(c: MeshConfig) -> Rules:
    """What the store of this mesh, if it has one, cannot have."""
    size, network = c.kv_transfer.kv_offloading_size, c.network
    if size is None:
        return
    others = network.listen or network.join or network.headless or c.parallel.nnodes > 1
    why = "ranks of other nodes cannot map this host's memory; leave it out, or have a mesh on each node"
    yield others, SIZE_FLAG, why
    free = host_memory.available() / GIB
    yield size > free, f"{SIZE_FLAG} {size:g}", f"this machine has {free:.1f} GiB left; give less"
    if path := c.kv_transfer.kv_offloading_path:
        why = _why_no_url(path) if is_url(path) else _why_no_folder(Path(path).expanduser().absolute())
        yield why, f"{PATH_FLAG} {path}", why


def _why_no_url(url: str) -> str:
    """Why nothing can be kept there; "" where that is not known."""
    try:
        folder_of(url)
    except ModelFilesError as error:
        return str(error).removeprefix(f"{url}: ")
    return ""


def _why_no_folder(path: Path) -> str:
    """The same of a folder. One that may only be read has files that may be of use: the store says that nothing is written."""
    there = next(one for one in (path, *path.parents) if one.exists())
    if not there.is_dir():
        return f"{there} is a file; give a folder"
    if there != path and not os.access(there, os.W_OK | os.X_OK):
        return f"it cannot be made in {there}, where nothing may be written"
    return ""
