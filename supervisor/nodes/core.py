"""The head's pure core for other nodes: who may join, what runs there. Called by network.py with what their supervisors say."""

from dataclasses import dataclass

from meshlm.protocol.edges.control import NodeJoin, NodeRefused, NodeReport, NodeWelcome, ProcessReport, StandbyReport
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.supervisor.nodes import agreement

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
        found = agreement.differences(self._facts, node.facts)
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
