"""A whole mesh in one thread: simulated time and network around the real Mesh, Sessions, Apps and cores.

What is real: runtime/mesh/mesh.py and remote.py, protocol/, each App's io.py and every core. What is simulated: the event loop
(`Loop`), the sockets (network.py), the workers' threads (group.py) and the supervisors (supervisors.py). Everything random is
drawn from generators that are seeded per process and per link, so that a seed replays the same history.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING, cast

from life import Process, Timer
from network import Inbox, Killed, Outbox
from story import show
from supervisors import Supervisor

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges import control
from meshlm.protocol.weights import WeightsVersion
from meshlm.protocol.wire.ids import HEAD, Identity, Incarnation, Role
from meshlm.runtime.process.process import App

if TYPE_CHECKING:
    from group import Group, Together
    from mock_worker import Model

BEGIN_S = 1000.0  # simulated seconds since the epoch at the start
DIED_S = 0.02  # at most, until the supervisor has seen a death


class World:
    """Clock, network and what starts processes. Faults are calls of kill, pause, cut, break_link, slow_link and double_link."""

    def __init__(
        self,
        seed: int,
        configs: Sequence[MeshConfig],
        host_of: Callable[[Identity], int],
        make_app: Callable[[Identity], App],
        on_arrival: Callable[[int], None],
        speed_s: float,
        hears_before_start: bool = True,
        story: list[str] | None = None,
    ) -> None:
        self.now = BEGIN_S
        self.configs, self.host_of = configs, host_of  # one for each host
        self.make_app, self.on_arrival, self.speed_s = make_app, on_arrival, speed_s
        self.hears_before_start = hears_before_start  # frames may be read before App.start has run
        self.story = story
        self.dice = random.Random(seed)
        self.inboxes: dict[str, Inbox] = {}
        self.processes: dict[Identity, Process] = {}  # those that live
        self.identities: list[Identity] = []
        self.num_frames = self.num_ports = 0
        self.num_deaths: Counter[Role] = Counter()
        self.whole_from = BEGIN_S  # what was killed is started again by then
        self._queue: list[tuple[float, int, Timer]] = []
        self._number = 0
        self._last_life = 0
        self._entered: Process | None = None  # whose loop is the running one
        self.cuts: dict[tuple[int, int], float] = {}  # from host to host: until when nothing passes
        self.together: dict[int, Together] = {}  # by the epoch of their group
        self.weights: dict[Path, WeightsVersion] = {}  # by run directory: what a coordinator has written there
        self.groups: dict[tuple[int, ...], Group] = {}  # by the lives that have met
        self.memories: dict[str, Model] = {}  # of workers, whose pages others read
        self.supervisors = [config.node.index if config.node else 0 for config in configs]
        for index in self.supervisors:
            self._spawn(Identity(Role.SUPERVISOR, index))

    # --- the clock ---

    def at(self, when: float, process: "Process | None", callback: Callable[..., object], *arguments: object) -> Timer:
        self._number += 1
        timer = Timer(process, callback, arguments)
        heappush(self._queue, (when, self._number, timer))
        return timer

    def enter(self, process: Process) -> None:
        self._entered = process
        asyncio._set_running_loop(cast(asyncio.AbstractEventLoop, process.loop))

    def advance(self, seconds: float) -> None:
        """Let everything happen that is due within these simulated seconds."""
        end, queue = self.now + seconds, self._queue
        while queue and queue[0][0] <= end:
            when, number, timer = heappop(queue)
            callback, process = timer.callback, timer.process
            if callback is None or (process is not None and not process.alive):
                continue
            if process is not None:
                if process.paused_until > when:
                    heappush(queue, (process.paused_until, number, timer))
                    continue
                if process is not self._entered:
                    self.enter(process)
            self.now = when
            try:
                callback(*timer.arguments)
            except Killed:
                assert process is not None
                assert not process.alive
        self.now = end

    def arrived(self, num_frames: int) -> None:
        self.num_frames += num_frames
        self.on_arrival(self.num_frames)

    # --- the supervisor ---

    def start(self, identity: Identity, delay_s: float = 0.0) -> None:
        """Add a process to the mesh."""
        self.identities.append(identity)
        self.at(self.now + delay_s, None, self._spawn, identity)

    def _spawn(self, identity: Identity) -> None:
        self._last_life = max(self._last_life + 1, int(self.now * 1e9))
        slow = identity.role in (Role.DETOKENIZER, Role.WORKER)
        load_s = self.dice.random() ** 2 * (0.3 if slow else 0.01)
        app = self.make_app(identity)
        life = Incarnation(self._last_life)
        self.tell(None, "starts", identity, f"({life})")
        self.processes[identity] = Process(self, identity, life, app, load_s, self.host_of(identity))

    def kill(self, identity: Identity, restart_s: float, by_itself: bool = False) -> Process | None:
        """kill -9. Its supervisor sees it, tells all, and starts it again later. None when it is not there now."""
        process = self.processes.pop(identity, None)
        if process is None:
            return None
        self.num_deaths[identity.role] += 1
        self.tell(None, "ends" if by_itself else "kills", identity, f"({process.incarnation})")
        process.alive = False
        for inbox in process.inboxes:
            inbox.closed_at = self.now
            del self.inboxes[inbox.address]
        for outbox in process.outboxes:
            outbox.break_off(0.0)
        if not by_itself:
            self.whole_from = max(self.whole_from, self.now + restart_s)
        seen_at = self.now + self.dice.random() ** 2 * DIED_S
        supervisor = self.supervisor_of(process.host)
        died = cast(Supervisor, supervisor.app).on_death
        self.at(seen_at, supervisor, died, control.Died(identity, process.incarnation))
        self.at(seen_at + restart_s, None, self._spawn, identity)
        return process

    def supervisor_of(self, host: int) -> Process:
        return self.processes[Identity(Role.SUPERVISOR, self.supervisors[host])]

    # --- other faults ---

    def pause(self, identity: Identity, seconds: float) -> None:
        """SIGSTOP, or a long turn of the loop."""
        if identity in self.processes:
            self.tell(None, "pauses", identity, f"{seconds:.2f} s")
            process = self.processes[identity]
            process.paused_until = max(process.paused_until, self.now + seconds)

    def outbox(self, sender: Identity, receiver: Identity) -> Outbox | None:
        process = self.processes.get(sender)
        link = process.mesh._peers.get(receiver) if process is not None else None
        return cast("Outbox | None", link and link.outbox)

    def break_link(self, sender: Identity, receiver: Identity, for_s: float) -> None:
        if (outbox := self.outbox(sender, receiver)) is not None:
            self.tell(None, "breaks", sender, f"-> {receiver} soon, for {for_s:.2f} s")
            outbox.break_soon(for_s)

    def lose_link(self, one: Identity, other: Identity) -> None:
        """`one` gives its session with `other` up: that one does not read, say."""
        if (process := self.processes.get(one)) is not None:
            self.tell(None, "loses", one, f"-> {other}")
            self.at(self.now, process, process.mesh.drop, other, "it does not read its messages")

    def slow_link(self, sender: Identity, receiver: Identity, for_s: float, delay_s: float) -> None:
        """What is sent in the next `for_s` comes `delay_s` later."""
        if (outbox := self.outbox(sender, receiver)) is not None:
            self.tell(None, "slows", sender, f"-> {receiver} by {delay_s:.2f} s for {for_s:.2f} s")
            outbox.slow_until, outbox.slow_s = self.now + for_s, delay_s

    def double_link(self, sender: Identity, receiver: Identity, for_s: float) -> None:
        """What is sent in the next `for_s` comes twice, the second time beside later frames."""
        if (outbox := self.outbox(sender, receiver)) is not None:
            self.tell(None, "doubles", sender, f"-> {receiver} for {for_s:.2f} s")
            outbox.twice_until = self.now + for_s

    def cut(self, routes: tuple[tuple[int, int], ...], for_s: float, notice_s: float) -> None:
        """Between these hosts, from each first to its second, nothing passes for so long; heartbeats notice it after `notice_s`."""
        self.tell(None, "cuts", HEAD, f"hosts {routes} for {for_s:.2f} s")
        for route in routes:
            self.cuts[route] = max(self.cuts.get(route, 0.0), self.now + for_s)
        for process in self.processes.values():
            for outbox in process.outboxes:
                outbox.cut_for(routes, for_s, notice_s)

    def whole_at(self, route: tuple[int, int]) -> float:
        """When a connection between these hosts can be made: both directions are needed."""
        one, other = route
        return max(self.cuts.get(route, 0.0), self.cuts.get((other, one), 0.0))

    def tell(self, who: Process | None, verb: str, whom: Identity, what: object) -> None:
        if self.story is not None and (text := show(what)):
            name = who.identity if who is not None else "world"
            self.story.append(
                f"{self.now - BEGIN_S:9.4f} #{self.num_frames:<4} {name!s:14} {verb:7} {whom!s:14} {text}"
            )
