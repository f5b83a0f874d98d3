"""--numa-bind: a worker stays on the CPUs and in the memory of one NUMA node, that of its GPU unless others are named.

A worker does this for itself before it loads anything; what it asks of the kernel costs nothing later.
"""

import ctypes
import os
import platform
import re
from collections.abc import Collection
from pathlib import Path

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.wire.ids import Identity
from meshlm.runtime.process.streams import complain

NODES = Path("/sys/devices/system/node")
_MPOL_BIND = 2
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


class NumaError(Exception):
    """The nodes or CPUs that were asked for are not there; one line."""


def parse_cpus(text: str) -> set[int]:
    """'0-3,8' -> {0, 1, 2, 3, 8}. NumaError."""
    found: set[int] = set()
    for word in text.strip().split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise NumaError(f"{text!r} is no list of CPUs, like 0-3,8")
        found.update(range(int(first), int(last or first) + 1))
    return found


def nodes(root: Path = NODES) -> dict[int, set[int]]:
    found = {}
    for folder in sorted(root.glob("node[0-9]*")):
        text = (folder / "cpulist").read_text("ascii").strip()
        found[int(folder.name.removeprefix("node"))] = parse_cpus(text) if text else set()
    return found


def check(config: MeshConfig, num_workers: int, root: Path = NODES) -> None:
    """NumaError unless all that --numa-bind names is there, for as many workers as this node has."""
    worker, there = config.worker, nodes(root)
    if not worker.numa_bind:
        if worker.numa_bind_nodes or worker.numa_bind_cpus:
            raise NumaError("--numa-bind-nodes, --numa-bind-cpus: they go with --numa-bind")
        return
    if not there:
        raise NumaError(f"--numa-bind: this system tells no NUMA nodes ({root})")
    for node in worker.numa_bind_nodes:
        if node not in there:
            raise NumaError(f"--numa-bind-nodes {node}: this host has the nodes {', '.join(map(str, there))}")
    for name, given in (("nodes", worker.numa_bind_nodes), ("cpus", worker.numa_bind_cpus)):
        if given and len(given) != num_workers:
            raise NumaError(f"--numa-bind-{name}: {len(given)} are given, and this node has {num_workers} workers")
    for text in worker.numa_bind_cpus:
        if strange := parse_cpus(text) - set().union(*there.values()):
            raise NumaError(f"--numa-bind-cpus {text}: this host has no CPU {min(strange)}")


def bind(config: MeshConfig, identity: Identity) -> None:
    """Bind this worker. Where the kernel does not let it, a line says so: it computes all the same."""
    worker = config.worker
    if not worker.numa_bind:
        return
    local = identity.index - (config.node.workers[0] if config.node is not None else 0)
    there = nodes()
    node = worker.numa_bind_nodes[local] if local < len(worker.numa_bind_nodes) else _node_of(config, local, there)
    if node is None:
        complain(f"meshlm: {identity}: --numa-bind: the system does not tell which NUMA node its GPU is at", "warning")
        return
    cpus = parse_cpus(worker.numa_bind_cpus[local]) if local < len(worker.numa_bind_cpus) else there[node]
    try:
        _stay_on(cpus)
        _take_memory_of(node)
    except OSError as error:
        complain(f"meshlm: {identity}: --numa-bind: node {node}: {error.strerror}", "warning")


def _node_of(config: MeshConfig, local: int, there: Collection[int]) -> int | None:
    """The node of this worker's GPU; on a CPU workers take turns."""
    if config.resolved is None or config.resolved.device != "cuda":
        return sorted(there)[local % len(there)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = visible.split(",")[local] if visible and local < len(visible.split(",")) else str(local)
    from meshlm.runtime import nvidia_smi  # every process imports this module, and few come here

    try:
        bus = "".join(nvidia_smi.query("pci.bus_id", f"--id={chosen}") or ()).lower()
        number = int((Path("/sys/bus/pci/devices") / re.sub("^0000", "", bus) / "numa_node").read_text("ascii"))
    except (OSError, ValueError):
        return None
    return number if number in there else None  # -1: there is one node


def _stay_on(cpus: Collection[int]) -> None:
    """All threads of this process, and those that it starts."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cpus)


def _take_memory_of(node: int) -> None:
    """New pages come from this node. OSError, where a container forbids it."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(0, "memory can be bound on x86_64 and aarch64 alone")
    libc = ctypes.CDLL(None, use_errno=True)
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << node % 64
    if libc.syscall(number, _MPOL_BIND, words, ctypes.c_ulong(64 * len(words) + 1)):
        error = ctypes.get_errno()
        raise OSError(error, f"memory is not bound: {os.strerror(error)}")
