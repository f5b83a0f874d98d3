"""One life of a simulated process: its loop, its timers, and what runtime/process/process.py does around its App."""

import random
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from msgspec import Struct
from network import Inbox, Outbox

from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.process.process import LAST_WORDS_S, App

if TYPE_CHECKING:
    from world import World

FLUSHES = (Role.SCHEDULER, Role.DETOKENIZER, Role.FRONTEND)  # whose App.flush does something

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

    def cancelled(self) -> bool:
        return False

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
    """One life of a process, as runtime/process/process.py runs it."""

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
            client = getattr(self.app, "client", None)
            self._core = cast("Checked | None", getattr(self.app, "_core", None) or getattr(client, "tracker", None))
        if self._core is not None:
            self._core.check()

    def sessions(self) -> dict[Identity, Any]:
        return {peer: link.session for peer, link in self.mesh._peers.items()}

    # --- Listener ---

    def on_message(self, peer: Identity, message: Struct) -> None:
        self.world.tell(self, "<-", peer, message)
        self.app.on_message(peer, message)
        if (link := self.mesh._peers.get(peer)) is not None:  # the coordinator tells itself what is blocked
            link.session.check()
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
        if self.identity.role in FLUSHES:
            self.check()
