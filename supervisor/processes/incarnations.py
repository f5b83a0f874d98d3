"""The incarnations of this host's processes: who is in which place, and the standbys that wait for one. Owned by io.py.

There are two sorts of standbys: one that a restart loads for a certain place, and warm ones (--standby-roles), which wait for the
death of any process of their role: imports and a large vocabulary are most of the time that such a death costs.

It does what the group decided and tells the group what became of that. Asking a process over the mesh to end is io.py's.
"""

import asyncio
import contextlib
import signal
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.control import Died
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.runtime.process import black_box, in_hand
from meshlm.supervisor.group import core, events, rolling
from meshlm.supervisor.group.succession import Place
from meshlm.supervisor.processes.adopted import Adopted
from meshlm.supervisor.processes.children import Child

STACKS_S = 0.2  # that a stuck process has for writing its stacks
WARM_AFTER_S = 2.0  # after the last one was taken, or the mesh was ready: those that serve need the processor first
WARM_AGAIN_S = 30.0  # after one that ended without having been taken


class Incarnations:
    """`config` gives the configuration of now, `do` hands an event to the group."""

    def __init__(self, config: Callable[[], MeshConfig], do: Callable[[rolling.Event], None]) -> None:
        self._config, self._do = config, do
        self._loop = asyncio.get_running_loop()
        self._children: dict[Identity, Child | Adopted] = {}
        self.environment: dict[str, str] = {}  # variables of workers
        self.ends: dict[Identity, str] = {}  # how the last incarnation of each has ended
        self.left: dict[Identity, in_hand.Left] = {}  # ... and which requests it had
        self._standbys: dict[Identity, Child] = {}
        self._had: set[Identity] = set()  # places that have had an incarnation
        self._warm: dict[Role, Child] = {}
        self._warm_at: dict[Role, float] = {}  # not before
        self._alive: set[Child | Adopted] = set()  # all, those too that have lost their place
        self._all_gone = asyncio.Event()
        self._ending = False

    def of(self, identity: Identity) -> Child | Adopted | None:
        return self._children.get(identity)

    def adopt(self, place: Place) -> None:
        """Watch over a process that another supervisor started; the group hears a moment later where that has ended meanwhile."""
        self._had.add(place.identity)
        try:
            child = Adopted(place, has_pipe=self._config().run.log_format == "json")
        except OSError:
            self.ends[place.identity] = core.exit_text(core.UNSEEN_END)
            self._loop.call_soon(self._lost, place.identity, place.incarnation, core.UNSEEN_END)
            return
        self._children[place.identity] = child
        self._alive.add(child)
        child.watch(self._loop, self._exited)

    def pids(self) -> dict[Identity, int]:
        return {identity: child.pid for identity, child in self._children.items()}

    def spawn(self, identity: Identity, incarnation: Incarnation) -> None:
        """Give the place to its standby, where one is alive, else to a new process."""
        child = self._standbys.pop(identity, None) or self._take_warm(identity.role)
        if child is None or not child.take_turn(self._loop, identity, incarnation, self._config_of(identity)):

            def failed(why: str) -> None:
                self._tell(events.Exited(identity, incarnation, 1, f"{identity} could not be started: {why}"))

            child = self._started(identity, incarnation, failed)
        if child is not None:
            self._children[identity] = child
            self._had.add(identity)

    def _config_of(self, identity: Identity) -> MeshConfig:
        """A worker that follows another one measures no kernels: requests wait for it, and it computes as the other did."""
        config = self._config()
        if identity.role is not Role.WORKER or identity not in self._had or config.worker.tune == "off":
            return config
        return replace(config, worker=replace(config.worker, tune="kept"))

    def _started(
        self, identity: Identity, incarnation: Incarnation, failed: Callable[[str], None], *, standby: bool = False
    ) -> Child | None:
        """A new process. Where the system has none to give (processes, descriptors, memory), `failed` hears why a moment later."""
        try:
            child = Child(identity, incarnation, self._config_of(identity), self.environment, standby=standby)
        except OSError as error:
            self._loop.call_soon(failed, error.strerror or str(error))
            return None
        self._alive.add(child)
        child.watch(self._loop, self._exited)
        return child

    def keep_warm(self, roles: Iterable[Role], now: float) -> None:
        """Load a standby for each of these roles, if there is none and it is time. `now` is of the loop."""
        for role in roles:
            if role not in self._warm and now >= self._warm_at.setdefault(role, now + WARM_AFTER_S):
                child = self._started(Identity(role), Incarnation(0), lambda _: None, standby=True)
                if child is None:
                    self._warm_at[role] = now + WARM_AGAIN_S
                else:
                    self._warm[role] = child
                    child.when_loaded(self._loop, lambda _: None)

    def standbys(self) -> list[Child]:
        """Both sorts, loaded or not yet."""
        return [*self._standbys.values(), *self._warm.values()]

    def _take_warm(self, role: Role) -> Child | None:
        child = self._warm.pop(role, None)
        if child is not None:
            self._warm_at[role] = self._loop.time() + WARM_AFTER_S
            if child.is_stopped():  # somebody did that; it would not begin
                child.kill()
                return None
        return child

    def end_warm(self) -> None:
        """They were loaded from what may have been replaced since."""
        for role in list(self._warm):
            self._warm.pop(role).kill()
            self._warm_at[role] = self._loop.time()

    def prepare(self, identity: Identity) -> None:
        def tell(why: str = "") -> None:
            self._tell(rolling.Prepared(identity, why))

        child = self._started(identity, Incarnation(0), tell, standby=True)
        if child is not None:
            self._standbys[identity] = child
            child.when_loaded(self._loop, lambda _: tell())

    def end_stuck(self, identity: Identity) -> bool:
        """faulthandler writes its stacks, then it is killed. Was it stopped? Then it is killed as it is: woken, it would work on, and
        faulthandler, which walks the frames of running threads, could crash it."""
        child = self._children[identity]
        if child.is_stopped():
            child.kill()
            return True
        child.send_signal(signal.SIGUSR1)
        self._loop.call_later(STACKS_S, child.kill)
        return False

    def kill(self, identity: Identity) -> None:
        if identity in self._children:
            self._children[identity].kill()

    def kill_in(self, identity: Identity, delay_s: float) -> None:
        """Kill this incarnation then; the place's next incarnation is left alone."""
        child = self._children.get(identity)
        if child is not None:
            self._loop.call_later(delay_s, child.kill)

    def kill_standbys(self) -> None:
        for standby in self._standbys.values():
            standby.kill()

    def kill_all(self) -> None:
        for child in self._alive:
            child.kill()

    def _tell(self, event: rolling.Event) -> None:
        if not self._ending:
            self._do(event)

    async def end_all(self, limit_s: float) -> None:
        """Kill all and wait until they are gone, but no longer than that: then their ports and their GPU's memory are free. The group
        is told of no end any more, so that nobody is started again."""
        self._ending = True
        self.kill_all()
        self._all_gone.clear()
        if self._alive:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_gone.wait(), limit_s)

    def _exited(self, child: Child | Adopted, code: int) -> None:
        self._alive.discard(child)
        if not self._alive:
            self._all_gone.set()
        if self._standbys.get(child.identity) is child:
            del self._standbys[child.identity]
            self._tell(rolling.Prepared(child.identity, core.exit_text(code)))
            return
        if not child.incarnation:  # it never had a place
            role = child.identity.role
            if self._warm.get(role) is child:
                del self._warm[role]
                self._warm_at[role] = self._loop.time() + WARM_AGAIN_S
            return
        if self._children.get(child.identity) is child:
            del self._children[child.identity]
            self.ends[child.identity] = core.exit_text(code)
        self._lost(child.identity, child.incarnation, code)

    def _lost(self, identity: Identity, incarnation: Incarnation, code: int) -> None:
        """Tell the group of an end, with what the process had in hand."""
        box = black_box.path_of(Path(self._config().run.run_dir), identity)
        self.left[identity] = left = in_hand.left_by(box, incarnation)
        # Its last words may still be in the inbox: let the loop read them first.
        has_requests = bool(left.num_requests or left.in_hand)
        self._loop.call_soon(self._tell, events.Exited(identity, incarnation, code, has_requests=has_requests))


MAX_IN_HAND = 64


class KnownDeaths:
    """The last death of each process, told to whoever is there and to whoever comes later."""

    def __init__(self) -> None:
        self._last: dict[Identity, Died] = {}  # the last incarnation that ended, of each that has had one
        self._in_hand: deque[Died] = deque(maxlen=MAX_IN_HAND)  # deaths of frontends, for those that follow them

    def learn(self, died: Died) -> bool:
        """Keep it. False: a later one is known, of which another node has not heard yet."""
        if self._last.setdefault(died.identity, died).incarnation > died.incarnation:
            return False
        self._last[died.identity] = died
        if died.identity.role is Role.FRONTEND and died.in_hand:
            self._in_hand.append(died)
        return True

    def last(self) -> Iterable[Died]:
        return self._last.values()

    def for_newcomers(self) -> tuple[Died, ...]:
        """What a process that has just begun is told, which may have met those that died."""
        return (*self._in_hand, *self._last.values())
