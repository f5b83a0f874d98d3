"""The head's pure core for other nodes: who may join, what runs there, and what all nodes must have in common.

Called by network.py with what their supervisors say. Settings marked PER_NODE in protocol/config/ may differ between nodes; all others
of the sections below may not. Only samples of the weights are read.
"""

import contextlib
import hashlib
import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from meshlm import __version__
from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.protocol.edges.control import NodeJoin, NodeRefused, NodeReport, NodeWelcome, ProcessReport, StandbyReport
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.protocol.wire.parts import joined
from meshlm.runtime.model_files.gguf_files import files_of
from meshlm.runtime.model_files.object_store import AnyPath, folder_of
from meshlm.supervisor.settings import flags

Places = tuple[int, int]  # first and number


@dataclass(slots=True)
class Joined:
    """A node that was let in. `lost`: its supervisor cannot be reached now."""

    host: str
    ranks: Places
    workers: Places
    processes: tuple[ProcessReport, ...] = ()
    standbys: tuple[StandbyReport, ...] = ()
    lost: bool = False

    def runs(self, identity: Identity) -> bool:
        places = {Role.SCHEDULER: self.ranks, Role.WORKER: self.workers}.get(identity.role, (0, 0))
        return places[0] <= identity.index < places[0] + places[1]


class Nodes:
    """All nodes but the head itself, by the identity of their supervisor."""

    def __init__(self, ranks: Places, workers: Places, facts: dict[str, str]) -> None:
        self._own, self._facts = Joined("the head", ranks, workers), facts
        self.joined: dict[Identity, Joined] = {}

    def join(self, supervisor: Identity, node: NodeJoin) -> NodeWelcome | NodeRefused:
        """Let a node in, for the first time or again, unless it differs or wants what others have."""
        found = differences(self._facts, node.facts)
        if found:
            return NodeRefused(f"it differs from the head: {found}")
        for other, known in {Identity(Role.SUPERVISOR, 0): self._own, **self.joined}.items():
            if other != supervisor and not known.lost and (clash := _clash(known, node)):
                return NodeRefused(f"{clash} runs on {known.host} already (--data-parallel-start-rank, --node-rank)")
        before = self.joined.get(supervisor)
        self.joined[supervisor] = now = Joined(node.host, node.ranks, node.workers)
        if before is not None:
            now.processes, now.standbys = before.processes, before.standbys
        return NodeWelcome()

    def report(self, supervisor: Identity, report: NodeReport) -> None:
        node = self.joined.get(supervisor)
        if node is not None:
            node.processes = tuple(process for process in report.processes if node.runs(process.identity))
            node.standbys = report.standbys

    def lost(self, supervisor: Identity) -> Joined | None:
        """Its supervisor is silent. None when it had not joined, or was lost before (and refused since)."""
        node = self.joined.get(supervisor)
        if node is None or node.lost:
            return None
        node.lost = True
        return node

    def missing(self, num_ranks: int, num_workers: int) -> str:
        """Names the ranks that are on no node that is there, else the workers; "" when all are there."""
        there = [node for node in (self._own, *self.joined.values()) if not node.lost]
        ranks = set(range(num_ranks)) - {i for node in there for i in range(node.ranks[0], sum(node.ranks))}
        if ranks:
            return _numbers("rank", ranks)
        workers = set(range(num_workers)) - {i for node in there for i in range(node.workers[0], sum(node.workers))}
        return _numbers("worker", workers) if workers else ""

    def is_of(self, supervisor: Identity, identity: Identity) -> bool:
        """Whether that supervisor may speak of this process."""
        node = self.joined.get(supervisor)
        return node is not None and node.runs(identity)


def _numbers(what: str, numbers: set[int]) -> str:
    """'rank 3', 'ranks 1 to 3', 'ranks 1, 3, 5'."""
    first, last = min(numbers), max(numbers)
    if first == last:
        return f"{what} {first}"
    if last - first + 1 == len(numbers):
        return f"{what}s {first} to {last}"
    return f"{what}s {', '.join(map(str, sorted(numbers)))}"


def _clash(known: Joined, node: NodeJoin) -> str:
    """Names the first rank or worker that both nodes have, '' for none."""
    for name, ours, theirs in (("rank", known.ranks, node.ranks), ("worker", known.workers, node.workers)):
        first = max(ours[0], theirs[0])
        if first < min(ours[0] + ours[1], theirs[0] + theirs[1]):
            return f"{name} {first}"
    return ""


SECTIONS = ("model", "cache", "scheduler", "worker", "parallel", "speculative")
SAMPLE_BYTES = 64 << 10
WEIGHTS = {".safetensors", ".gguf", ".bin", ".pt", ".pth"}


def facts(config: MeshConfig) -> dict[str, str]:
    """The facts that are compared, by the names that users know."""
    resolved = config.require_resolved()
    found = {"the version": __version__, "the model": f"{_model_digest(config, resolved)} ({resolved.served_names[0]})"}
    for setting in flags.settings():
        if setting.section in SECTIONS and not ((setting.meta and setting.meta.extra) or {}).get("per_node"):
            value = getattr(resolved, setting.name, getattr(getattr(config, setting.section), setting.name))
            found[setting.flag] = str(value).replace(" ", "")
    found["--kv-events-config"] = "enabled" if config.kv_events.enabled else "absent"  # its addresses may differ
    if config.worker.deterministic:
        found |= {"torch": importlib.metadata.version("torch")} | _compiler(resolved.device)
    return found


def _compiler(device: str) -> dict[str, str]:
    """What kernels' last bits depend on beside their source, of which the version says. GPUs are all of the one compute capability that
    --deterministic is proven for."""
    if device != "cuda":
        return {"the processor": _processor()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return {"triton": importlib.metadata.version("triton")}
    return {"triton": "absent"}


def _processor() -> str:
    """A digest of the instruction set that this host's kernels are compiled for, and the processor's name."""
    kinds = ("model name", "flags", "Features", "CPU part")
    lines = {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(kinds)}
    names = [line.partition(":")[2].strip() for line in sorted(lines) if line.startswith(("model name", "CPU part"))]
    return f"{hashlib.sha256(joined(*(line.encode() for line in sorted(lines)))).hexdigest()[:12]} ({', '.join(names)})"


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
        return digest.hexdigest()[:12]
    for sample in _samples(folder_of(resolved.weights_url) if resolved.weights_url else Path(resolved.model_path)):
        digest.update(joined(sample))
    return digest.hexdigest()[:12]


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
