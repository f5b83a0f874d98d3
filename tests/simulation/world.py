"""A whole mesh in one thread: simulated time and network around the real Mesh, Sessions, Apps and cores.

What is real: runtime/mesh.py and remote.py, protocol/, each App's io.py and every core. What is simulated: the event loop
(`Loop`), the sockets (network.py), the workers' threads (group.py) and the supervisors (supervisors.py). Everything random is
drawn from generators that are seeded per process and per link, so that a seed replays the same history.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from heapq import heappop, heappush
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast
from unittest.mock import patch

import msgspec
import hosts
from clients import LOADED, TABLE
from msgspec import Struct
from network import Inbox, Killed, Outbox, running
from story import show
from supervisors import Supervisor

from meshlm.coordinator import io as coordinator_io
from meshlm.detokenizer import io as detokenizer_io
from meshlm.frontend import io as frontend_io
from meshlm.protocol import control_edge as control
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.ids import Identity, Incarnation, Role
from meshlm.runtime import mesh as mesh_module
from meshlm.runtime import remote as remote_module
from meshlm.runtime.mesh import Mesh
from meshlm.runtime.process import LAST_WORDS_S, App
from meshlm.scheduler_proc import io as scheduler_io
from meshlm.supervisor import network as supervisor_network
from meshlm.workers import io as worker_io
from meshlm.workers.parallel import membership

if TYPE_CHECKING:
    from group import Group

SUPERVISOR = Identity(Role.SUPERVISOR, 0)
BEGIN_S = 1000.0  # simulated seconds since the epoch at the start
DIED_S = 0.02  # at most, until the supervisor has seen a death

T = TypeVar("T")


class Violation(AssertionError):
    """An invariant does not hold; the text says which."""


class Checked(Protocol):
    def check(self) -> None: ...


class Timer:
    """One event to come. Without a process it is the network's or the test's own."""

    __slots__ = ("arguments", "callback", "process")

    def __init__(
        self, process: "Process | None", callback: Callable[..., object], arguments: tuple[object, ...]
    ) -> None:
        self.process, self.arguments = process, arguments
        self.callback: Callable[..., object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Future:
    """One that the simulated loop completes."""

    def __init__(self, loop: "Loop") -> None:
        self._loop, self._result, self._is_done = loop, cast(Any, None), False
        self.on_done: Callable[[], None] | None = None

    def get_loop(self) -> "Loop":
        return self._loop

    def done(self) -> bool:
        return self._is_done

    cancelled = lambda self: False  # noqa: E731

    def set_result(self, result: object) -> None:
        self._result, self._is_done = result, True
        if self.on_done is not None:
            self._loop.call_soon(self.on_done)

    def set_exception(self, error: BaseException) -> None:
        self.set_result(error)

    def result(self) -> object:
        return self._result

    def __await__(self) -> Generator["Future", None, object]:
        if not self._is_done:
            yield self
        return self._result


class Loop:
    """What Mesh and the Apps ask of asyncio's loop."""

    def __init__(self, process: "Process") -> None:
        self.process, self.world = process, process.world
        self._threads_at = 0.0

    def create_future(self) -> Future:
        return Future(self)

    def time(self) -> float:
        return self.world.now

    def call_soon(self, callback: Callable[..., object], *arguments: object) -> Timer:
        return self.world.at(self.world.now, self.process, callback, *arguments)

    def call_soon_threadsafe(self, callback: Callable[..., object], *arguments: object) -> Timer:
        """Soon, and in the order of the calls."""
        self._threads_at = max(self._threads_at, self.world.now + self.process.dice.random() * 1e-3)
        return self.world.at(self._threads_at, self.process, callback, *arguments)

    def call_later(self, delay_s: float, callback: Callable[..., object], *arguments: object) -> Timer:
        return self.world.at(self.world.now + delay_s, self.process, callback, *arguments)


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return cast(T, stop.value)
    raise AssertionError(f"{coroutine} waits")


# --- processes ---


class Process:
    """One life of a process, as runtime/process.py runs it."""

    def __init__(
        self, world: "World", identity: Identity, incarnation: Incarnation, app: App, load_s: float, host: int
    ) -> None:
        self.world, self.identity, self.incarnation, self.app = world, identity, incarnation, app
        self.host, self.load_s = host, load_s
        self.dice = random.Random(world.dice.getrandbits(32))
        self.alive, self.started = True, False
        self.paused_until = 0.0
        self.sends_left = 0  # to workers, before it dies; 0: it does not
        self.inboxes: list[Inbox] = []
        self._core: Checked | None = None
        self.outboxes: list[Outbox] = []
        self.loop = Loop(self)
        world.enter(self)
        self.mesh = Mesh(identity, incarnation, world.configs[host], self)
        self.mesh.on_fatal = failed = cast(Any, Future(self.loop))
        failed.on_done = self._fail
        drive(self.mesh.open())
        if identity.role is Role.SUPERVISOR:
            self._start()
            return
        delay_s = self.dice.random() * 2e-3 if world.hears_before_start else 0.0
        self.loop.call_later(delay_s, self._begin)

    def _begin(self) -> None:
        """start() runs: but for a worker's, it does not give the loop back before it is done."""
        if self.identity.role is Role.WORKER:
            self._start()
            return
        self.paused_until = self.world.now + self.load_s
        self.loop.call_later(self.load_s, self._start)

    def _start(self) -> None:
        starting = cast(Coroutine[Future, None, object], self.app.start(self.mesh))

        def go_on() -> None:
            try:
                starting.send(None).on_done = go_on
            except StopIteration:
                self.started = True
                self.mesh.set_ready()
                self.check()

        go_on()

    def _fail(self) -> None:
        """Its own decision: it ends, after some last words."""
        reason = cast(Any, self.mesh.on_fatal).result()
        self.world.tell(self, "fails", self.identity, str(reason))
        if self.identity.role is not Role.WORKER:
            raise Violation(f"{self.identity} failed: {reason}")
        self.loop.call_later(LAST_WORDS_S, self.world.kill, self.identity, self.dice.random() ** 4 * 0.1, True)

    def check(self) -> None:
        if self._core is None:
            self._core = cast("Checked | None", getattr(self.app, "_core", None) or getattr(self.app, "_desk", None))
        if self._core is not None:
            self._core.check()

    def sessions(self) -> dict[Identity, Any]:
        return {peer: link.session for peer, link in self.mesh._peers.items()}

    # --- Listener ---

    def on_message(self, peer: Identity, message: Struct) -> None:
        self.world.tell(self, "<-", peer, message)
        self.app.on_message(peer, message)
        self.mesh._peers[peer].session.check()
        self.check()

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        self.world.tell(self, "sees", peer, f"up ({incarnation})")
        if peer != self.mesh.supervisor:
            self.app.on_peer_up(peer, incarnation)
            self.check()

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        self.world.tell(self, "sees", peer, f"down ({incarnation}): {reason}")
        if peer != self.mesh.supervisor:
            self.app.on_peer_down(peer, incarnation, reason)
            self.check()

    def flush(self) -> None:
        self.app.flush()
        self.check()


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
        self._queue: list[tuple[float, int, Timer]] = []
        self._number = 0
        self._last_life = 0
        self._entered: Process | None = None  # whose loop is the running one
        self.cuts: dict[tuple[int, int], float] = {}  # from host to host: until when nothing passes
        self.groups: dict[tuple[int, ...], Group] = {}  # by the lives that have met
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
        self.tell(None, "ends" if by_itself else "kills", identity, f"({process.incarnation})")
        process.alive = False
        for inbox in process.inboxes:
            inbox.closed_at = self.now
            del self.inboxes[inbox.address]
        for outbox in process.outboxes:
            outbox.break_off(0.0)
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
        self.tell(None, "cuts", SUPERVISOR, f"hosts {routes} for {for_s:.2f} s")
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


# --- what is replaced in the product's modules ---


class _Log:
    """structlog costs more than a whole message; what is said goes into the story."""

    def __init__(self, **bound: object) -> None:
        self._process = bound.get("process")

    def bind(self, **bound: object) -> "_Log":
        return _Log(**bound)

    def debug(self, event: str, **fields: object) -> None:
        process = running()
        if process.world.story is not None:
            process.world.tell(process, "logs", process.identity, f"{event} {fields}")

    info = warning = error = exception = debug


class _Clock:
    """In the place of the module `time`."""

    @staticmethod
    def monotonic() -> float:
        return running().world.now

    time = monotonic

    @staticmethod
    def monotonic_ns() -> int:
        return int(running().world.now * 1e9)


class _Threads:
    """In the place of the detokenizer's; that it takes a moment is Loop.call_soon_threadsafe's."""

    def __init__(self, *_: object) -> None: ...

    def submit(self, work: Callable[..., object], *arguments: object) -> None:
        work(*arguments)


_decoder = cache(msgspec.msgpack.Decoder)  # making one costs as much as twenty messages


@contextmanager
def simulated() -> Iterator[None]:
    """Sockets, logs and clocks of the product are simulated within."""
    fast = SimpleNamespace(msgpack=SimpleNamespace(Decoder=_decoder), MsgspecError=msgspec.MsgspecError)
    with ExitStack() as stack:
        for module, name, fake in (
            (mesh_module, "Inbox", Inbox),
            (mesh_module, "Outbox", Outbox),
            (mesh_module, "zmq", SimpleNamespace(Context=object)),
            (remote_module, "Inbox", Inbox),
            (remote_module, "Outbox", Outbox),
            (remote_module, "tcp", hosts.tcp),
            (remote_module, "keys", hosts.keys),
            (supervisor_network, "agreement", SimpleNamespace(facts=lambda config: {}, differences=lambda *_: "")),
            (worker_io, "threading", hosts.threading),
            (worker_io, "sys", SimpleNamespace(setswitchinterval=lambda seconds: None)),
            (worker_io, "time", _Clock),
            (membership, "time", _Clock),
            (membership, "POLL_S", 0.0),
            (mesh_module, "msgspec", fast),
            (mesh_module, "_log", _Log()),
            (detokenizer_io, "tokenizer_files", SimpleNamespace(load=lambda path: LOADED)),
            (detokenizer_io, "TokenTable", lambda loaded: TABLE),
            (detokenizer_io, "ThreadPoolExecutor", _Threads),
            (frontend_io, "time", _Clock),
            (coordinator_io, "time", _Clock),
            (scheduler_io, "time", _Clock),
        ):
            stack.enter_context(patch.object(module, name, fake, create=True))
        try:
            yield
        finally:
            asyncio._set_running_loop(None)
