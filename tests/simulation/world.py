"""A whole mesh in one thread: simulated time and network around the real Mesh, Sessions, Apps and cores.

What is real: runtime/mesh.py, protocol/, each App's io.py (but the worker's) and every core. What is simulated: the event loop
(`Loop`), the sockets (network.py) and the supervisor. Everything random is drawn from generators that are seeded per process
and per link, so that a seed replays the same history.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from heapq import heappop, heappush
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar, cast
from unittest.mock import patch

import msgspec
from clients import LOADED, TABLE
from msgspec import Struct
from network import Inbox, Outbox, running
from story import show

from meshlm.coordinator import io as coordinator_io
from meshlm.detokenizer import io as detokenizer_io
from meshlm.frontend import io as frontend_io
from meshlm.protocol import control_edge as control
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.ids import Identity, Incarnation, Role
from meshlm.runtime import mesh as mesh_module
from meshlm.runtime.mesh import COORDINATOR, SUPERVISOR, Mesh
from meshlm.runtime.process import App
from meshlm.scheduler_proc import io as scheduler_io

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


class Loop:
    """What Mesh and the Apps ask of asyncio's loop."""

    def __init__(self, process: "Process") -> None:
        self.process, self.world = process, process.world

    def time(self) -> float:
        return self.world.now

    def call_soon(self, callback: Callable[..., object], *arguments: object) -> Timer:
        return self.world.at(self.world.now, self.process, callback, *arguments)

    def call_soon_threadsafe(self, callback: Callable[..., object], *arguments: object) -> Timer:
        return self.call_later(self.process.dice.random() * 1e-3, callback, *arguments)

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
        self, world: "World", identity: Identity, incarnation: Incarnation, app: App, load_s: float, blocking: bool
    ) -> None:
        self.world, self.identity, self.incarnation, self.app = world, identity, incarnation, app
        self.dice = random.Random(world.dice.getrandbits(32))
        self.alive, self.started = True, False
        self.paused_until = 0.0
        self.inbox: Inbox | None = None
        self._core: Checked | None = None
        self.outboxes: dict[str, Outbox] = {}
        self.loop = Loop(self)
        world.enter(self)
        self.mesh = Mesh(identity, incarnation, world.config, self)
        drive(self.mesh.open())
        delay_s = self.dice.random() * 2e-3 if world.hears_before_start else 0.0
        self.loop.call_later(delay_s, self._begin, load_s, blocking)

    def _begin(self, load_s: float, blocking: bool) -> None:
        """start() runs: most Apps' does not give the loop back before it is done."""
        if blocking:
            self.paused_until = self.world.now + load_s
        self.loop.call_later(load_s, self._start)

    def _start(self) -> None:
        drive(self.app.start(self.mesh))
        self.started = True
        self.mesh.set_ready()
        self.check()

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
        if peer != SUPERVISOR:
            self.app.on_peer_up(peer, incarnation)
            self.check()

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        self.world.tell(self, "sees", peer, f"down ({incarnation}): {reason}")
        if peer != SUPERVISOR:
            self.app.on_peer_down(peer, incarnation, reason)
            self.check()

    def flush(self) -> None:
        self.app.flush()
        self.check()


class Supervisor:
    """What supervisor/io.py does about deaths."""

    def __init__(self) -> None:
        self._dead: dict[Identity, control.Died] = {}
        self._mesh: Mesh | None = None
        self._ranks: control.SetRanks | None = None

    async def start(self, mesh: Mesh) -> dict[str, str]:
        self._mesh = mesh
        return {}

    def set_ranks(self, num_ranks: int) -> None:
        """A change of their number as the coordinator sees it; the processes stay."""
        self._ranks = control.SetRanks(num_ranks)
        self._tell_ranks()

    def _tell_ranks(self) -> None:
        assert self._mesh is not None
        if self._ranks is not None and COORDINATOR in self._mesh.peers(Role.COORDINATOR):
            self._mesh.send(COORDINATOR, self._ranks)

    def tell_died(self, died: control.Died) -> None:
        assert self._mesh is not None
        self._dead[died.identity] = died
        for role in Role:
            for peer in self._mesh.peers(role):
                self._mesh.send(peer, died)

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        if self._mesh is not None:
            for died in self._dead.values():
                self._mesh.send(peer, died)
        if peer == COORDINATOR:
            self._tell_ranks()

    def on_message(self, peer: Identity, message: Struct) -> None: ...
    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None: ...
    def flush(self) -> None: ...
    def beat(self) -> tuple[int, str]:
        return 0, ""

    async def drain(self, limit_s: float) -> None: ...
    async def stop(self) -> None: ...


class World:
    """Clock, network and supervisor. Faults are calls of kill, pause, break_link and slow_link."""

    def __init__(
        self,
        seed: int,
        config: MeshConfig,
        make_app: Callable[[Identity], App],
        on_arrival: Callable[[int], None],
        speed_s: float,
        hears_before_start: bool = True,
        story: list[str] | None = None,
    ) -> None:
        self.now = BEGIN_S
        self.config, self.make_app, self.on_arrival, self.speed_s = config, make_app, on_arrival, speed_s
        self.hears_before_start = hears_before_start  # frames may be read before App.start has run
        self.story = story
        self.dice = random.Random(seed)
        self.inboxes: dict[str, Inbox] = {}
        self.processes: dict[Identity, Process] = {}  # those that live
        self.identities: list[Identity] = []
        self.num_frames = 0
        self._queue: list[tuple[float, int, Timer]] = []
        self._number = 0
        self._last_life = 0
        self._entered: Process | None = None  # whose loop is the running one
        self._spawn(SUPERVISOR)

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
            callback(*timer.arguments)
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
        blocking = identity.role is not Role.WORKER
        self.processes[identity] = Process(self, identity, life, app, load_s, blocking)

    def kill(self, identity: Identity, restart_s: float) -> Process | None:
        """kill -9. The supervisor sees it, tells all, and starts it again later. None when it is not there now."""
        process = self.processes.pop(identity, None)
        if process is None:
            return None
        self.tell(None, "kills", identity, f"({process.incarnation})")
        process.alive = False
        assert process.inbox is not None
        process.inbox.closed_at = self.now
        self.inboxes = {address: box for address, box in self.inboxes.items() if box is not process.inbox}
        for outbox in process.outboxes.values():
            outbox.break_off(0.0)
        seen_at = self.now + self.dice.random() ** 2 * DIED_S
        supervisor = self.processes[SUPERVISOR]
        tell = cast(Supervisor, supervisor.app).tell_died
        self.at(seen_at, supervisor, tell, control.Died(identity, process.incarnation))
        self.at(seen_at + restart_s, None, self._spawn, identity)
        return process

    # --- other faults ---

    def pause(self, identity: Identity, seconds: float) -> None:
        """SIGSTOP, or a long turn of the loop."""
        if identity in self.processes:
            self.tell(None, "pauses", identity, f"{seconds:.2f} s")
            process = self.processes[identity]
            process.paused_until = max(process.paused_until, self.now + seconds)

    def outbox(self, sender: Identity, receiver: Identity) -> Outbox | None:
        process = self.processes.get(sender)
        return process.outboxes.get(process.mesh.address_of(receiver)) if process is not None else None

    def break_link(self, sender: Identity, receiver: Identity, for_s: float) -> None:
        if (outbox := self.outbox(sender, receiver)) is not None:
            self.tell(None, "breaks", sender, f"-> {receiver} soon, for {for_s:.2f} s")
            outbox.break_soon(for_s)

    def slow_link(self, sender: Identity, receiver: Identity, for_s: float, delay_s: float) -> None:
        """What is sent in the next `for_s` comes `delay_s` later."""
        if (outbox := self.outbox(sender, receiver)) is not None:
            self.tell(None, "slows", sender, f"-> {receiver} by {delay_s:.2f} s for {for_s:.2f} s")
            outbox.slow_until, outbox.slow_s = self.now + for_s, delay_s

    def tell(self, who: Process | None, verb: str, whom: Identity, what: object) -> None:
        if self.story is not None and (text := show(what)):
            name = who.identity if who is not None else "world"
            self.story.append(
                f"{self.now - BEGIN_S:9.4f} #{self.num_frames:<4} {name!s:14} {verb:6} {whom!s:14} {text}"
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
