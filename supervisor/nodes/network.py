"""What a supervisor has to do with other nodes' supervisors: as the head, or as a node that joins one. Owned by io.py."""

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges import control as edge
from meshlm.protocol.timeline import RecordTimeline, TimelinePart
from meshlm.protocol.wire.ids import HEAD, Identity, Role
from meshlm.protocol.wire.session import RIVAL
from meshlm.supervisor.control import MeshStatus, ProcessStatus, StandbyStatus
from meshlm.supervisor.group.operations import Operations
from meshlm.supervisor.nodes import core
from meshlm.supervisor.nodes.core import Nodes
from meshlm.supervisor.recordings import Recordings

# Of ranks that are on no node: looked for, said first, said again.
LOOK_EVERY_S, SAY_AFTER_S, SAY_EVERY_S = 1.0, 10.0, 60.0


class Own(Protocol):
    """This node's supervisor, as seen from here. io.py's is one."""

    operations: Operations
    changed_settings: dict[str, str | int | float]
    recordings: Recordings

    def change(self, values: dict[str, str | int | float]) -> str: ...
    def send(self, peer: Identity, message: Struct) -> bool: ...
    def line(self, text: str) -> None: ...
    def begin(self) -> None:
        """Start this node's processes, if that was not done."""
        ...

    def tell_died(self, died: edge.Died) -> None:
        """Tell this node's processes of a death elsewhere."""
        ...

    def deaths(self) -> Iterable[edge.Died]:
        """The deaths that this node knows of, here and elsewhere: the last of each process."""
        ...

    def stop(self, drain_s: float | None = None) -> None: ...
    def fail(self, message: str) -> None: ...
    def status(self) -> MeshStatus: ...


class Head:
    """Lets nodes in, knows what runs there, and carries news of deaths between them."""

    def __init__(self, config: MeshConfig, own: Own, clock: Callable[[], float] = time.monotonic) -> None:
        assert config.node is not None
        self._own, self._parallel, self._listen, self._clock = own, config.parallel, config.network.listen, clock
        self._look_at, self._say_at = 0.0, clock() + SAY_AFTER_S
        self._nodes = Nodes(config.node.ranks, config.node.workers, core.facts(config))

    def begin(self) -> None:
        self._own.begin()

    def on_message(self, peer: Identity, message: Struct) -> None:
        match message:
            case edge.NodeJoin():
                self._join(peer, message)
            case edge.NodeReport():
                self._nodes.report(peer, message)
            case edge.Died() if self._nodes.is_of(peer, message.identity):
                self._own.tell_died(message)
                self.died(message, besides=peer)
            case TimelinePart():
                self._own.recordings.came(message)
            case edge.RestartNews():
                self._own.operations.restart_news(peer, message)

    def _join(self, peer: Identity, node: edge.NodeJoin) -> None:
        answer = self._nodes.join(peer, node)
        self._own.send(peer, answer)
        if isinstance(answer, edge.NodeRefused):
            self._own.line(f"{node.host} ({peer}) may not join: {answer.message}")
        else:
            self._own.line(f"{node.host} ({peer}) joined with {_ranks(node.ranks)}")
            for died in self._own.deaths():  # it was not told while it was not here
                self._own.send(peer, died)
            if self._own.changed_settings:
                self._own.send(peer, edge.ChangeSettings(self._own.changed_settings))

    def on_down(self, peer: Identity, reason: str) -> None:
        node = self._nodes.lost(peer)
        if node is not None:
            self._own.line(f"{node.host} ({peer}) is lost: {reason}")

    def on_up(self, peer: Identity) -> None:
        """It asks to join."""

    def died(self, died: edge.Died, besides: Identity | None = None) -> None:
        for peer, node in self._nodes.joined.items():
            if peer != besides and not node.lost:
                self._own.send(peer, died)

    def tick(self) -> None:
        """Say what still has no node, or has lost it: the mesh may serve with what is there, or wait for it."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        missing = self.missing()
        if not missing:
            self._say_at = now + SAY_AFTER_S
        elif now >= self._say_at:
            self._say_at = now + SAY_EVERY_S
            self._own.line(f"no node has {missing}; waiting for one with --headless --join {self._listen}")

    def missing(self) -> str:
        """Names the ranks or workers that are on no node that is there; "" when all are somewhere."""
        ranks = self._parallel.data_parallel_size
        return self._nodes.missing(ranks, ranks * self._parallel.workers_per_rank)

    def ended(self) -> None:
        """The head's processes ended in good order: those of the nodes end too."""
        for peer in self._nodes.joined:
            self._own.send(peer, edge.Shutdown(0.0))

    def processes(self) -> dict[Identity, Identity]:
        """The processes of the nodes that are there, with their supervisors."""
        there = ((peer, node) for peer, node in self._nodes.joined.items() if not node.lost)
        return {one.identity: peer for peer, node in there for one in node.processes}

    def rows(self) -> list[ProcessStatus]:
        nodes, now = self._nodes.joined.values(), time.time()
        found = [(node, ProcessStatus.of(one, now, node.host)) for node in nodes for one in node.processes]
        return [replace(row, state="lost") if node.lost else row for node, row in found]

    def standbys(self) -> list[StandbyStatus]:
        nodes, now = self._nodes.joined.values(), time.time()
        found = [(node, StandbyStatus.of(one, now, node.host)) for node in nodes for one in node.standbys]
        return [replace(row, state="lost") if node.lost else row for node, row in found]


class Guest:
    """A node that joins the head: asks in each new session, reports, and does what the head says."""

    def __init__(self, config: MeshConfig, own: Own, clock: Callable[[], float] = time.monotonic) -> None:
        assert config.node is not None
        self._own, self._node, self._clock = own, config.node, clock
        self._facts = core.facts(config)
        self._until = clock() + config.run.startup_timeout
        self._welcome = self._was_welcome = self._ends = False
        self._reported_at = 0.0

    def begin(self) -> None:
        """The head's welcome is waited for."""

    def on_up(self, peer: Identity) -> None:
        node = self._node
        self._own.send(HEAD, edge.NodeJoin(node.host, node.ranks, node.workers, self._facts))

    def on_down(self, peer: Identity, reason: str) -> None:
        self._welcome = False
        if not self._ends:
            self._own.line(f"the head {self._node.head} is lost ({reason}); this node goes on and waits for it")

    def on_message(self, peer: Identity, message: Struct) -> None:
        match message:
            case edge.NodeWelcome():
                self._own.line(f"joined {self._node.head} with {_ranks(self._node.ranks)}")
                self._welcome = self._was_welcome = True
                for died in self._own.deaths():  # a head takes word of a node's processes once it has let the node in
                    self._own.send(HEAD, died)
                self._own.begin()
            case edge.NodeRefused():
                self._own.fail(f"--join {self._node.head}: the head refuses this node: {message.message}")
            case edge.Died():
                self._own.tell_died(message)
            case edge.ChangeSettings():
                self._own.change(message.values)
            case RecordTimeline():
                self._own.recordings.begin(message, self._clock())
            case edge.RestartProcesses():
                self._own.operations.restart_for(peer, message)
            case edge.Shutdown():
                self._ends = True
                self._own.line("the head ends, and so does this node")
                self._own.stop(0.0)

    def refused(self, reason: str) -> None:
        """There will be no session with the head."""
        if RIVAL in reason:
            reason += "; two nodes have the same --data-parallel-start-rank or --node-rank"
        self._own.fail(f"--join {self._node.head}: the head refuses this node: {reason}")

    def died(self, died: edge.Died) -> None:
        """Tell the head of a death here; before its welcome it would not listen."""
        if self._welcome:
            self._own.send(HEAD, died)

    def tick(self) -> None:
        """Once in a while: report; give up an attempt to join that takes too long."""
        now = self._clock()
        if self._welcome and now - self._reported_at >= 1.0:
            self._reported_at = now
            self._own.send(HEAD, _report(self._own.status()))
        elif not self._was_welcome and now > self._until:
            self._own.fail(f"--join {self._node.head}: the head did not answer in time (--startup-timeout)")

    def missing(self) -> str:
        return ""

    def ended(self) -> None:
        """The head sees that this node falls silent."""

    def processes(self) -> dict[Identity, Identity]:
        return {}

    def rows(self) -> list[ProcessStatus]:
        return []

    def standbys(self) -> list[StandbyStatus]:
        return []


def _report(status: MeshStatus) -> edge.NodeReport:
    now = time.time()
    return edge.NodeReport(
        tuple(row.report(now) for row in status.processes if row.role != Role.SUPERVISOR.value),
        tuple(row.report(now) for row in status.standbys),
    )


def _ranks(places: tuple[int, int]) -> str:
    first, count = places
    if not count:
        return "workers only"
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"
